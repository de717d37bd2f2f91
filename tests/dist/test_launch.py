"""The worlds that the tests here run in: what goes wrong on a rank is told, with what the rank printed, and ends the world."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.launch import run_dist, run_world


def leave(rank: int, world: int, way: str) -> int:
    if rank == 1:
        print("the last words", flush=True)
        if way == "raise":
            raise KeyError("of the rank")
        if way == "exit":
            sys.exit(7)
        os._exit(0 if way == "silently" else 3)
    time.sleep(3600)
    return rank


@pytest.mark.parametrize(
    ("way", "told"),
    [
        ("raise", r"(?s)rank 1 of 2 raised:.*KeyError: 'of the rank'.*the last words"),
        ("exit", r"(?s)rank 1 of 2 raised:.*SystemExit: 7.*the last words"),
        ("die", r"(?s)rank 1 of 2 died with exit code 3.*the last words"),
        ("silently", r"(?s)rank 1 of 2 died with exit code 0.*the last words"),
    ],
)
def test_a_rank_that_fails_ends_the_world(way: str, told: str) -> None:
    with pytest.raises(RuntimeError, match=told):
        run_dist(2, leave, way)


def environment(rank: int, world: int) -> tuple[int, str | None, bool, bool]:
    imported = "tepo_megatron.trainer.megatron.engine" in sys.modules
    return dist.get_rank(), os.environ.get("SET_BY_A_TEST"), torch.get_num_threads() == 1, imported


def test_ranks_have_the_tests_environment_and_the_engine_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the process that they are forked from may be older than it."""
    assert run_dist(2, environment) == [(0, None, True, True), (1, None, True, True)]
    monkeypatch.setenv("SET_BY_A_TEST", "yes")
    assert run_dist(2, environment) == [(0, "yes", True, True), (1, "yes", True, True)]


def test_a_program_that_fails_is_told() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)rank [01] of 2 raised:.*No such file.*nowhere\.json"):
        run_world("routing", 2, "nowhere.json")


def gloo_threads(rank: int, world: int) -> tuple[int, list[float]]:
    groups = [dist.new_group(list(range(world))) for _ in range(5)]
    tensor = torch.ones(3) * (rank + 1)
    for group in groups:
        dist.all_reduce(tensor, group=group)
    names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    return sum("gloo_tcp_loop" in name for name in names), tensor.tolist()


def test_all_gloo_groups_of_a_process_share_one_thread() -> None:
    assert run_dist(2, gloo_threads) == [(1, [48.0] * 3)] * 2
