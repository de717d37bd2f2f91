"""OPSM: no gradient for responses of negative advantage that the policy has left (docs/reference/tepo.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from tepo_megatron.core.objective.ratio import over_sequence

if TYPE_CHECKING:
    from tepo_megatron.config.objective.section import ObjectiveConfig
    from tepo_megatron.config.objective.terms import OffPolicySequenceMask
    from tepo_megatron.core.objective.values import StepValues, TokenValues


@dataclass(frozen=True)
class OffPolicySequences:
    """Takes the gradient of responses with A < 0 whose mean of log π_old − log π_θ is above ``delta``."""

    takes_gradient: ClassVar[bool] = True
    term: OffPolicySequenceMask

    @classmethod
    def prepare(cls, config: ObjectiveConfig, step: StepValues) -> OffPolicySequences | None:
        """Nothing of the step is needed."""
        del step
        return None if config.opsm is None else cls(config.opsm)

    def choose(self, values: TokenValues) -> Tensor:
        """All tokens of those responses."""
        delta_T = values.delta_T.detach()
        left_T = -over_sequence(delta_T, "geometric", values.index_T, values.lengths_S)
        return values.mask_T & (values.advantage_T < 0) & (left_T > self.term.delta)

    def penalty(self, values: TokenValues) -> None:
        """None."""
        del values
