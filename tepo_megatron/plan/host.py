"""Bytes that a training rank needs of its host's memory. docs/reference/plan.md has the formulas."""

from __future__ import annotations

from dataclasses import dataclass, fields

from tepo_megatron.config import RunConfig
from tepo_megatron.plan.memory import GIB, RankMemory
from tepo_megatron.plan.states import host_state_bytes
from tepo_megatron.weights.architecture import ModelSpec

PROCESS = 6 * GIB
"""A rank's libraries, kernels and Python objects, which are on the host too: an assumption."""


@dataclass(frozen=True)
class HostMemory:
    """Bytes of one rank of one pipeline stage. All ranks of a node share its memory."""

    process: float
    states: float
    """Adam's states that ``optimizer.offload_fraction`` has put there, with the gradients that they wait for."""

    turns: float
    """Weights, states and a reference model, while servers use the same GPU."""

    staged: float
    """States on their way into a checkpoint, with ``train.async_save``."""

    routes: float
    """The sampler's experts for every token of a step, with ``rollout.server.routing_replay``: of the whole batch, which every
    rank has, and of its mini-batches."""

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))


def host_memory(spec: ModelSpec, config: RunConfig, memory: RankMemory, owned: float, *, step_tokens: float) -> HostMemory:
    """``memory``: the rank's on the GPU; ``owned``: how many weights it keeps states of; ``step_tokens``: of all sequences."""
    shares = config.rollout.server.placement == "colocated" and config.rollout.replay is None
    return HostMemory(
        process=PROCESS,
        states=host_state_bytes(config) * owned,
        turns=memory.weights + memory.optimizer + memory.reference if shares else 0,
        staged=12 * owned if config.train.async_save else 0,
        routes=2 * step_routes(spec, config, step_tokens),
    )


def step_routes(spec: ModelSpec, config: RunConfig, step_tokens: float) -> float:
    """Bytes of a step's routing records; none where experts are not replayed."""
    return step_tokens * spec.route_bytes if config.rollout.server.routing_replay else 0


def root_routes(spec: ModelSpec, config: RunConfig, step_tokens: float) -> float:
    """Bytes of records that rank 0 alone has beside: those of the step's rollouts, and with ``train.schedule = overlap`` of the
    rollouts of the steps that are drawn ahead."""
    ahead = config.train.max_staleness + 1 if config.train.schedule == "overlap" else 0
    return (1 + ahead) * step_routes(spec, config, step_tokens)


def check_host(config: RunConfig, needed: list[float], root: float = 0) -> str | None:
    """Returns a sentence if the ranks of a node need more than its memory, else None. ``needed``: bytes of a rank, by stage;
    ``root``: what rank 0 needs beside."""
    cluster = config.cluster
    ranks = min(config.engine.parallel.world_size, cluster.gpus_per_node)
    most, room = ranks * max(needed) + root, cluster.host_memory_gib * GIB
    if most <= room:
        return None
    replay = ", set rollout.server.routing_replay = false" if root else ""
    return (
        f"{ranks} training ranks on a node need {most / GIB:.0f} GiB of its host's memory, more than cluster.host_memory_gib = "
        f"{cluster.host_memory_gib:g}; set train.async_save = false, lower optimizer.offload_fraction{replay}, or train on "
        "more nodes"
    )
