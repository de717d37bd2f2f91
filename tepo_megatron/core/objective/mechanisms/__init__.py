"""Terms that act on chosen tokens beside the surrogate: a KL penalty on them, or no gradient for them. One file each.

A new one is a class that keeps to `Mechanism`, its section in ``config/objective/terms.py``, and a place in `MECHANISMS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tepo_megatron.core.objective.mechanisms.clip_cov import ClipCovDetach
from tepo_megatron.core.objective.mechanisms.kl import KLPenalty
from tepo_megatron.core.objective.mechanisms.kl_cov import KLCovPenalty
from tepo_megatron.core.objective.mechanisms.kl_mask import KLMaskPenalty
from tepo_megatron.core.objective.mechanisms.m2po import LargestSecondMoments
from tepo_megatron.core.objective.mechanisms.mechanism import Mechanism
from tepo_megatron.core.objective.mechanisms.opsm import OffPolicySequences
from tepo_megatron.core.objective.mechanisms.own import OwnMasking, OwnPenalising
from tepo_megatron.core.objective.mechanisms.rejection import RejectionMask

if TYPE_CHECKING:
    from tepo_megatron.config.objective.section import ObjectiveConfig
    from tepo_megatron.core.objective.values import StepValues, TokenValues

__all__ = ["MECHANISMS", "Choices", "Mechanism", "choose_tokens", "prepare_mechanisms"]

MECHANISMS: tuple[type[Mechanism], ...] = (
    KLMaskPenalty,
    KLPenalty,
    KLCovPenalty,
    ClipCovDetach,
    RejectionMask,
    OffPolicySequences,
    LargestSecondMoments,
    OwnMasking,
    OwnPenalising,
)
"""Every mechanism there is. Penalties are added up in this order, so a new one goes last: sums then keep their last bit."""


def prepare_mechanisms(config: ObjectiveConfig, step: StepValues) -> tuple[Mechanism, ...]:
    """The mechanisms that a configuration asks for, ready for the micro-batches of one optimizer step."""
    prepared = (kind.prepare(config, step) for kind in MECHANISMS)
    return tuple(mechanism for mechanism in prepared if mechanism is not None)


def choose_tokens(mechanisms: Sequence[Mechanism], values: TokenValues) -> Choices:
    """Ask every mechanism for its tokens of a micro-batch."""
    return Choices(values, tuple((mechanism, mechanism.choose(values)) for mechanism in mechanisms))


@dataclass(frozen=True)
class Choices:
    """The mechanisms of a step, each with the tokens that it chose in one micro-batch (``None``: every response token)."""

    values: TokenValues
    pairs: tuple[tuple[Mechanism, Tensor | None], ...]

    @property
    def chosen_T(self) -> Tensor:
        """bool [T]: the tokens that some mechanism singled out. One that acts on every response token singles out none."""
        chosen_T = torch.zeros_like(self.values.mask_T)
        for _, own_T in self.pairs:
            if own_T is not None:
                chosen_T = chosen_T | own_T
        return chosen_T

    @property
    def detached_T(self) -> Tensor | None:
        """bool [T]: the tokens at which the surrogate has no gradient; ``None`` where no mechanism takes any."""
        detached_T = None
        for mechanism, own_T in self.pairs:
            if mechanism.takes_gradient:
                where_T = self._where(own_T)
                detached_T = where_T if detached_T is None else detached_T | where_T
        return detached_T

    def penalty_T(self) -> Tensor:
        """The sum of all penalties [T], each at its own tokens and 0 elsewhere; differentiable."""
        total_T = torch.zeros_like(self.values.delta_T)
        for mechanism, own_T in self.pairs:
            penalty_T = mechanism.penalty(self.values)
            if penalty_T is not None:
                total_T = total_T + torch.where(self._where(own_T), penalty_T, 0.0)
        return total_T

    def _where(self, own_T: Tensor | None) -> Tensor:
        return self.values.mask_T if own_T is None else own_T
