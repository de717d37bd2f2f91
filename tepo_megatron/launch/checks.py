"""Checks of a job before it is submitted."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tepo_megatron.config import RunConfig
from tepo_megatron.launch.job import BUILTIN, JOB_END_S, custom_code_files, data_files, uses_gpus, warning_lead_s
from tepo_megatron.runtime.named_check import NamedCheck, verify_all

if TYPE_CHECKING:
    from nemo_run.core.tunnel.client import Tunnel


def check_time_limit(config: RunConfig) -> None:
    """Raises ValueError if Slurm would warn the job as soon as it starts."""
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


@dataclass(frozen=True)
class _ClusterRun:
    config: RunConfig
    tunnel: Tunnel

    @property
    def where(self) -> str:
        return self.config.cluster.ssh or "this machine"

    def has(self, path: str) -> bool:
        return self.succeeds(f"ls -d {shlex.quote(path)} >/dev/null 2>&1")

    def succeeds(self, command: str) -> bool:
        return bool(self.tunnel.run(command, hide=True, warn=True).ok)

    def has_checkpoint(self, folder: str) -> bool:
        return self.succeeds(f"ls -d {shlex.quote(folder)}/checkpoints/step_*[0-9]/state.json >/dev/null 2>&1")


def check_cluster(config: RunConfig, tunnel: Tunnel) -> None:
    """Raises ValueError for missing files, or if the output folder holds a run."""
    verify_all(CLUSTER_CHECKS, _ClusterRun(config, tunnel))


def _check_model(run: _ClusterRun) -> None:
    model = run.config.model.path
    if not model.startswith(BUILTIN) and not run.has(f"{model}/config.json"):
        raise ValueError(
            f"model.path = {model} has no config.json on {run.where}; give a Hugging Face folder that every node can read "
            "('hf download NAME --local-dir FOLDER' makes one)"
        )


def _check_data(run: _ClusterRun) -> None:
    for field, source in data_files(run.config).items():
        if not source.startswith(BUILTIN) and not run.has(source):
            raise ValueError(f"{field} = {source} does not exist on {run.where}; give a file or folder there")
    for name, source in run.config.evaluate.paths.items():
        if not source.startswith(BUILTIN) and not run.has(source):
            raise ValueError(f"evaluate.sets.{name}.path = {source} does not exist on {run.where}; give a file there")


def _check_code(run: _ClusterRun) -> None:
    for plugin in run.config.objective.plugins:
        if plugin.startswith("/") and not run.has(plugin):
            raise ValueError(
                f"objective.plugins: {plugin} does not exist on {run.where}; put the same file at the same path there, or "
                "install the module on both sides and name it"
            )
    for field, file in custom_code_files(run.config).items():
        if not run.has(file):
            raise ValueError(f"{field}: {file} does not exist on {run.where}; put the file there")


def _check_images(run: _ClusterRun) -> None:
    for image in {run.config.cluster.container, run.config.cluster.rollout_container}:
        if image is not None and image.startswith(("/", ".")) and not run.has(image):
            raise ValueError(
                f"the container image {image} does not exist on {run.where}; docs/guides/cluster.md says how to make it"
            )


def _check_transformer_engine(run: _ClusterRun) -> None:
    """Other images than ``.sqsh`` are checked when the job starts."""
    image = run.config.cluster.container
    if not uses_gpus(run.config) or image is None or not image.endswith(".sqsh"):
        return
    command = f"command -v unsquashfs >/dev/null && unsquashfs -l {shlex.quote(image)}"
    listing = run.tunnel.run(command, hide=True, warn=True)
    if listing.ok and "transformer_engine" not in listing.stdout:
        raise ValueError(
            f"the container image {image} has no Transformer Engine, which training on GPUs needs; build it from "
            "docker/trainer.Dockerfile"
        )


def _check_checkpoint(run: _ClusterRun) -> None:
    config, chosen = run.config, run.config.train.resume_from
    if chosen is not None:
        folder = chosen if "/" in chosen else f"{config.output}/checkpoints/{chosen}"
        if not run.has(f"{folder}/state.json"):
            raise ValueError(f"train.resume_from = {chosen}: {folder} is no checkpoint on {run.where}; give another")
    elif config.train.resume is True and not run.has_checkpoint(str(config.output)):
        raise ValueError(
            f"train.resume = true, but {config.output} has no finished checkpoint on {run.where}; launch without --resume"
        )


def _check_output(run: _ClusterRun) -> None:
    """As in ``run/output/run_folder.py``."""
    output = str(run.config.output)
    trained = f"grep -qsv '^{{\"step\": 0[,}}]' {shlex.quote(f'{output}/metrics.jsonl')}"
    if run.has_checkpoint(output) or run.succeeds(trained):
        raise ValueError(f"output {output} already holds a run; give another folder (output=…), or continue it (--resume)")


CLUSTER_CHECKS: tuple[NamedCheck[_ClusterRun], ...] = (
    NamedCheck("model", _check_model),
    NamedCheck("data", _check_data),
    NamedCheck("code", _check_code),
    NamedCheck("container images", _check_images),
    NamedCheck("Transformer Engine", _check_transformer_engine),
    NamedCheck("checkpoint", _check_checkpoint),
    NamedCheck("output", _check_output, applies=lambda run: not run.config.train.resume),
)
