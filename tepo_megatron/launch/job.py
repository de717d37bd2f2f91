"""Absolute paths, a shell script for each role of a job, and checks."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from tepo_megatron.config import RunConfig
from tepo_megatron.config.base import Section
from tepo_megatron.runtime.named_check import NamedCheck, verify_all

if TYPE_CHECKING:
    from nemo_run.core.tunnel.client import Tunnel

JOB_END_S = 30  # from the trainer's end to Slurm's limit

TEMPLATES = Path(__file__).parent / "templates"


BUILTIN = "builtin:"

_CUSTOM_CODE = re.compile(r"[^:\n]+\.py:[A-Za-z_]\w*")

_NOT_OURS = ("cluster", "kwargs", "verifier_kwargs", "template", "system_prompt")

_ValueChange = Callable[[str, Any], Any]  # (field such as data.train[1].verifier, value) → new value


@dataclass(frozen=True)
class Role:
    """``script`` runs once on each node."""

    name: str
    first_node: int
    nodes: int
    script: str
    container: str | None


def roles(config: RunConfig) -> list[Role]:
    """The trainer's nodes come first. ``config`` is a result of :func:`on_nodes`."""
    cluster = config.cluster
    train = Role("train", 0, cluster.train_nodes, train_script(config), cluster.container)
    if not cluster.rollout_nodes:
        return [train]
    container = cluster.rollout_container or cluster.container
    return [train, Role("serve", cluster.train_nodes, cluster.rollout_nodes, serve_script(config), container)]


def on_nodes(config: RunConfig) -> RunConfig:
    """Makes paths absolute; external servers get nodes of their own.

    Raises ValueError for a relative path through ssh, and for a space in the output's path.
    """
    config = _with_absolute_paths(config)
    output = config.output
    if len(str(output).split()) != 1:
        raise ValueError(
            f"output = {str(output)!r} has a space in it, which log paths of Slurm cannot have; choose another folder"
        )
    if not config.cluster.rollout_nodes:
        return config
    server = config.rollout.server.model_copy(update={"placement": "external", "registry": output / "servers"})
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"server": server})})


def ranks_per_node(config: RunConfig) -> int:
    return config.engine.parallel.world_size // config.cluster.train_nodes


def uses_gpus(config: RunConfig) -> bool:
    return config.engine.platform != "cpu"


def mounts(config: RunConfig) -> list[str]:
    """Returns source:target."""
    folders = {str(config.output), config.model.path}
    adapters = config.model.lora and config.model.lora.path
    speculative = config.rollout.server.speculative
    optional = (config.model.shards, adapters, config.rollout.replay, speculative and speculative.draft_model)
    folders |= {str(folder) for folder in optional if folder is not None}
    files = [*config.data.paths.values(), *config.evaluate.paths.values()]
    if config.environment is not None and config.environment.key_file is not None:
        files.append(str(config.environment.key_file))
    folders |= {file if file.startswith(BUILTIN) else str(PurePosixPath(file).parent) for file in files}
    folders |= _custom_code_folders(config)
    local = sorted(f"{folder}:{folder}" for folder in folders if not folder.startswith(BUILTIN))
    return list(dict.fromkeys([*local, *config.cluster.mounts]))


def train_script(config: RunConfig) -> str:
    """The script's argument is the address of the first node."""
    needed = "transformer-engine" if uses_gpus(config) else ""
    cluster = config.cluster
    text = _fill("train.sh", config, python=cluster.python, nodes=cluster.train_nodes, ranks=ranks_per_node(config))
    return text.replace(" @needed@", f" {needed}".rstrip())


def serve_script(config: RunConfig) -> str:
    python = config.cluster.rollout_python or config.cluster.python
    return _fill("serve.sh", config, python=python, nodes=config.cluster.rollout_nodes, grace=math.ceil(config.train.grace_s))


def batch_lines(config: RunConfig) -> str:
    """Forwards Slurm's warning and requeues the job."""
    return _fill("batch.sh", config, max_requeues=config.cluster.max_requeues)


def warning_lead_s(config: RunConfig) -> int:
    """Returns the time from SIGUSR1 to Slurm's limit."""
    return math.ceil(config.train.warning_s) + JOB_END_S


def _fill(template: str, config: RunConfig, **values: str | int) -> str:
    text = (TEMPLATES / template).read_text()
    replacements = {"output": str(config.output), "interface": config.rollout.server.interface or "", **values}
    for name, value in replacements.items():
        text = text.replace(f"@{name}@", shlex.quote(str(value)))
    return text.replace("@setup@\n", "".join(f"{line}\n" for line in config.cluster.setup))


def _absolute(field: str, path: str, config: RunConfig) -> str:
    if path.startswith((BUILTIN, "/")):
        return path
    if config.cluster.ssh is not None:
        raise ValueError(
            f"{field} = {path!r} is relative, but with cluster.ssh it lies on another machine; write the whole path"
        )
    return str(Path(path).expanduser().absolute())


def _with_absolute_paths(config: RunConfig) -> RunConfig:
    def change(field: str, value: Any) -> Any:
        if isinstance(value, Path):
            return Path(_absolute(field, str(value), config))
        if isinstance(value, str) and _CUSTOM_CODE.fullmatch(value):
            place, _, name = value.rpartition(":")
            return f"{_absolute(field, place, config)}:{name}"
        return value

    changed = _changed(config, "", change)
    assert isinstance(changed, RunConfig)
    train = changed.train
    if train.resume_from is not None and "/" in train.resume_from:
        train = train.model_copy(update={"resume_from": _absolute("train.resume_from", train.resume_from, config)})
    data = {name: _absolute(name, file, config) for name, file in config.data.paths.items()}
    sets = {name: _absolute(f"evaluate.sets.{name}.path", file, config) for name, file in config.evaluate.paths.items()}
    model = changed.model.model_copy(update={"path": _absolute("model.path", config.model.path, config)})
    return changed.model_copy(
        update={
            "train": train,
            "model": model,
            "data": changed.data.with_paths(data),
            "evaluate": changed.evaluate.with_paths(sets),
        }
    )


def _custom_code_files(config: RunConfig) -> dict[str, str]:
    result = {}

    def note(field: str, value: Any) -> Any:
        if isinstance(value, str) and _CUSTOM_CODE.fullmatch(value):
            result[field] = value.rpartition(":")[0]
        return value

    _changed(config, "", note)
    return result


def _custom_code_folders(config: RunConfig) -> set[str]:
    """Custom code can import its neighbours."""
    files = [*_custom_code_files(config).values(), *(name for name in config.objective.plugins if name.startswith("/"))]
    return {str(PurePosixPath(file).parent) for file in files}


def _changed(value: Any, field: str, change: _ValueChange) -> Any:
    if isinstance(value, Section):
        parts = {name: getattr(value, name) for name in type(value).model_fields if name not in _NOT_OURS}
        made = {name: _changed(part, f"{field}.{name}" if field else name, change) for name, part in parts.items()}
        return value.model_copy(update={name: part for name, part in made.items() if part != parts[name]})
    if isinstance(value, Mapping):
        return {name: _changed(part, f"{field}.{name}", change) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_changed(part, f"{field}[{index}]", change) for index, part in enumerate(value))
    return change(field, value)


def check_time_limit(config: RunConfig) -> None:
    """Slurm must not warn a job that just starts."""
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
    verify_all(CLUSTER_CHECKS, _ClusterRun(config, tunnel))


def _check_model(run: _ClusterRun) -> None:
    model = run.config.model.path
    if not model.startswith(BUILTIN) and not run.has(f"{model}/config.json"):
        raise ValueError(
            f"model.path = {model} has no config.json on {run.where}; give a Hugging Face folder that every node can read "
            "('hf download NAME --local-dir FOLDER' makes one)"
        )


def _check_data(run: _ClusterRun) -> None:
    for field, source in run.config.data.paths.items():
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
    for field, file in _custom_code_files(run.config).items():
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
