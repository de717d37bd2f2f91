"""M2PO: no gradient for the tokens on which trainer and sampler differ most (docs/reference/tepo.md, "The other presets")."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tepo_megatron.config.objective.section import ObjectiveConfig
    from tepo_megatron.core.objective.values import StepValues, TokenValues


@dataclass(frozen=True)
class LargestSecondMoments:
    """Takes the gradient of the tokens with the largest (log π_old − log π_sampler)² of the step."""

    takes_gradient: ClassVar[bool] = True
    bound: Tensor
    """Scalar: the square from which on a token is left out; inf where none is."""

    @classmethod
    def prepare(cls, config: ObjectiveConfig, step: StepValues) -> LargestSecondMoments | None:
        """Find the bound in the squares of the whole step."""
        return None if config.m2po is None else cls(smallest_excluded(step.mismatch_R**2, config.m2po.threshold))

    def choose(self, values: TokenValues) -> Tensor:
        """The tokens at or above the bound."""
        return values.mask_T & (values.mismatch_T**2 >= self.bound)

    def penalty(self, values: TokenValues) -> None:
        """None."""
        del values


def smallest_excluded(squares_R: Tensor, threshold: float) -> Tensor:
    """The smallest value that has to go, with all that are as large, for the mean of the others to be at most ``threshold``; a
    scalar, inf where nothing has to go. By value and not by place, so that the order of the tokens does not matter."""
    ordered_R = squares_R.sort().values
    means_R = ordered_R.double().cumsum(0) / torch.arange(1, ordered_R.numel() + 1, device=ordered_R.device)
    over_R = means_R > threshold  # means of ever larger values only grow, so this is a tail
    return ordered_R[over_R][0] if over_R.any() else ordered_R.new_tensor(torch.inf)
