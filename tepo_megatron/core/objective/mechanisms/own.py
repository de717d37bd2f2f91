"""A mask and a penalty of the user's own (docs/guides/own-objective.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from tepo_megatron.core.objective.own import own_token_values, own_tokens

if TYPE_CHECKING:
    from tepo_megatron.config.objective.custom import OwnMask, OwnPenalty
    from tepo_megatron.config.objective.section import ObjectiveConfig
    from tepo_megatron.core.objective.values import StepValues, TokenValues


@dataclass(frozen=True)
class OwnMasking:
    """Takes the gradient of the tokens that ``objective.mask`` chooses."""

    takes_gradient: ClassVar[bool] = True
    term: OwnMask
    found: Any
    """What the term's ``prepare`` gave."""

    @classmethod
    def prepare(cls, config: ObjectiveConfig, step: StepValues) -> OwnMasking | None:
        """Ask the term what it has to know of the step."""
        return None if config.mask is None else cls(config.mask, config.mask.prepare(step))

    def choose(self, values: TokenValues) -> Tensor:
        """The term's tokens."""
        return own_tokens(self.term, self.term.choose(values, self.found), values)

    def penalty(self, values: TokenValues) -> None:
        """None."""
        del values


@dataclass(frozen=True)
class OwnPenalising:
    """Subtracts what ``objective.penalty`` gives at the tokens that it chooses."""

    takes_gradient: ClassVar[bool] = False
    term: OwnPenalty
    found: Any
    """What the term's ``prepare`` gave."""

    @classmethod
    def prepare(cls, config: ObjectiveConfig, step: StepValues) -> OwnPenalising | None:
        """Ask the term what it has to know of the step."""
        return None if config.penalty is None else cls(config.penalty, config.penalty.prepare(step))

    def choose(self, values: TokenValues) -> Tensor | None:
        """The term's tokens, or every response token."""
        chosen = self.term.choose(values, self.found)
        return None if chosen is None else own_tokens(self.term, chosen, values)

    def penalty(self, values: TokenValues) -> Tensor:
        """The term's values, [T]."""
        return own_token_values(self.term, self.term.penalty(values, self.found), "penalty", values)
