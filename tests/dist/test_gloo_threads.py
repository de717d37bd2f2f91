"""All gloo groups of a process share one thread."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from tests.support.launch import run_dist


def _gloo_threads(rank: int, world: int) -> tuple[int, list[float]]:
    groups = [dist.new_group(list(range(world))) for _ in range(5)]
    tensor = torch.ones(3) * (rank + 1)
    for group in groups:
        dist.all_reduce(tensor, group=group)
    names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    return sum("gloo_tcp_loop" in name for name in names), tensor.tolist()


def test_many_groups_have_one_thread() -> None:
    assert run_dist(2, _gloo_threads) == [(1, [48.0] * 3)] * 2
