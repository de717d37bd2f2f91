"""A rank of a run: the size of its world, and its work under ``runtime.rank``."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from tepo_megatron.runtime import rank

if TYPE_CHECKING:
    from tepo_megatron.config import RunConfig


def run_rank(config: RunConfig, work: Callable[[RunConfig], None]) -> int:
    """Runs ``work(config)`` as one rank of a world of the size that ``config`` needs; returns the exit code."""

    def checked() -> None:
        check_world_size(config, int(os.environ["WORLD_SIZE"]))
        work(config)

    return rank.run_rank(checked, grace_s=config.train.grace_s, warning_s=config.train.warning_s)


def check_world_size(config: RunConfig, world_size: int) -> None:
    """``ValueError`` unless as many ranks were started as ``engine.parallel`` needs."""
    parallel = config.engine.parallel
    needed = parallel.world_size
    if world_size != needed:
        raise ValueError(
            f"engine.parallel needs tp × pp × cp × dp = {parallel.tp} × {parallel.pp} × {parallel.cp} × {parallel.dp} = "
            f"{needed} ranks, but WORLD_SIZE is {world_size}; start torchrun with --nproc-per-node {needed}, or change "
            "engine.parallel"
        )
