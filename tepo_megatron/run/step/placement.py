"""Placement of servers and trainer on this machine."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from tepo_megatron.config import RunConfig
from tepo_megatron.plan.run_plan import problems_of
from tepo_megatron.runtime.machine import Machine, available_cores, this_machine
from tepo_megatron.sampler.protocol import sampler_spec
from tepo_megatron.weights.architecture import ModelSpec
from tepo_megatron.weights.transfer.transport import TransportName
from tepo_megatron.weights.transfer.transports import find_transport


def trains_on_gpus(config: RunConfig, machine: Machine) -> bool:
    return config.engine.platform != "cpu" and machine.gpus > 0


def trainer_threads(config: RunConfig, machine: Machine, cores: Sequence[int]) -> int | None:
    """None: torch's default."""
    threads = config.engine.cpu_threads
    if threads is None or trains_on_gpus(config, machine):
        return None
    if threads != "auto":
        return threads
    server = config.rollout.server
    # Phases that alternate have all cores each; phases that overlap share them.
    overlaps = config.train.schedule == "overlap" and server.placement == "local" and config.rollout.replay is None
    taken = sampler_spec().cores(server, cores) if overlaps else set()
    return max(1, len(set(cores) - taken) // machine.local_ranks)


def set_threads(config: RunConfig) -> None:
    threads = trainer_threads(config, this_machine(), available_cores())
    if threads is not None:
        torch.set_num_threads(threads)


def choose_transport(config: RunConfig, machine: Machine) -> TransportName:
    server = config.rollout.server
    if server.transport != "auto":
        return server.transport
    if not trains_on_gpus(config, machine):
        return "gloo"
    if server.placement == "colocated":
        return "ipc"
    return "nccl" if machine.has_nccl else "gloo"


def first_server_gpu(config: RunConfig, machine: Machine) -> int:
    if config.rollout.server.placement == "colocated" or not trains_on_gpus(config, machine):
        return 0
    return machine.local_ranks


def takes_turns(config: RunConfig) -> bool:
    return config.rollout.server.placement == "colocated" and config.rollout.replay is None


def shared_gpus(config: RunConfig) -> dict[int, int]:
    """Worker, numbered over all servers → the trainer's rank on its GPU."""
    server = config.rollout.server
    return {worker: worker for worker in range(server.tp * server.count)} if server.placement == "colocated" else {}


def check_placement(config: RunConfig, machine: Machine) -> None:
    if config.rollout.replay is not None:
        return
    server = config.rollout.server
    on_gpus = trains_on_gpus(config, machine)
    if config.engine.cpu_threads is not None and on_gpus:
        raise ValueError(
            f"engine.cpu_threads = {config.engine.cpu_threads} acts where the trainer runs on a CPU, and it runs on GPUs here; "
            "leave it out"
        )
    if server.transport != "auto" and find_transport(server.transport).requires_gpu and not on_gpus:
        raise ValueError(
            f"rollout.server.transport = {server.transport} moves weights between GPUs, and {_no_gpus(config, machine)}; set "
            "it to gloo, or auto"
        )
    if server.transport == "nccl" and not machine.has_nccl:
        raise ValueError(
            f"rollout.server.transport = nccl, but torch {torch.__version__} has no NCCL; install a CUDA build of torch, or "
            "set it to gloo"
        )
    if server.placement == "colocated":
        _check_colocated(config, machine)
    elif server.placement == "local" and on_gpus:
        needed = machine.local_ranks + server.tp * server.count
        if needed > machine.gpus:
            raise ValueError(
                f"the trainer uses {machine.local_ranks} GPUs and the servers (rollout.server.tp × count) "
                f"{server.tp * server.count} others, but this machine has {machine.gpus}; share them with "
                "rollout.server.placement = colocated, or use fewer ranks or servers"
            )


def _check_colocated(config: RunConfig, machine: Machine) -> None:
    server = config.rollout.server
    if not trains_on_gpus(config, machine):
        raise ValueError(
            f"rollout.server.placement = colocated shares GPUs between trainer and servers, and {_no_gpus(config, machine)}; "
            "set it to local"
        )
    if machine.local_ranks != machine.ranks:
        raise ValueError(
            f"rollout.server.placement = colocated starts the servers from rank 0, on its machine, but {machine.ranks} ranks "
            f"run on several machines ({machine.local_ranks} here); use placement = external there"
        )
    if server.tp * server.count > machine.ranks:
        raise ValueError(
            f"rollout.server.tp × count = {server.tp} × {server.count} workers do not fit on the GPUs of {machine.ranks} "
            "trainer ranks, one on each, as placement = colocated puts them; lower tp or count"
        )


def _no_gpus(config: RunConfig, machine: Machine) -> str:
    if config.engine.platform == "cpu":
        return "engine.platform = cpu"
    return f"torch {torch.__version__} sees {machine.gpus} GPUs here"


def gpu_memory_gib() -> float:
    gpus = range(torch.cuda.device_count())
    return min(torch.cuda.get_device_properties(gpu).total_memory for gpu in gpus) / 2**30


def check_fits(config: RunConfig, spec: ModelSpec, machine: Machine) -> None:
    """Raises ValueError, or warns with ``engine.check_memory = false``."""
    if not trains_on_gpus(config, machine):
        return
    problems = problems_of(_on_this_machine(config, machine, gpu_memory_gib()), spec)
    if not problems:
        return
    sentence = "the run does not fit: " + "; ".join(problems)
    if config.engine.check_memory:
        raise ValueError(f"{sentence}; engine.check_memory = false tries it all the same ('tepo plan' shows each term)")
    warnings.warn(sentence, stacklevel=2)


def _on_this_machine(config: RunConfig, machine: Machine, memory_gib: float) -> RunConfig:
    gpus, server = max(machine.gpus, machine.local_ranks), config.rollout.server
    nodes = {"train_nodes": max(1, machine.ranks // machine.local_ranks), "gpus_per_node": gpus, "gpu_memory_gib": memory_gib}
    if server.placement == "external":  # wherever they run
        nodes["rollout_nodes"] = -(-server.count // max(1, gpus // server.tp))
    return config.model_copy(update={"cluster": config.cluster.model_copy(update=nodes)})
