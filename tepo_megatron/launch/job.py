"""What runs on the nodes of a job: the configuration as they read it, and one shell script for each role.

Nothing here knows how a job is submitted; ``tepo_megatron.launch.nemo`` does.
"""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tepo_megatron.config import RunConfig
from tepo_megatron.launch.paths import BUILTIN, own_folders, with_absolute_paths

JOB_END_S = 30
"""Seconds for the job's own end, after the trainer's, before Slurm's limit."""

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Role:
    """Consecutive nodes of the allocation that do the same: each runs one task, ``script``."""

    name: str
    first_node: int
    nodes: int
    script: str
    container: str | None


def roles(config: RunConfig) -> list[Role]:
    """Returns the trainer's nodes, then the servers' if there are any. ``config`` is one that :func:`on_nodes` returned."""
    cluster = config.cluster
    train = Role("train", 0, cluster.train_nodes, train_script(config), cluster.container)
    if not cluster.rollout_nodes:
        return [train]
    container = cluster.rollout_container or cluster.container
    return [train, Role("serve", cluster.train_nodes, cluster.rollout_nodes, serve_script(config), container)]


def on_nodes(config: RunConfig) -> RunConfig:
    """The configuration as the nodes read it: absolute paths, and external servers where nodes are set aside for them.

    Raises ValueError for a relative path where the job is submitted through ssh, and for a space in the output's path.
    """
    config = with_absolute_paths(config)
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
    """The number of trainer ranks on each training node."""
    return config.engine.parallel.world_size // config.cluster.train_nodes


def uses_gpus(config: RunConfig) -> bool:
    """Whether Slurm is asked for GPUs."""
    return config.engine.platform != "cpu"


def mounts(config: RunConfig) -> list[str]:
    """The folders that a container of the job sees, as source:target."""
    folders = {str(config.output), config.model.path}
    adapters = config.model.lora and config.model.lora.path
    speculative = config.rollout.server.speculative
    given = (config.model.shards, adapters, config.rollout.replay, speculative and speculative.draft_model)
    folders |= {str(folder) for folder in given if folder is not None}
    files = [*data_files(config).values(), *config.evaluate.paths.values()]
    if config.environment is not None and config.environment.key_file is not None:
        files.append(str(config.environment.key_file))
    folders |= {file if file.startswith(BUILTIN) else str(PurePosixPath(file).parent) for file in files}
    folders |= own_folders(config)
    own = sorted(f"{folder}:{folder}" for folder in folders if not folder.startswith(BUILTIN))
    return list(dict.fromkeys([*own, *config.cluster.mounts]))


def train_script(config: RunConfig) -> str:
    """The script that every training node runs; its argument is the address of the first node."""
    needed = "transformer-engine" if uses_gpus(config) else ""
    cluster = config.cluster
    text = _fill("train.sh", config, python=cluster.python, nodes=cluster.train_nodes, ranks=ranks_per_node(config))
    return text.replace(" @needed@", f" {needed}".rstrip())


def serve_script(config: RunConfig) -> str:
    """The script that every node for rollouts runs."""
    python = config.cluster.rollout_python or config.cluster.python
    return _fill("serve.sh", config, python=python, nodes=config.cluster.rollout_nodes, grace=math.ceil(config.train.grace_s))


def batch_lines(config: RunConfig) -> str:
    """Shell for the batch script, before it starts the roles: it passes Slurm's warning on, and puts the job back."""
    return _fill("batch.sh", config, max_requeues=config.cluster.max_requeues)


def warning_lead_s(config: RunConfig) -> int:
    """How many seconds before the end Slurm warns the batch script, with SIGUSR1."""
    return math.ceil(config.train.warning_s) + JOB_END_S


def _fill(template: str, config: RunConfig, **values: str | int) -> str:
    """The template with ``@name@`` replaced by the quoted value."""
    text = (TEMPLATES / template).read_text()
    given = {"output": str(config.output), "interface": config.rollout.server.interface or "", **values}
    for name, value in given.items():
        text = text.replace(f"@{name}@", shlex.quote(str(value)))
    return text.replace("@setup@\n", "".join(f"{line}\n" for line in config.cluster.setup))


def data_files(config: RunConfig) -> dict[str, str]:
    """The paths of the run's problems, by their field."""
    return config.data.paths
