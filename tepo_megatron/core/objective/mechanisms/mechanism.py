"""The interface of a mechanism."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Self

from torch import Tensor

if TYPE_CHECKING:
    from tepo_megatron.config.objective.section import ObjectiveConfig
    from tepo_megatron.core.objective.values import StepValues, TokenValues


class Mechanism:
    """Acts on chosen tokens: takes their gradient, or subtracts a penalty. Subclasses are frozen dataclasses.

    A choice must not depend on how the step is cut into micro-batches or ranks: ``prepare`` computes statistics of the whole
    step, such as a threshold. The mechanism's config section states further needs and its bounds
    (``config/objective/base.py``).
    """

    takes_gradient: ClassVar[bool] = False
    """Whether the surrogate keeps its value but has no gradient at the chosen tokens."""

    @classmethod
    def prepare(cls, config: ObjectiveConfig, step: StepValues) -> Self | None:
        """Makes the mechanism for one optimizer step from its whole mini-batch; ``None`` if it is off.

        No collective: every rank has the same mini-batch and gets the same result.
        """
        raise NotImplementedError

    def choose(self, values: TokenValues) -> Tensor | None:
        """Returns bool [T] within ``values.mask_T``; ``None``: every response token. Raises ValueError if the batch lacks an
        input.
        """
        del values
        return None

    def penalty(self, values: TokenValues) -> Tensor | None:
        """Returns what is subtracted at the chosen tokens: [T], coefficient included, differentiable; or ``None``.

        It is ignored at other tokens, but must be finite there in value and gradient.
        """
        del values
        return None
