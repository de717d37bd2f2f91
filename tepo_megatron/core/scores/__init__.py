"""Log-prob and entropy of sharded logits, and their noise under an update that only rounds the weights again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from tepo_megatron.core.scores.fused_linear import fused_linear_logprob_and_entropy, logprob_and_entropy
from tepo_megatron.core.types import Batch, TokenScores

__all__ = ["fused_linear_logprob_and_entropy", "logprob_and_entropy", "noise_quantiles", "rerounded"]

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_PART = 2**24
_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


@contextmanager
def rerounded(weights: Iterable[Tensor], seed: int = 0) -> Iterator[None]:
    """Rounds ``weights`` again, in place, and restores every bit at the end; ``seed`` must be equal on all ranks.

    A weight stands for masters within half a unit in the last place (ulp). A tiny update moves it by a whole ulp or not at all:
    with masters evenly spread and one more ulp of spread, a quarter of the weights, up as often as down.
    """
    held = [weight.detach().view(_BITS[weight.element_size()]).view(-1) for weight in weights]
    _flip(held, seed)
    try:
        yield
    finally:
        _flip(held, seed)


def _flip(held: Sequence[Tensor], seed: int) -> None:
    """Flips the last bit of a quarter of the numbers; twice restores them."""
    generators: dict[torch.device, torch.Generator] = {}
    for bits in held:
        if bits.device not in generators:
            generators[bits.device] = torch.Generator(bits.device).manual_seed(seed)
        for part in bits.split(_PART):  # type: ignore[no-untyped-call] # torch leaves it untyped
            drawn = torch.empty(part.shape, dtype=torch.uint8, device=part.device)
            drawn.random_(0, 4, generator=generators[bits.device])
            part ^= (drawn == 0).to(part.dtype)


def noise_quantiles(first: TokenScores, second: TokenScores, batch: Batch) -> dict[str, float]:
    """Returns quantiles of differences: entropies (nats), token and sequence ratios, as ``entropy/noise/p99`` etc."""
    mask_T, index_T = batch.loss_mask_T, batch.sequence_index_T
    delta_T = torch.where(mask_T, second.logprob - first.logprob, 0.0).double()
    sums_S = delta_T.new_zeros(2, batch.num_sequences).index_add_(1, index_T, torch.stack([delta_T, mask_T.double()]))
    noise = {
        "entropy/noise": (second.entropy - first.entropy)[mask_T],
        "ratio/noise": delta_T[mask_T].expm1(),
        "sequence_ratio/noise": (sums_S[0] / sums_S[1].clamp(min=1)).expm1(),
    }
    levels = list(_QUANTILES.values())
    of_name = {name: np.quantile(values.abs().cpu().numpy(), levels) for name, values in noise.items()}  # torch's takes 2²⁴
    return {f"{name}/{label}": float(value) for name in noise for label, value in zip(_QUANTILES, of_name[name], strict=True)}
