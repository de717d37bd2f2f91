"""Checks of a job before anything is submitted. Each error is a sentence with the value that is wrong and what to do."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from tepo_megatron.config import RunConfig
from tepo_megatron.launch.job import BUILTIN, JOB_END_S, data_files, own_code, uses_gpus, warning_lead_s

if TYPE_CHECKING:
    from nemo_run.core.tunnel.client import Tunnel


def check_time_limit(config: RunConfig) -> None:
    """Raises ValueError for a job that Slurm would warn as soon as it starts, and put back again and again."""
    days, _, clock = config.cluster.time_limit.rpartition("-")
    hours, minutes, seconds = (int(part) for part in clock.split(":"))
    limit_s = ((24 * int(days or 0) + hours) * 60 + minutes) * 60 + seconds
    warned_s = warning_lead_s(config)
    if limit_s <= warned_s:
        raise ValueError(
            f"cluster.time_limit = {config.cluster.time_limit} is over before the job could do anything: Slurm warns it "
            f"{warned_s} s before the end (train.warning_s = {config.train.warning_s:g}, and {JOB_END_S} s for the job's own "
            "end); give it more time, or lower train.warning_s"
        )


def check_cluster(config: RunConfig, tunnel: Tunnel) -> None:
    """Looks for the run's files on the cluster's disks.

    Raises ValueError for a folder, image or checkpoint that is missing, and for an output folder that already holds a run.
    """
    model, output = config.model.path, config.output
    if not model.startswith(BUILTIN) and not _has(tunnel, f"{model}/config.json"):
        raise ValueError(
            f"model.path = {model} has no config.json on {_where(config)}; give a Hugging Face folder that every node can read "
            "('hf download NAME --local-dir FOLDER' makes one)"
        )
    for field, source in data_files(config).items():
        if not source.startswith(BUILTIN) and not _has(tunnel, source):
            raise ValueError(f"{field} = {source} does not exist on {_where(config)}; give a file or folder there")
    for plugin in config.objective.plugins:
        if plugin.startswith("/") and not _has(tunnel, plugin):
            raise ValueError(
                f"objective.plugins: {plugin} does not exist on {_where(config)}; put the same file at the same path there, or "
                "install the module on both sides and name it"
            )
    for field, file in own_code(config).items():
        if not _has(tunnel, file):
            raise ValueError(f"{field}: {file} does not exist on {_where(config)}; put the file there")
    for name, source in config.evaluate.paths.items():
        if not source.startswith(BUILTIN) and not _has(tunnel, source):
            raise ValueError(f"evaluate.sets.{name}.path = {source} does not exist on {_where(config)}; give a file there")
    for image in {config.cluster.container, config.cluster.rollout_container}:
        if image is not None and image.startswith(("/", ".")) and not _has(tunnel, image):
            raise ValueError(
                f"the container image {image} does not exist on {_where(config)}; docs/guides/cluster.md says how to make it"
            )
    _check_transformer_engine(config, tunnel)
    _check_checkpoint(config, tunnel)
    if not config.train.resume and _holds_run(tunnel, str(output)):
        raise ValueError(f"output {output} already holds a run; give another folder (output=…), or continue it (--resume)")


def _check_checkpoint(config: RunConfig, tunnel: Tunnel) -> None:
    parent, chosen = f"{config.output}/checkpoints", config.train.resume_from
    if chosen is not None:
        folder = chosen if "/" in chosen else f"{parent}/{chosen}"
        if not _has(tunnel, f"{folder}/state.json"):
            raise ValueError(f"train.resume_from = {chosen}: {folder} is no checkpoint on {_where(config)}; give another")
    elif config.train.resume is True and not _has(tunnel, f"{parent}/step_*[0-9]/state.json", pattern=True):
        raise ValueError(
            f"train.resume = true, but {config.output} has no finished checkpoint on {_where(config)}; launch without --resume"
        )


def _check_transformer_engine(config: RunConfig, tunnel: Tunnel) -> None:
    """Looks into a ``.sqsh`` image where ``unsquashfs`` is installed. Any other image is checked when the job starts."""
    image = config.cluster.container
    if not uses_gpus(config) or image is None or not image.endswith(".sqsh"):
        return
    listing = tunnel.run(f"command -v unsquashfs >/dev/null && unsquashfs -l {shlex.quote(image)}", hide=True, warn=True)
    if listing.ok and "transformer_engine" not in listing.stdout:
        raise ValueError(
            f"the container image {image} has no Transformer Engine, which training on GPUs needs; build it from "
            "docker/trainer.Dockerfile"
        )


def _has(tunnel: Tunnel, path: str, *, pattern: bool = False) -> bool:
    command = f"ls -d {path}" if pattern else f"ls -d {shlex.quote(path)}"
    return bool(tunnel.run(f"{command} >/dev/null 2>&1", hide=True, warn=True).ok)


def _holds_run(tunnel: Tunnel, output: str) -> bool:
    """As ``train.run_folder.holds_run`` says: a checkpoint, or the row of a step that was trained."""
    if _has(tunnel, f"{shlex.quote(output)}/checkpoints/step_*[0-9]/state.json", pattern=True):
        return True
    trained = f"grep -qsv '^{{\"step\": 0[,}}]' {shlex.quote(f'{output}/metrics.jsonl')}"
    return bool(tunnel.run(trained, hide=True, warn=True).ok)


def _where(config: RunConfig) -> str:
    return config.cluster.ssh or "this machine"
