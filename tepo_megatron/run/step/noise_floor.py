"""What a run says where a bound of its objective is finer than the rounding noise that it measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tepo_megatron.config import ObjectiveConfig
from tepo_megatron.config.objective.custom import OwnKind

LEVEL = "p99"
"""Bounds are compared with this quantile of the noise: what one value in a hundred exceeds."""


def below_the_noise(objective: ObjectiveConfig, row: Mapping[str, float]) -> list[str]:
    """Sentences about bounds below the noise in a row of metrics; none if the row measured none, or all are above."""
    return [*_mask(objective, row), *_clip(objective, row)]


def _mask(objective: ObjectiveConfig, row: Mapping[str, float]) -> Iterator[str]:
    mask, noise = objective.kl_mask, row.get(f"entropy/noise/{LEVEL}", 0.0)
    if mask is not None and mask.falling == "measured" and mask.tolerance != "auto" and mask.tolerance < noise:
        yield (
            f"objective.kl_mask.tolerance = {mask.tolerance:g} nats is below the rounding noise of entropies here "
            f"(entropy/noise/{LEVEL} = {noise:.2g}): some tokens count as falling by chance; set it to auto, or higher"
        )


def _clip(objective: ObjectiveConfig, row: Mapping[str, float]) -> Iterator[str]:
    level = "sequence_ratio" if objective.ratio.kind.startswith("sequence") else "ratio"
    noise = row.get(f"{level}/noise/{LEVEL}", 0.0)
    for name in ("low", "high"):
        bound = None if isinstance(objective.trust_region, OwnKind) else getattr(objective.trust_region, name, None)
        if bound is not None and bound < noise:
            yield (
                f"objective.trust_region.{name} = {bound:g} is below the rounding noise of ratios here "
                f"({level}/noise/{LEVEL} = {noise:.2g}): some are clipped by chance; set it higher, or train in a finer dtype"
            )
