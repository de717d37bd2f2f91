"""Whether an update fits into the grace time, what a hard end would lose, and when a checkpoint is due by the clock."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.run.step.stopping import Stopping


@given(update=st.floats(0, 100), save=st.none() | st.floats(0, 100), left=st.floats(0, 200))
def test_a_step_is_finished_where_its_updates_and_a_checkpoint_fit_twice(
    update: float, save: float | None, left: float
) -> None:
    stopping = Stopping(saved_step=0, signals=SimpleNamespace(seconds_left=lambda: left))  # type: ignore[arg-type]
    assert not stopping.update_fits()  # nobody knows how long the first updates take
    stopping.seconds = {"update": update} | ({} if save is None else {"save": save})
    assert stopping.update_fits() == (2 * (update + (update if save is None else save)) <= left)
    stopping.signals.seconds_left = lambda: math.inf  # type: ignore[method-assign]
    assert stopping.update_fits()


@given(saved=st.integers(0, 50), more=st.integers(1, 9))
def test_what_a_hard_end_would_lose_is_said_with_its_steps(saved: int, more: int) -> None:
    stopping = Stopping(saved_step=saved)
    assert stopping.at_risk(saved) == ""
    lost = f"step {saved + 1} is lost" if more == 1 else f"steps {saved + 1} to {saved + more} are lost"
    newest = f"the newest checkpoint is step_{saved:06d}" if saved else "there is no checkpoint"
    assert stopping.at_risk(saved + more) == f"{lost}; {newest}"


def test_a_checkpoint_is_due_when_the_last_one_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("tepo_megatron.run.step.stopping.time.monotonic", lambda: now[0])
    stopping, seen = Stopping(saved_step=0), []
    for step in range(1, 9):
        now[0] += 60.0
        seen.append(stopping.save_is_due(3))
        assert not stopping.save_is_due(0)
        if seen[-1]:
            stopping.saved(step, stage_s=1.0, write_s=2.0, waited_s=3.0)
            assert stopping.seconds["save"] == 3.0
    assert seen == [False, False, True] * 2 + [False, False]
