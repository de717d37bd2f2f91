"""What rank 0 remembers of a step that is given up."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.config import LogConfig, RolloutConfig, RunConfig
from tepo_megatron.core.problem import Problem
from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.run.callbacks.callbacks import Callbacks
from tepo_megatron.run.display.progress import NoProgress
from tepo_megatron.run.metrics.metrics import Stopwatch
from tepo_megatron.run.rank0 import Rank0
from tepo_megatron.runtime.preemption import StopRequested
from tepo_megatron.runtime.watch.heartbeat import Heartbeat
from tests.support.fake_sampling import FakeFleet, FakeVerifiers, collector

PROBLEMS = [Problem(f"p{number}", "q", "a") for number in range(7)]


def make(output: Path, fleet: FakeFleet | None = None) -> Rank0:
    """A rank 0 without a journal."""
    tokenizer = SimpleNamespace(prompt_ids=lambda prompt, **_options: [3], decode=str, unk_id=None)
    spec = SimpleNamespace(vocab_size=50, max_positions=64)
    inputs: Any = SimpleNamespace(train=PROBLEMS, heldout=[], tokenizer=tokenizer, model_dir=Path(), spec=spec)
    shown: Any = SimpleNamespace(message=print, write_failed=None, progress=NoProgress(), last_step=None)
    pool: Any = None
    rank0 = Rank0(RunConfig(rollout=RolloutConfig(replay=Path("none"))), inputs, shown, Heartbeat(), pool)
    run = RunConfig(output=output, rollout=RolloutConfig(prompts_per_step=3, samples_per_prompt=2, journal=False))
    stand_in: Any = rank0
    stand_in.collector = collector(run, PROBLEMS, FakeVerifiers(0, lambda problem, text: 1.0), fleet or FakeFleet(0))
    return rank0


def asked(rank0: Rank0, step: int) -> list[str]:
    """The problems of a step's groups."""
    return [rollout.problem_id for rollout in rank0.collector.collect(step)[::2]]


@given(before=st.integers(0, 6), stopped=st.booleans(), saved_late=st.booleans())
def test_a_step_that_was_given_up_draws_the_same_problems_again(before: int, stopped: bool, saved_late: bool) -> None:
    """Whether it was sampling, or had all its rollouts; and a step that was completed is not drawn again."""
    output = Path("none")
    dies_after = 6 * (before + 1) + 3 if stopped else None
    rank0 = make(output, FakeFleet(0, dies_after, error=lambda: StopRequested(signal.SIGTERM)))
    for step in range(before + 1):
        asked(rank0, step)
    if stopped:
        with pytest.raises(StopRequested):
            asked(rank0, before + 1)
    step = before + 1 if stopped or saved_late else before  # steps that were completed
    rank0.collector.drop_step(step)
    resumed = make(output)
    resumed.restore({"step": step, **rank0.state()})
    uninterrupted = make(output)
    expected = [asked(uninterrupted, number) for number in range(step + 1)]
    assert asked(resumed, step) == expected[-1]


def rollout(number: int, reward: float | None) -> Rollout:
    ids = tuple(range(number + 1))
    parts = {} if reward is None else {"right": reward}
    return Rollout(f"p{number // 2}", number // 2, (3,), ids, ids, "stop", WeightsVersion(4), f"text {number}", reward, parts)


def collecting(rank0: Rank0, drawn: list[Rollout]) -> list[tuple[int, list[dict[str, Any]]]]:
    """Has the rank0 collect these; returns what it writes of them for people."""
    written: list[tuple[int, list[dict[str, Any]]]] = []
    stand_in: Any = rank0
    stand_in.collector.collect = lambda step: drawn
    stand_in.collector.drawn = drawn
    stand_in.output.write_train_samples = lambda step, rows: written.append((step, rows))
    return written


def test_responses_of_a_step_are_written_with_what_they_answer_and_also_those_without_a_reward() -> None:
    rank0 = make(Path("none"))
    written = collecting(rank0, [rollout(0, 1.0), rollout(1, None), rollout(2, 0.5)])
    rank0.collect(4)
    assert written == []  # unless the run asks for them
    rank0.config = RunConfig(log=LogConfig(train_samples=2))
    rank0.collect(5)
    ((step, rows),) = written
    assert step == 6  # as the step's row is numbered
    assert [(row["problem"], row["prompt"], row["answer"], row["response"], row["reward"]) for row in rows] == [
        ("p0", "q", "a", "text 0", 1.0),
        ("p0", "q", "a", "text 1", None),
    ]
    assert all("source" not in row for row in rows)
    assert [row.get("components") for row in rows] == [{"right": 1.0}, None]
    assert [(row["tokens"], row["finish_reason"], row["weights_version"]) for row in rows] == [(1, "stop", 4), (2, "stop", 4)]


def test_a_step_at_which_a_callback_raises_is_trained_and_is_the_last() -> None:
    class Fails:
        def on_rollouts(self, step: int, rollouts: Any) -> None:
            raise ValueError("no such thing")

    rank0 = make(Path("none"))
    drawn = [rollout(0, 1.0)]
    collecting(rank0, drawn)
    assert rank0.callbacks.go_on
    rank0.callbacks = Callbacks([Fails()])
    assert rank0.collect(4) is drawn
    assert not rank0.callbacks.go_on
    with pytest.raises(RuntimeError, match="Fails raised ValueError: no such thing in on_rollouts at step 5 "):
        rank0.callbacks.raise_failure(saved_step=5)


@pytest.mark.parametrize(("logged", "seconds"), [(4, 3.0), (3, 103.0)])
def test_the_first_step_of_a_resumed_run_is_not_charged_with_its_start(logged: int, seconds: float) -> None:
    """The row of step 4 is there already; where it is not, the start belongs to it, as that of a first row."""
    rank0 = make(Path("none"))
    collecting(rank0, [])
    now = [0.0]
    rank0.watch = Stopwatch(lambda: now[0])
    stand_in: Any = rank0
    stand_in.output.last_step = logged
    now[0] += 100.0
    rank0.collect(4)
    now[0] += 1.0
    rank0.collect(4)  # again, as after a server's death
    now[0] += 2.0
    assert rank0.watch.split()["time/step"] == seconds
