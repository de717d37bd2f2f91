"""KL-Cov: a KL penalty on the tokens of highest covariance (docs/reference/tepo.md, "The other presets")."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from tepo_megatron.core.objective.covariance import token_count
from tepo_megatron.core.objective.regularize import kl_penalty

if TYPE_CHECKING:
    from tepo_megatron.config.objective.section import ObjectiveConfig
    from tepo_megatron.config.objective.terms import KLCov
    from tepo_megatron.core.objective.values import StepValues, TokenValues


@dataclass(frozen=True)
class KLCovPenalty:
    """coefficient · KL at the ``fraction`` of the step's response tokens with the highest covariance, where it is positive."""

    takes_gradient: ClassVar[bool] = False
    term: KLCov
    threshold: Tensor
    """Scalar: the covariance statistic from which on a token is penalised."""

    @classmethod
    def prepare(cls, config: ObjectiveConfig, step: StepValues) -> KLCovPenalty | None:
        """Find the threshold in the covariances of the whole step."""
        term = config.kl_cov
        return None if term is None else cls(term, largest_threshold(step.covariance_R, term.fraction))

    def choose(self, values: TokenValues) -> Tensor:
        """The tokens at or above the threshold; where it is not positive, those of positive covariance only."""
        return values.mask_T & (values.covariance_T >= self.threshold) & (values.covariance_T > 0)

    def penalty(self, values: TokenValues) -> Tensor:
        """coefficient · KL, [T]."""
        return self.term.coefficient * kl_penalty(self.term, values.delta_T, values.reference_delta_T)


def largest_threshold(covariance_R: Tensor, fraction: float) -> Tensor:
    """The smallest of the ``fraction`` largest values, of one at least; a scalar."""
    return covariance_R.topk(token_count(fraction, covariance_R.numel())).values[-1]
