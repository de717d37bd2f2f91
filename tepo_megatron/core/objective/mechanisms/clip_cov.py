"""Clip-Cov: no gradient for a few tokens drawn from those of high covariance (docs/reference/tepo.md, "The other presets")."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from tepo_megatron.config.objective.custom import OwnTrustRegion
from tepo_megatron.core.objective.covariance import token_count

if TYPE_CHECKING:
    from tepo_megatron.config.objective.choices import ClipCov
    from tepo_megatron.config.objective.section import ObjectiveConfig
    from tepo_megatron.core.objective.values import StepValues, TokenValues


@dataclass(frozen=True)
class ClipCovDetach:
    """Takes the gradient of a ``fraction`` of the step's response tokens, drawn from those with a covariance in a range."""

    takes_gradient: ClassVar[bool] = True
    region: ClipCov
    highest_ticket: int
    """Candidates whose ticket is at most this are drawn; −1 where there is no candidate."""

    @classmethod
    def prepare(cls, config: ObjectiveConfig, step: StepValues) -> ClipCovDetach | None:
        """Hold the lottery among the candidates of the whole step."""
        region = config.trust_region
        if isinstance(region, OwnTrustRegion) or region.kind != "clip_cov":
            return None
        tickets_R = tickets(step.old_logprob_R, step.advantage_R, step.labels_R)
        return cls(region, lottery_threshold(_candidates(region, step.covariance_R), tickets_R, region.fraction))

    def choose(self, values: TokenValues) -> Tensor:
        """The candidates that are drawn."""
        drawn_T = tickets(values.old_logprob_T, values.advantage_T, values.labels_T) <= self.highest_ticket
        return values.mask_T & _candidates(self.region, values.covariance_T) & drawn_T

    def penalty(self, values: TokenValues) -> None:
        """None."""
        del values


def _candidates(region: ClipCov, covariance_T: Tensor) -> Tensor:
    return (covariance_T >= region.cov_low) & (covariance_T <= region.cov_high)


def lottery_threshold(candidates_R: Tensor, tickets_R: Tensor, fraction: float) -> int:
    """The highest ticket that wins when a ``fraction`` of all tokens is to be drawn from the candidates; −1 without any."""
    drawn = tickets_R[candidates_R].sort().values[: token_count(fraction, candidates_R.numel())]
    return int(drawn[-1]) if drawn.numel() else -1


def tickets(logprob_T: Tensor, advantage_T: Tensor, labels_T: Tensor) -> Tensor:
    """A pseudo-random number in [0, 2³²) for each token, int64, from what the token is and not from where it stands.

    So the lottery draws the same tokens whatever the order of the sequences, the micro-batches and the ranks, and again after
    a resume. A generator's state would depend on all of them.
    """
    hashed_T = torch.zeros_like(labels_T)
    for part_T in (labels_T, logprob_T.float().view(torch.int32).long(), advantage_T.float().view(torch.int32).long()):
        hashed_T = (hashed_T ^ part_T) & 0xFFFFFFFF
        # Shift, exclusive-or and multiply, twice: each bit of the input comes to change about half of the bits of the hash.
        for shift, factor in ((16, 0x45D9F3B), (15, 0x119DE1F3)):  # below 2³¹, so that products stay within int64
            hashed_T = ((hashed_T ^ (hashed_T >> shift)) * factor) & 0xFFFFFFFF
        hashed_T = hashed_T ^ (hashed_T >> 16)
    return hashed_T
