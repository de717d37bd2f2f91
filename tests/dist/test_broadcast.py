"""Every rank gets rank 0's batch, with every record that it has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.core.sampling_mask import SamplingMask
from tepo_megatron.core.types import Batch
from tepo_megatron.trainer.megatron.batching.batch import broadcast
from tepo_megatron.trainer.packing import pack
from tests.support.launch import run_dist

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
