"""A KL penalty on every response token, as GRPO has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from tepo_megatron.core.objective.regularize import kl_penalty

if TYPE_CHECKING:
    from tepo_megatron.config.objective.section import ObjectiveConfig
    from tepo_megatron.config.objective.terms import KL
    from tepo_megatron.core.objective.values import StepValues, TokenValues


@dataclass(frozen=True)
class KLPenalty:
    """coefficient · KL at every response token."""

    takes_gradient: ClassVar[bool] = False
    term: KL

    @classmethod
    def prepare(cls, config: ObjectiveConfig, step: StepValues) -> KLPenalty | None:
        """Nothing of the step is needed."""
        del step
        return None if config.kl is None else cls(config.kl)

    def choose(self, values: TokenValues) -> None:
        """Every response token."""
        del values

    def penalty(self, values: TokenValues) -> Tensor:
        """coefficient · KL, [T]."""
        return self.term.coefficient * kl_penalty(self.term, values.delta_T, values.reference_delta_T)
