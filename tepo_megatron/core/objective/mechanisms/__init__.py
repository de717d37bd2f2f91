"""Terms that act on chosen tokens: a penalty on them, or no gradient for them.

A new one is a subclass of `Mechanism`, its section in ``config/objective/terms.py``, and an entry in `MECHANISMS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tepo_megatron.core.objective.mechanisms.kl import KLCovPenalty, KLMaskPenalty, KLPenalty
from tepo_megatron.core.objective.mechanisms.masks import (
    ClipCovDetach,
    CustomMask,
    CustomPenalty,
    LargestSecondMoments,
    OffPolicySequences,
    RejectionMask,
)
from tepo_megatron.core.objective.mechanisms.mechanism import Mechanism

if TYPE_CHECKING:
    from tepo_megatron.config.objective.section import ObjectiveConfig
    from tepo_megatron.core.objective.values import StepValues, TokenValues

__all__ = ["MECHANISMS", "Mechanism", "choose_tokens", "prepare_mechanisms"]

MECHANISMS: tuple[type[Mechanism], ...] = (
    KLMaskPenalty,
    KLPenalty,
    KLCovPenalty,
    ClipCovDetach,
    RejectionMask,
    OffPolicySequences,
    LargestSecondMoments,
    CustomMask,
    CustomPenalty,
)
"""Penalties are added in this order: a new one goes last, so that sums keep their last bit."""


def prepare_mechanisms(config: ObjectiveConfig, step: StepValues) -> tuple[Mechanism, ...]:
    prepared = (kind.prepare(config, step) for kind in MECHANISMS)
    return tuple(mechanism for mechanism in prepared if mechanism is not None)


def choose_tokens(mechanisms: Sequence[Mechanism], values: TokenValues) -> _Choices:
    return _Choices(values, tuple((mechanism, mechanism.choose(values)) for mechanism in mechanisms))


@dataclass(frozen=True)
class _Choices:
    values: TokenValues
    pairs: tuple[tuple[Mechanism, Tensor | None], ...]

    @property
    def chosen_T(self) -> Tensor:
        union_T = torch.zeros_like(self.values.mask_T)
        for _, chosen_T in self.pairs:
            if chosen_T is not None:
                union_T = union_T | chosen_T
        return union_T

    @property
    def detached_T(self) -> Tensor | None:
        detached_T = None
        for mechanism, chosen_T in self.pairs:
            if mechanism.takes_gradient:
                where_T = self._where(chosen_T)
                detached_T = where_T if detached_T is None else detached_T | where_T
        return detached_T

    def penalty_T(self) -> Tensor:
        total_T = torch.zeros_like(self.values.delta_T)
        for mechanism, chosen_T in self.pairs:
            penalty_T = mechanism.penalty(self.values)
            if penalty_T is not None:
                total_T = total_T + torch.where(self._where(chosen_T), penalty_T, 0.0)
        return total_T

    def _where(self, chosen_T: Tensor | None) -> Tensor:
        return self.values.mask_T if chosen_T is None else chosen_T
