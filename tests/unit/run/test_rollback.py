"""When a run goes back, and which bounds are finer than the measured noise."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tepo_megatron.config import ObjectiveConfig, RunConfig
from tepo_megatron.config.train import RollbackConfig
from tepo_megatron.run.step.instability import LEAST, WINDOW, Rollback, below_the_noise


@given(st.lists(st.floats(0.1, 100.0), max_size=60), st.floats(1.5, 20.0))
def test_a_factor_is_of_the_median_of_the_steps_that_stayed(values: list[float], factor: float) -> None:
    guard = Rollback(RollbackConfig(metric="loss", factor=factor))
    stayed: list[float] = []
    for value in values:
        recent = stayed[-WINDOW:]
        expected = len(recent) >= LEAST and value > factor * median(recent)
        assert bool(guard.reason({"loss": value})) == expected
        if not expected:
            stayed.append(value)


def test_a_metric_that_is_missing_is_a_mistake_unless_the_step_was_skipped() -> None:
    guard = Rollback(RollbackConfig(metric="kl/reference", above=1.0))
    assert guard.reason({"loss": float("nan"), "update/skipped": 4.0}) == ""
    with pytest.raises(
        ValueError, match=r"train.rollback.metric = kl/reference is no column of a step; there are grad_norm, loss"
    ):
        guard.reason({"loss": 1.0, "grad_norm": 1.0})
    assert Rollback(None).reason({}) == ""


@pytest.mark.parametrize(
    ("train", "replay", "message"),
    [
        ({"rollback": {"metric": "loss"}, "save_every": 1}, None, "give one of above"),
        ({"rollback": {"metric": "loss", "above": 1, "factor": 2}, "save_every": 1}, None, "give one of above"),
        ({"rollback": {"metric": "loss", "above": 1}}, None, "save_every = 0 writes none"),
        ({"rollback": {"metric": "loss", "above": 1}, "save_every": 1}, "/x", "the same rollouts would be read again"),
    ],
)
def test_what_cannot_act_is_refused(train: dict[str, object], replay: str | None, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RunConfig.model_validate({"train": train, "rollout": {"replay": replay}})


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
