"""Base class of the sections below ``objective``, with what each needs of a step."""

from typing import Literal, NamedTuple

from tepo_megatron.config.base import Section

Need = Literal["reference", "entropy_slope", "entropy_gradient", "entropy_noise"]
"""``reference``: log-probs of a frozen copy of the first weights. ``entropy_slope``: ``TokenScores.entropy_slope``.
``entropy_gradient``: a gradient through ``TokenScores.entropy``. ``entropy_noise``: measured rounding noise."""


class NoiseBound(NamedTuple):
    """A bound without effect if the rounding noise is larger."""

    field: str
    value: float
    noise: Literal["entropy", "ratio"]
    consequence: str
    """Effect below the noise, and a remedy: the end of a warning."""


class ObjectiveSection(Section):
    """By default a section needs no inputs, chooses no tokens and has no bounds."""

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset()

    @property
    def selects_tokens(self) -> bool:
        """Whether it acts on some response tokens only."""
        return False

    @property
    def noise_bounds(self) -> tuple[NoiseBound, ...]:
        return ()

    @property
    def turning_points(self) -> tuple[float, ...]:
        """Distances of a token's log-ratio from 0 at which the push on it changes, for plots."""
        return ()
