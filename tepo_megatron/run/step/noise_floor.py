"""Warnings about bounds of the objective that are finer than the measured rounding noise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tepo_megatron.config import ObjectiveConfig

_QUANTILE = "p99"


def below_the_noise(objective: ObjectiveConfig, row: Mapping[str, float]) -> list[str]:
    """One sentence for each bound below the noise in a row of metrics; none if the row measured none."""
    return list(_warnings(objective, row))


def _warnings(objective: ObjectiveConfig, row: Mapping[str, float]) -> Iterator[str]:
    for name, section in objective.sections.items():
        for bound in section.noise_bounds:
            metric = f"{objective.ratio.noise if bound.noise == 'ratio' else bound.noise}/noise/{_QUANTILE}"
            noise = row.get(metric, 0.0)
            if bound.value < noise:
                unit, values = ("", "ratios") if bound.noise == "ratio" else (" nats", "entropies")
                yield (
                    f"objective.{name}.{bound.field} = {bound.value:g}{unit} is below the rounding noise of {values} here "
                    f"({metric} = {noise:.2g}): {bound.consequence}"
                )
