"""Every rank gets rank 0's batch, whatever it has."""

from __future__ import annotations

import torch

from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.core.types import Batch
from tepo_megatron.trainer.megatron.batching.batch import broadcast
from tepo_megatron.trainer.packing import pack
from tests.support.launch import run_dist


def steps() -> list[list[Rollout]]:
    """One with components of its rewards, one without."""
    plain = [
        Rollout(f"p{at}", at, (3, 4), (5,) * (at + 1), (-0.5,) * (at + 1), "stop", WeightsVersion(0), "", at) for at in range(3)
    ]
    graded = [
        Rollout(f"p{at}", at, (3,), (5, 6), (-0.5, -1.0), "stop", WeightsVersion(0), "", at, {"right": at, "short": 0.25})
        for at in range(3)
    ]
    return [graded, plain]


def values(batch: Batch) -> dict[str, object]:
    return {name: None if value is None else value.tolist() for name, value in vars(batch).items()}


def receive(rank: int, world: int) -> list[dict[str, object]]:
    return [values(broadcast(pack(step) if rank == 0 else None, torch.device("cpu"))) for step in steps()]


def test_every_rank_has_the_batch_of_rank_0() -> None:
    expected = [values(pack(step)) for step in steps()]
    assert expected[0]["reward_parts_SK"] == [[0.0, 0.25], [1.0, 0.25], [2.0, 0.25]]
    assert run_dist(2, receive) == [expected, expected]
