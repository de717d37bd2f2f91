"""Rejection: no gradient for what the sampler drew too far from the trainer's probability (docs/reference/tepo.md,
"A sampler that differs")."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from tepo_megatron.core.objective.mismatch import log_weights

if TYPE_CHECKING:
    from tepo_megatron.config.objective.section import ObjectiveConfig
    from tepo_megatron.config.objective.terms import Rejection
    from tepo_megatron.core.objective.values import StepValues, TokenValues


@dataclass(frozen=True)
class RejectionMask:
    """Takes the gradient of tokens, or whole responses, whose π_old / π_sampler lies outside a range."""

    takes_gradient: ClassVar[bool] = True
    term: Rejection

    @classmethod
    def prepare(cls, config: ObjectiveConfig, step: StepValues) -> RejectionMask | None:
        """Nothing of the step is needed."""
        del step
        return None if config.rejection is None else cls(config.rejection)

    def choose(self, values: TokenValues) -> Tensor:
        """Those outside the range. Compared as logarithms, since a product over many tokens overflows."""
        log_T = log_weights(self.term.level, values.mismatch_T, values.index_T, values.lengths_S)
        lowest = math.log(self.term.low) if self.term.low > 0 else -math.inf
        return values.mask_T & ((log_T < lowest) | (log_T > math.log(self.term.high)))

    def penalty(self, values: TokenValues) -> None:
        """None."""
        del values
