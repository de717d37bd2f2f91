"""Asks the plan whether a run fits the GPUs of this machine, before anything is built on them."""

from __future__ import annotations

import warnings

import torch

from tepo_megatron.config import RunConfig
from tepo_megatron.plan.run_plan import problems_of
from tepo_megatron.run.step.placement import Machine, trains_on_gpus
from tepo_megatron.weights.architecture import ModelSpec


def gpu_memory_gib() -> float:
    """Memory of the smallest GPU that torch sees here, in GiB."""
    gpus = range(torch.cuda.device_count())
    return min(torch.cuda.get_device_properties(gpu).total_memory for gpu in gpus) / 2**30


def check_fits(config: RunConfig, spec: ModelSpec, machine: Machine) -> None:
    """Raises ValueError with the plan's own sentence where trainer or servers do not fit the GPUs that are here, with the
    changes after which they do. With ``engine.check_memory = false`` it is a warning. A run on CPUs is not asked about.
    """
    if not trains_on_gpus(config, machine):
        return
    problems = problems_of(as_found(config, machine, gpu_memory_gib()), spec)
    if not problems:
        return
    sentence = "the run does not fit: " + "; ".join(problems)
    if config.engine.check_memory:
        raise ValueError(f"{sentence}; engine.check_memory = false tries it all the same ('tepo plan' shows each term)")
    warnings.warn(sentence, stacklevel=2)


def as_found(config: RunConfig, machine: Machine, memory_gib: float) -> RunConfig:
    """The run with the nodes and GPUs that are here in the place of those that ``cluster`` assumes."""
    gpus, server = max(machine.gpus, machine.local_ranks), config.rollout.server
    found = {"train_nodes": max(1, machine.ranks // machine.local_ranks), "gpus_per_node": gpus, "gpu_memory_gib": memory_gib}
    if server.placement == "external":  # wherever they run
        found["rollout_nodes"] = -(-server.count // max(1, gpus // server.tp))
    return config.model_copy(update={"cluster": config.cluster.model_copy(update=found)})
