"""Plugins of an objective in a run: they keep the rules of an objective, and every rank has the same bytes of them."""

from __future__ import annotations

import socket

import torch

from tepo_megatron.config import RunConfig
from tepo_megatron.core.objective.checking.check import check_invariance
from tepo_megatron.trainer.checkpoints.run_compatibility import plugin_digests
from tepo_megatron.trainer.megatron.platform.collectives import all_gather_json


def check_plugins(config: RunConfig) -> None:
    """Refuses an objective with plugins whose loss depends on what must not matter: the cut into micro-batches and ranks, the
    order of sequences, padding. Takes a fraction of a second on a CPU; rank 0 calls, before servers are started.

    Raises:
        ValueError: a rule is broken, with the two numbers that should be equal.
    """
    if not config.objective.plugins:
        return
    parts = len(config.reward.weights) if config.reward.weights else 2
    for rule, problem in check_invariance(config.objective, reward_parts=parts):
        if problem:
            plugins = ", ".join(config.objective.plugins)
            raise ValueError(
                f"the objective, with {plugins}, breaks a rule ({rule}): {problem} ('tepo objective check' tries all rules)"
            )


def check_same_plugins(config: RunConfig, device: torch.device) -> None:
    """Raises ValueError on every rank where some rank has imported other bytes of a plugin. Every rank calls."""
    if not config.objective.plugins:  # the configuration is the same on every rank
        return
    everyone = all_gather_json([socket.gethostname(), plugin_digests(config)], device=device)
    (first_host, first), *_ = everyone
    for rank, (host, digests) in enumerate(everyone):
        for name in dict.fromkeys([*first, *digests]):
            if first.get(name) != digests.get(name):
                raise ValueError(
                    f"objective.plugins: rank {rank} on {host} has other bytes of {name} than rank 0 on {first_host} (digest "
                    f"{digests.get(name)} and {first.get(name)}); put the same file on every node, or on a disk that all share"
                )
