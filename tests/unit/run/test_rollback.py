"""When a run goes back."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tepo_megatron.config import RunConfig
from tepo_megatron.config.train import RollbackConfig
from tepo_megatron.run.step.instability import LEAST, WINDOW, Rollback
from tests.support.recorded_loop import STEP, make, run


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


@pytest.mark.parametrize("shares_gpus", [False, True])
def test_a_spike_undoes_the_step_and_trainer_and_servers_go_back(tmp_path: Path, shares_gpus: bool) -> None:
    calls = run(3, spikes=(6,), every=0, save_every=2, output=tmp_path, shares_gpus=shares_gpus)
    at = calls.index("load step_000002")
    assert calls[at - 5 : at] == ["collect 2", *STEP]
    assert calls[at + 1 :] == [
        "back 2: step 3: loss is 25.5, above train.rollback.above = 20",
        "update weights 2",
        "canary 2",
        "collect 2",
        *STEP,
        "save 3",
        "update weights 3",
        "canary 3",
        "log 3",
    ]


def test_a_spike_before_the_first_checkpoint_is_said_and_too_many_stop_the_run(tmp_path: Path) -> None:
    calls = run(2, spikes=(1,), every=0, save_every=2, output=tmp_path / "one")
    assert "step 1: loss is 25.5, above train.rollback.above = 20, but there is no checkpoint yet to go back to" in str(calls)
    assert [call for call in calls if call.startswith("log")] == ["log 0", "log 1", "log 2"]
    with pytest.raises(
        RuntimeError, match=r"loss is 25.5, above .*, after 1 returns to a checkpoint \(train.rollback.max_times"
    ):
        run(3, spikes=(4, 6), every=0, save_every=1, output=tmp_path / "two")


def test_a_damaged_checkpoint_is_passed_over_when_a_run_goes_back(tmp_path: Path) -> None:
    loop, recorder = make(4, spikes=(6,), every=0, save_every=1, output=tmp_path)
    recorder.damaged = ("step_000002",)
    loop.run()
    at = recorder.calls.index("load step_000001")
    assert recorder.calls[at - 5 : at] == ["collect 2", *STEP]
    assert recorder.calls[at + 1 : at + 4] == [
        "back 1: step 3: loss is 25.5, above train.rollback.above = 20",
        "passed over step_000002",
        "update weights 1",
    ]
    assert "load step_000002" not in recorder.calls
    assert recorder.calls[-1] == "log 4"


def test_a_run_that_cannot_go_back_to_a_whole_checkpoint_stops(tmp_path: Path) -> None:
    loop, recorder = make(3, spikes=(4,), every=0, save_every=1, output=tmp_path)
    recorder.damaged = ("step_000001",)
    with pytest.raises(RuntimeError, match=r"loss is 25.5, .* cannot go back: no checkpoint in .* is whole: step_000001"):
        loop.run()
