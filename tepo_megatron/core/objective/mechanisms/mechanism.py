"""The interface of a mechanism."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Self

from torch import Tensor

if TYPE_CHECKING:
    from tepo_megatron.config.objective.section import ObjectiveConfig
    from tepo_megatron.core.objective.values import StepValues, TokenValues


class Mechanism:
    """Takes the gradient of chosen tokens, or subtracts a penalty. Subclasses are frozen dataclasses.

    A choice must not depend on how the step is cut into micro-batches or ranks: ``prepare`` computes statistics of the whole
    step.
    """

    takes_gradient: ClassVar[bool] = False
    """Whether the surrogate keeps its value but has no gradient at the chosen tokens."""

    @classmethod
    def prepare(cls, config: ObjectiveConfig, step: StepValues) -> Self | None:
        """Returns ``None`` if it is off. No collective: every rank has the same mini-batch."""
        raise NotImplementedError

    def choose(self, values: TokenValues) -> Tensor | None:
        """Returns bool [T] within ``values.mask_T``; ``None``: every response token."""
        del values
        return None

    def penalty(self, values: TokenValues) -> Tensor | None:
        """Returns [T], differentiable, or ``None``; it must be finite at other tokens too."""
        del values
        return None
