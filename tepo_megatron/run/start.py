from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tepo_megatron.runtime import rank
from tepo_megatron.runtime.torchrun import run_ranks

if TYPE_CHECKING:
    from tepo_megatron.config import RunConfig
    from tepo_megatron.run.callbacks import Extensions


def prepare_run(config: RunConfig, *, overwrite: bool = False) -> None:
    """Every process that may start a run calls; under torchrun only rank 0's first start acts. Raises ValueError."""
    from tepo_megatron.run.output.resume import find_checkpoint, prepare_folder, resumes
    from tepo_megatron.tasks.data.builtin import resolve_model_path

    is_restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"  # torchrun restarts ranks with --max-restarts
    if rank.speaks_first() and not is_restart:
        prepare_folder(config, overwrite=overwrite)
    if not rank.under_torchrun() and config.train.resume and resumes(config):
        find_checkpoint(config, resolve_model_path(config.model.path))


def start_ranks(config: RunConfig, arguments: Sequence[str]) -> tuple[int, str]:
    return run_ranks(["train", *arguments], config.engine.parallel.world_size, status=config.output / "status")


def train_as_rank(config: RunConfig, extensions: Extensions | None = None) -> int:

    def work(config: RunConfig) -> None:
        from tepo_megatron.run.callbacks import NO_EXTENSIONS
        from tepo_megatron.run.training import train_model

        train_model(config, extensions or NO_EXTENSIONS)

    return run_rank(config, work)


def run_rank(config: RunConfig, work: Callable[[RunConfig], None]) -> int:

    def checked() -> None:
        parallel, world_size = config.engine.parallel, int(os.environ["WORLD_SIZE"])
        if world_size != parallel.world_size:
            raise ValueError(
                f"engine.parallel needs tp × pp × cp × dp = {parallel.tp} × {parallel.pp} × {parallel.cp} × {parallel.dp} = "
                f"{parallel.world_size} ranks, but WORLD_SIZE is {world_size}; start torchrun with --nproc-per-node "
                f"{parallel.world_size}, or change engine.parallel"
            )
        work(config)

    return rank.run_rank(checked, grace_s=config.train.grace_s, warning_s=config.train.warning_s)
