"""Metrics of a micro-batch: detached (sum, count) pairs that add up over micro-batches and ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tepo_megatron.core.objective.mechanisms.kl import kl_estimate

if TYPE_CHECKING:
    from tepo_megatron.core.objective.trust_region import Surrogate
    from tepo_megatron.core.objective.values import TokenValues

Metrics = dict[str, tuple[Tensor, Tensor]]


@torch.no_grad()
def measure(
    values: TokenValues,
    effective_samples: Tensor,
    ratio_T: Tensor,
    gain: Surrogate,
    weight_T: Tensor | None,
    masked_T: Tensor,
) -> tuple[Metrics, dict[str, Tensor]]:
    """Returns metrics and extrema (docs/reference/metrics.md): means over response tokens or ``masked_T``.

    KL(π_θ‖π_old) is r δ − r + 1; the mismatch is KL(sampler‖π_old) by k3.
    """
    mask_T = values.mask_T
    kl_T = kl_estimate(values.delta_T, "k3") * values.delta_T.exp()

    def over(where_T: Tensor, value_T: Tensor) -> tuple[Tensor, Tensor]:
        return torch.where(where_T, value_T, 0.0).sum(), where_T.sum().to(value_T.dtype)

    metrics: Metrics = {
        "ratio/mean": over(mask_T, ratio_T),
        "clip/low": over(mask_T, gain.clipped_low_T.to(ratio_T.dtype)),
        "clip/high": over(mask_T, gain.clipped_high_T.to(ratio_T.dtype)),
        "kl/mean": over(mask_T, kl_T),
        "kl/masked": over(masked_T, kl_T),
        "mask/fraction": over(mask_T, masked_T.to(ratio_T.dtype)),
        "entropy/mean": over(mask_T, values.entropy_T),
        "mismatch/kl": over(mask_T, kl_estimate(-values.mismatch_T, "k3")),
        "ess": over(mask_T, effective_samples.expand_as(ratio_T)),
    }
    if values.entropy_change_T is not None:
        metrics["entropy/delta"] = over(mask_T, values.entropy_change_T)
        metrics["entropy/delta_masked"] = over(masked_T, values.entropy_change_T)
        metrics["entropy/delta_unmasked"] = over(mask_T & ~masked_T, values.entropy_change_T)
    if values.reference_delta_T is not None:
        metrics["kl/reference"] = over(mask_T, kl_estimate(values.reference_delta_T, "k3"))
    if weight_T is not None:
        metrics["mismatch/weight"] = over(mask_T, weight_T)
        metrics["mismatch/dropped"] = over(mask_T, (weight_T == 0).to(ratio_T.dtype))
    extrema = {
        "ratio/min": torch.where(mask_T, ratio_T, torch.inf).amin() if mask_T.numel() else ratio_T.new_tensor(torch.inf),
        "ratio/max": torch.where(mask_T, ratio_T, -torch.inf).amax() if mask_T.numel() else ratio_T.new_tensor(-torch.inf),
    }
    return metrics, extrema


def token_values(values: TokenValues, ratio_T: Tensor, masked_T: Tensor) -> dict[str, Tensor]:
    result = {"logprob_update": values.logprob_T.detach(), "ratio": ratio_T.detach(), "masked": masked_T}
    return result if values.entropy_change_T is None else {**result, "entropy_change": values.entropy_change_T}
