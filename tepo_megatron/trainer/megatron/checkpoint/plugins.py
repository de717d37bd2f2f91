"""Every rank has the same bytes of an objective's plugins."""

from __future__ import annotations

import socket

import torch

from tepo_megatron.config import RunConfig
from tepo_megatron.trainer.checkpoints.run_compatibility import plugin_digests
from tepo_megatron.trainer.megatron.platform.collectives import all_gather_json


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
