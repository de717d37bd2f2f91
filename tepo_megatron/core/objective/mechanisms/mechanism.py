"""The interface of a mechanism."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Self

from torch import Tensor

if TYPE_CHECKING:
    from tepo_megatron.config.objective.section import ObjectiveConfig
    from tepo_megatron.core.objective.values import StepValues, TokenValues


class Mechanism:
    """Acts on chosen tokens: takes their gradient, or subtracts a penalty. Subclasses are frozen dataclasses.

    A choice must not depend on how the step is cut into micro-batches or ranks. Statistics of the whole step (a threshold, for
    example) are therefore computed once, in ``prepare``, and stored as a field. What a mechanism needs of a step beside
    log-probs and entropies, and its bounds, its section states (``config/objective/base.py``).
    """

    takes_gradient: ClassVar[bool] = False
    """Whether the surrogate has no gradient at the chosen tokens. Its value there stays."""

    @classmethod
    def prepare(cls, config: ObjectiveConfig, step: StepValues) -> Self | None:
        """The mechanism for one optimizer step, from the response tokens of its whole mini-batch; ``None`` if switched off.

        Pure and without a collective: every rank has the same mini-batch and gets the same result.
        """
        raise NotImplementedError

    def choose(self, values: TokenValues) -> Tensor | None:
        """Its tokens of a micro-batch, bool [T] within ``values.mask_T``; ``None``: every response token.

        Raises:
            ValueError: the batch lacks an input of the choice.
        """
        del values
        return None

    def penalty(self, values: TokenValues) -> Tensor | None:
        """What is subtracted from the surrogate at the chosen tokens: [T], coefficient included, differentiable; or ``None``.

        It is ignored at the other tokens, but must be finite there in value and gradient.
        """
        del values
        return None
