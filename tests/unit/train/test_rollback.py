"""When a run goes back."""

from __future__ import annotations

from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tepo_megatron.config import RunConfig
from tepo_megatron.config.train import RollbackConfig
from tepo_megatron.train.rollback import LEAST, WINDOW, Rollback


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
