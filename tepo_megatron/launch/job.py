"""A job's absolute paths, and a shell script per role."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from tepo_megatron.config import RunConfig
from tepo_megatron.config.base import Section
from tepo_megatron.runtime.hub import HUB, download_command

_JOB_END_S = 30  # from the trainer's end to Slurm's limit

BUILTIN = "builtin:"

_PATHS = re.compile(r"model\.path|data\.(train|heldout)(\[\d+\]\.path)?|evaluate\.sets\.[^.]+\.path")
_CUSTOM_CODE = re.compile(r"[^:\n]+\.py:[A-Za-z_]\w*")

_NOT_OURS = ("cluster", "kwargs", "verifier_kwargs", "template", "system_prompt")

_ValueChange = Callable[[str, Any], Any]  # (field such as data.train[1].verifier, value) → new value


@dataclass(frozen=True)
class Role:
    """``script`` runs once per node; ``arguments`` are its shell words."""

    name: str
    first_node: int
    nodes: int
    script: str
    container: str | None
    arguments: tuple[str, ...] = ()


def on_nodes(config: RunConfig) -> RunConfig:
    """Makes paths absolute and gives external servers nodes of their own.

    Raises ValueError for a relative path through ssh, and a space in the output's path.
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


def _absolute(field: str, path: str, config: RunConfig) -> str:
    if path.startswith((BUILTIN, "/")):
        return path
    if path.startswith(HUB):
        command = download_command(path, "model" if field == "model.path" else "dataset")
        raise ValueError(
            f"{field} = {path}: the nodes of a job download nothing; run '{command}' on a disk that all of them see, and name "
            "the folder"
        )
    if config.cluster.ssh is not None:
        raise ValueError(
            f"{field} = {path!r} is relative, but with cluster.ssh it lies on another machine; write the whole path"
        )
    return str(Path(path).expanduser().absolute())


def _with_absolute_paths(config: RunConfig) -> RunConfig:
    def change(field: str, value: Any) -> Any:
        if isinstance(value, Path):
            return Path(_absolute(field, str(value), config))
        if isinstance(value, str) and (_PATHS.fullmatch(field) or (field == "train.resume_from" and "/" in value)):
            return _absolute(field, value, config)
        if isinstance(value, str) and _CUSTOM_CODE.fullmatch(value):
            place, _, name = value.rpartition(":")
            return f"{_absolute(field, place, config)}:{name}"
        return value

    changed = _changed(config, "", change)
    assert isinstance(changed, RunConfig)
    return changed


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


@dataclass(frozen=True)
class Job:
    """``config`` is a result of :func:`on_nodes`."""

    config: RunConfig

    @property
    def roles(self) -> list[Role]:
        """The trainer's nodes come first."""
        cluster, head_node = self.config.cluster, ("$head_node_ip",)
        train = Role("train", 0, cluster.train_nodes, self._train_script(), cluster.container, head_node)
        if not cluster.rollout_nodes:
            return [train]
        python, container = cluster.rollout_python or cluster.python, cluster.rollout_container or cluster.container
        script = self._fill("serve.sh", python=python, nodes=cluster.rollout_nodes, grace=math.ceil(self.config.train.grace_s))
        return [train, Role("serve", cluster.train_nodes, cluster.rollout_nodes, script, container)]

    @property
    def mounts(self) -> list[str]:
        folders = {str(self.config.output), self.config.model.path}
        adapters = self.config.model.lora and self.config.model.lora.path
        speculative = self.config.rollout.server.speculative
        optional = (self.config.model.shards, adapters, self.config.rollout.replay, speculative and speculative.draft_model)
        folders |= {str(folder) for folder in optional if folder is not None}
        files = [*self.config.data.paths.values(), *self.config.evaluate.paths.values()]
        if self.config.environment is not None and self.config.environment.key_file is not None:
            files.append(str(self.config.environment.key_file))
        # custom code can import its neighbours
        files += [*self.custom_code_files.values(), *(name for name in self.config.objective.plugins if name.startswith("/"))]
        folders |= {file if file.startswith(BUILTIN) else str(PurePosixPath(file).parent) for file in files}
        local = sorted(f"{folder}:{folder}" for folder in folders if not folder.startswith(BUILTIN))
        return list(dict.fromkeys([*local, *self.config.cluster.mounts]))

    @property
    def batch_lines(self) -> str:
        """Forwards Slurm's warning and requeues the job."""
        return self._fill("batch.sh", max_requeues=self.config.cluster.max_requeues)

    @property
    def warning_lead_s(self) -> int:
        """Seconds from SIGUSR1 to Slurm's limit."""
        return math.ceil(self.config.train.warning_s) + _JOB_END_S

    @property
    def custom_code_files(self) -> dict[str, str]:
        result = {}

        def note(field: str, value: Any) -> Any:
            if isinstance(value, str) and _CUSTOM_CODE.fullmatch(value):
                result[field] = value.rpartition(":")[0]
            return value

        _changed(self.config, "", note)
        return result

    def check_time_limit(self) -> None:
        """Slurm must not warn a job that just starts."""
        limit, warning_s, warned_s = self.config.cluster.time_limit, self.config.train.warning_s, self.warning_lead_s
        days, _, clock = limit.rpartition("-")
        hours, minutes, seconds = (int(part) for part in clock.split(":"))
        if ((24 * int(days or 0) + hours) * 60 + minutes) * 60 + seconds <= warned_s:
            raise ValueError(
                f"cluster.time_limit = {limit} is over before the job could do anything: Slurm warns it {warned_s} s before "
                f"the end (train.warning_s = {warning_s:g}, and {_JOB_END_S} s for the job's own end); give it more time, or "
                "lower train.warning_s"
            )

    def _train_script(self) -> str:
        cluster = self.config.cluster
        ranks = self.config.engine.parallel.world_size // cluster.train_nodes
        values = {"nodes": cluster.train_nodes, "rollout_nodes": cluster.rollout_nodes, "ranks": ranks}
        text = self._fill("train.sh", python=cluster.python, **values)
        return text.replace(" @needed@", "" if self.config.engine.platform == "cpu" else " transformer-engine")

    def _fill(self, template: str, **values: str | int) -> str:
        text = (Path(__file__).parent / "templates" / template).read_text()
        replacements = {"output": str(self.config.output), "interface": self.config.rollout.server.interface or "", **values}
        for name, value in replacements.items():
            text = text.replace(f"@{name}@", shlex.quote(str(value)))
        return text.replace("@setup@\n", "".join(f"{line}\n" for line in self.config.cluster.setup))
