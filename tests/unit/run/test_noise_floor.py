"""Bounds that are finer than the measured noise are named, and only these."""

from __future__ import annotations

from typing import Any

import pytest

from tepo_megatron.config import ObjectiveConfig
from tepo_megatron.run.step.instability import below_the_noise

QUIET = {"entropy/noise/p99": 1e-6, "ratio/noise/p99": 1e-6, "sequence_ratio/noise/p99": 1e-6}


@pytest.mark.parametrize(
    ("given", "row", "named"),
    [
        ({"preset": "tepo"}, {}, []),
        ({"preset": "tepo"}, QUIET, []),
        ({"preset": "tepo"}, QUIET | {"entropy/noise/p99": 0.1}, []),  # auto goes with it
        ({"preset": "tepo", "kl_mask": {"tolerance": 0.05}}, QUIET | {"entropy/noise/p99": 0.04}, []),
        ({"preset": "tepo", "kl_mask": {"tolerance": 0.05}}, QUIET | {"entropy/noise/p99": 0.06}, ["kl_mask.tolerance = 0.05"]),
        ({"preset": "grpo"}, QUIET | {"entropy/noise/p99": 9.0, "sequence_ratio/noise/p99": 9.0}, []),
        ({"preset": "gspo"}, QUIET | {"sequence_ratio/noise/p99": 3.5e-4}, ["trust_region.low = 0.0003"]),
        ({"preset": "gspo"}, QUIET | {"sequence_ratio/noise/p99": 1e-3}, ["trust_region.low", "trust_region.high"]),
        ({"preset": "grpo"}, QUIET | {"ratio/noise/p99": 0.3}, ["trust_region.low", "trust_region.high"]),
    ],
)
def test_bounds_below_the_noise_are_named(given: dict[str, Any], row: dict[str, float], named: list[str]) -> None:
    said = below_the_noise(ObjectiveConfig.model_validate(given), row)
    assert len(said) == len(named)
    assert all(name in sentence for name, sentence in zip(named, said, strict=True))
