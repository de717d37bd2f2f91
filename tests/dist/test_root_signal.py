"""The other ranks wait for rank 0 for longer than any collective may take."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from tepo_megatron.trainer.megatron.platform.collectives import _KEPT, RootSignal, broadcast_json
from tests.support.launch import run_dist

LIMIT_S = 6.0
"""Of a collective. Rank 0 comes half as much later; a loaded machine may take its time for everything else."""


def wait_for_a_late_root(rank: int, world: int, with_signal: bool) -> object:
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=LIMIT_S))
    signal = RootSignal()
    dist.barrier()
    if rank == 0:
        time.sleep(1.5 * LIMIT_S)
    try:
        if with_signal:
            signal.pass_on()
        return broadcast_json("late" if rank == 0 else None, source=0, device=torch.device("cpu"), group=group)
    except RuntimeError as error:
        return type(error).__name__


def test_a_late_rank_0_breaks_a_collective_and_not_the_wait_for_its_signal() -> None:
    assert run_dist(2, wait_for_a_late_root, True) == ["late", "late"]
    assert run_dist(2, wait_for_a_late_root, False)[1] != "late"


def pass_on_often(rank: int, world: int) -> int:
    signal = RootSignal()
    for number in range(_KEPT + 20):
        signal.pass_on()
        if number % 100 == 0:
            dist.barrier()
    return signal._store.underlying_store.num_keys()


def test_the_store_does_not_grow_for_ever() -> None:
    assert max(run_dist(2, pass_on_often)) < _KEPT + 100
