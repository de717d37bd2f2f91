"""Token values of a mini-batch that an update hands back, and how values of tokens come from the ranks that computed them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tepo_megatron.core.types import Batch, ObjectiveOutput
from tepo_megatron.trainer.megatron.step.forward import Forward

NAMES = ("logprob_update", "entropy_change", "ratio", "masked")
"""Of ``ObjectiveOutput.token_values``. Stages that compute no loss must know them too."""

_KEPT = "token_values"


def keep_recorded(output: ObjectiveOutput, micro: Batch) -> dict[str, Tensor]:
    """What a micro-batch's loss keeps for :func:`gather_recorded`; nothing where nothing is recorded. NaN for a value that the
    objective does not give.
    """
    if micro.recorded_S is None:
        return {}
    at_R = _recorded_T(micro).nonzero()[:, 0]
    nothing_R = torch.full(at_R.shape, torch.nan, device=at_R.device)
    found = [output.token_values.get(name) for name in NAMES]
    return {_KEPT: torch.stack([nothing_R if value_T is None else value_T[at_R].float() for value_T in found])}


def gather_recorded(
    forward: Forward, batch: Batch, micro_batches: Sequence[Sequence[int]], kept: Sequence[Mapping[str, Any]]
) -> dict[str, Tensor]:
    """The values [R] of the R tokens of a mini-batch's recorded sequences, by name, on every rank; empty where there are none.

    Every rank calls, with its own micro-batches and what the last stage kept of them.
    """
    if batch.recorded_S is None:
        return {}
    recorded_T = _recorded_T(batch)
    place_T = recorded_T.cumsum(0) - 1
    indices = [batch.token_index(sequences) for sequences in micro_batches]
    places = [place_T[at[recorded_T[at]]] for at in indices]
    found = on_every_rank(forward, places, [micro[_KEPT] for micro in kept], (len(NAMES), int(recorded_T.sum())))
    values = dict(zip(NAMES, found, strict=True))
    return {**values, "masked": values["masked"] == 1}


def on_every_rank(forward: Forward, places: Sequence[Tensor], kept: Sequence[Tensor], shape: tuple[int, int]) -> Tensor:
    """Values [n, tokens] of tokens on every rank, fp32, exactly as they were computed; 0 where nobody has them.

    ``places``: where the tokens of this rank's micro-batches stand; ``kept``: their values, [n, t] each, empty but on the last
    pipeline stage. Every rank calls.
    """
    found = torch.zeros(shape, device=forward.platform.device)
    # Tensor- and context-parallel ranks have the same values; of the pipeline only the last stage has some.
    if forward.ranks.tp_rank == 0 and forward.ranks.cp_rank == 0:
        for at, values in zip(places, kept, strict=False):
            found[:, at] = values
    # Each token was computed by one data-parallel rank; adding zeros brings it to all, unchanged.
    dist.all_reduce(found)
    return found


def _recorded_T(batch: Batch) -> Tensor:
    """bool [T]: the tokens of recorded sequences."""
    assert batch.recorded_S is not None
    return (batch.recorded_S >= 0)[batch.sequence_index_T]
