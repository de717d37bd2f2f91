"""What a loop does when a signal asks it to stop, and when a checkpoint is due by the clock."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tepo_megatron.run.step.graceful_stop import Leaving
from tepo_megatron.runtime.preemption import StopRequested
from tests.support.recorded_loop import make, run


@pytest.mark.parametrize("shares_gpus", [False, True])
@settings(max_examples=50)
@given(
    stops_at=st.integers(0, 40),
    save_every=st.integers(0, 3),
    every=st.integers(0, 3),
    resumed=st.integers(0, 1),
    async_save=st.booleans(),
)
def test_a_signal_at_any_point_costs_no_trained_step(
    shares_gpus: bool, stops_at: int, save_every: int, every: int, resumed: int, async_save: bool
) -> None:
    """What was trained is saved, once; no step is half trained; and the resumed run goes on as if nothing had been."""
    steps = 4
    loop, recorder = make(
        steps,
        save_every=save_every,
        every=every,
        shares_gpus=shares_gpus,
        resumed=resumed,
        row=resumed or None,
        stops_at=stops_at,
        async_save=async_save,
    )
    calls = recorder.calls
    whole = run(steps, save_every=save_every, every=every, resumed=resumed, row=resumed or None, async_save=async_save)
    if stops_at >= len([call for call in whole if not call.startswith("saved")]):
        return  # the run has ended before
    with pytest.raises(StopRequested):
        loop.run()
    assert calls.count("update 3") == 2 * (loop.step - resumed)
    saved = [int(call.split()[1]) for call in calls if call.startswith("save ")]
    assert saved == sorted(set(saved))
    assert max([resumed, *saved]) == loop.step
    assert recorder.saving is None, "it is not left while it is being written"
    name = f"step_{loop.step:06d}"
    assert calls[-1] in (
        f"SIGTERM: saved {name}; continue with --resume",
        f"SIGTERM: nothing was trained since {name}, so nothing more was saved; continue with --resume",
        "SIGTERM: ended before a step was trained; there is nothing to save",
    )
    assert ("there is nothing" in calls[-1]) == (loop.step == 0)
    rows = [int(call.split()[1]) for call in calls if call.startswith("log ")]
    rows += [
        int(call.split()[1])
        for call in run(steps, save_every=save_every, every=every, resumed=loop.step, row=recorder.last_step)
        if call.startswith("log ")
    ]
    assert rows == list(range(resumed + 1 if resumed else 0, steps + 1))


@given(update=st.floats(0, 100), save=st.none() | st.floats(0, 100), left=st.floats(0, 200))
def test_a_step_is_finished_where_its_updates_and_a_checkpoint_fit_twice(
    update: float, save: float | None, left: float
) -> None:
    leaving = Leaving(saved_step=0, signals=SimpleNamespace(seconds_left=lambda: left))  # type: ignore[arg-type]
    assert not leaving.update_fits()  # nobody knows how long the first updates take
    leaving.seconds = {"update": update} | ({} if save is None else {"save": save})
    assert leaving.update_fits() == (2 * (update + (update if save is None else save)) <= left)
    leaving.signals.seconds_left = lambda: math.inf  # type: ignore[method-assign]
    assert leaving.update_fits()


@given(saved=st.integers(0, 50), more=st.integers(1, 9))
def test_what_a_hard_end_would_lose_is_said_with_its_steps(saved: int, more: int) -> None:
    leaving = Leaving(saved_step=saved)
    assert leaving.at_risk(saved) == ""
    lost = f"step {saved + 1} is lost" if more == 1 else f"steps {saved + 1} to {saved + more} are lost"
    newest = f"the newest checkpoint is step_{saved:06d}" if saved else "there is no checkpoint"
    assert leaving.at_risk(saved + more) == f"{lost}; {newest}"


def test_a_checkpoint_is_due_when_the_last_one_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("tepo_megatron.run.step.graceful_stop.time.monotonic", lambda: now[0])
    leaving, seen = Leaving(saved_step=0), []
    for step in range(1, 9):
        now[0] += 60.0
        seen.append(leaving.save_is_due(3))
        assert not leaving.save_is_due(0)
        if seen[-1]:
            leaving.saved(step, stage_s=1.0, write_s=2.0, waited_s=3.0)
            assert leaving.seconds["save"] == 3.0
    assert seen == [False, False, True] * 2 + [False, False]
