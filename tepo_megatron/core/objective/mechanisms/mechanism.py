"""What a mechanism is: three questions that the objective asks it."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Protocol, Self

from torch import Tensor

if TYPE_CHECKING:
    from tepo_megatron.config.objective.section import ObjectiveConfig
    from tepo_megatron.core.objective.values import StepValues, TokenValues


class Mechanism(Protocol):
    """Something that acts on chosen tokens, prepared for one optimizer step. Implementations are frozen dataclasses.

    A choice must not depend on how the step is cut into micro-batches or ranks. What has to be known of the whole step (a
    threshold, say) is therefore computed once, in ``prepare``, and kept as a field.
    """

    takes_gradient: ClassVar[bool]
    """Whether the surrogate passes no gradient at the chosen tokens. Its value there stays."""

    @classmethod
    def prepare(cls, config: ObjectiveConfig, step: StepValues) -> Self | None:
        """The mechanism for one optimizer step, from the response tokens of its whole mini-batch; ``None`` if switched off.

        Pure and without a collective: every rank holds the same mini-batch, so every rank gets the same.
        """

    def choose(self, values: TokenValues) -> Tensor | None:
        """Its tokens of a micro-batch, bool [T] within ``values.mask_T``; ``None`` means every response token.

        Raises:
            ValueError: the batch lacks what the choice is made by.
        """

    def penalty(self, values: TokenValues) -> Tensor | None:
        """What is subtracted from the surrogate at the chosen tokens: [T], coefficient included, differentiable; or ``None``.

        It may be anything at the other tokens, as long as it is finite there in value and gradient.
        """
