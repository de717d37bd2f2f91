"""What rank 0 sends to every rank: its batch with every record, and a signal without a time limit."""

import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tepo_megatron.core.rollout import Rollout, SamplingMask, WeightsVersion
from tepo_megatron.core.types import Batch
from tepo_megatron.tools.faults.processes import wait_until
from tepo_megatron.trainer.megatron.parallel.batch import broadcast
from tepo_megatron.trainer.megatron.parallel.collectives import _KEPT, RootSignal, broadcast_json
from tepo_megatron.trainer.packing import pack
from tests.support.launch import run_dist
from tests.support.programs import TIMEOUT_S

DTYPES: Any = (np.uint8, np.int16)


def steps() -> list[list[Rollout]]:
    """With reward components; with sampling masks and routes of two widths; without any of these."""
    plain = [Rollout(f"p{n}", n, (3, 4), (5,) * (n + 1), (-0.5,) * (n + 1), "stop", WeightsVersion(0), "", n) for n in range(3)]
    graded = [replace(rollout, reward_parts={"right": n, "short": 0.25}) for n, rollout in enumerate(plain)]
    masks = [SamplingMask([n] * (n + 1), range(n * (n + 1))) for n in range(3)]
    recorded: Any = [
        [
            replace(rollout, sampling_mask=mask, routed_experts=np.arange(4 * (n + 2), dtype=dtype).reshape(n + 2, 2, 2))
            for n, (rollout, mask) in enumerate(zip(plain, masks, strict=True))
        ]
        for dtype in DTYPES
    ]
    return [graded, *recorded, plain]


def values(batch: Batch) -> dict[str, Any]:
    tensors = {name: value for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
    mask = None if batch.sampling_mask_T is None else batch.sampling_mask_T.padded().tolist()
    return {"mask": mask, **{name: (str(value.dtype), value.tolist()) for name, value in tensors.items()}}


def receive(rank: int, world: int) -> list[dict[str, Any]]:
    return [values(broadcast(pack(step) if rank == 0 else None, torch.device("cpu"))) for step in steps()]


def test_every_rank_has_the_batch_of_rank_0() -> None:
    expected = [values(pack(step)) for step in steps()]
    assert expected[0]["reward_parts_SK"] == ("torch.float32", [[0.0, 0.25], [1.0, 0.25], [2.0, 0.25]])
    assert [expected[n].get("routed_experts_T", [None])[0] for n in range(4)] == [None, "torch.uint8", "torch.int16", None]
    assert expected[1]["mask"] is not None
    assert run_dist(2, receive) == [expected, expected]


LIMIT_S = 15.0
"""Of a collective."""


def wait_for_a_late_root(rank: int, world: int, broken: Path) -> object:
    """Rank 1 waits for the signal first, rank 2 does not. Rank 0 comes a second after the time limit has passed for both."""
    pairs = [dist.new_group([0, waiting], backend="gloo", timeout=timedelta(seconds=LIMIT_S)) for waiting in (1, 2)]
    signal = RootSignal()
    dist.barrier()
    if rank == 0:
        wait_until(broken.exists, TIMEOUT_S, "the collective of rank 2 to break")
        time.sleep(1)
    try:
        if rank < 2:
            signal.pass_on()
        group = pairs[rank == 2]
        return broadcast_json("late" if rank == 0 else None, source=0, device=torch.device("cpu"), group=group)
    except RuntimeError as error:
        broken.touch()
        return type(error).__name__


def test_a_late_rank_0_breaks_a_collective_and_not_the_wait_for_its_signal(tmp_path: Path) -> None:
    root, with_signal, without = run_dist(3, wait_for_a_late_root, tmp_path / "broken")
    assert root == with_signal == "late" != without


def pass_on_often(rank: int, world: int) -> int:
    signal = RootSignal()
    for number in range(_KEPT + 20):
        signal.pass_on()
        if number % 100 == 0:
            dist.barrier()
    return signal._store.underlying_store.num_keys()


def test_the_store_does_not_grow_for_ever() -> None:
    assert max(run_dist(2, pass_on_often)) < _KEPT + 100
