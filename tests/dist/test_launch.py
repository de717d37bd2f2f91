"""A rank that leaves ends the tests' world with what it printed; all gloo groups of a process share one thread."""

import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.launch import run_dist


def leave(rank: int, world: int) -> None:
    if rank == 1:
        print("the last words", flush=True)
        sys.exit(7)
    time.sleep(3600)


def test_a_rank_that_leaves_ends_the_world() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)rank 1 of 2 raised:.*SystemExit: 7.*the last words"):
        run_dist(2, leave)


def gloo_threads(rank: int, world: int) -> tuple[int, list[float]]:
    groups = [dist.new_group(list(range(world))) for _ in range(5)]
    tensor = torch.ones(3) * (rank + 1)
    for group in groups:
        dist.all_reduce(tensor, group=group)
    names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    return sum("gloo_tcp_loop" in name for name in names), tensor.tolist()


def test_all_gloo_groups_of_a_process_share_one_thread() -> None:
    assert run_dist(2, gloo_threads) == [(1, [48.0] * 3)] * 2
