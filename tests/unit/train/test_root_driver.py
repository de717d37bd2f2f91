"""What rank 0 remembers of a step that is given up."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.config import RolloutConfig, RunConfig
from tepo_megatron.preemption import StopRequested
from tepo_megatron.train import root_driver
from tepo_megatron.train.root_driver import RootDriver
from tepo_megatron.types import Problem

PROBLEMS = [Problem(f"p{number}", "q", "a") for number in range(7)]


def make() -> tuple[RootDriver, list[list[str]]]:
    """A driver without servers, and the problems that it asks samples of."""
    asked: list[list[str]] = []
    inputs: Any = SimpleNamespace(train=PROBLEMS, heldout=[], tokenizer=None, model_dir=Path())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(root_driver, "RewardPool", lambda config: None)
        driver = RootDriver(RunConfig(rollout=RolloutConfig(replay=Path("none"))), inputs, output=None)
    driver.config = RunConfig(rollout=RolloutConfig(prompts_per_step=3))
    driver._sample = lambda problems, step: asked.append([problem.id for problem in problems])  # type: ignore[method-assign]
    driver._reward = lambda rollouts, problems: []  # type: ignore[method-assign]
    return driver, asked


@given(before=st.integers(0, 6), stopped=st.booleans(), saved_late=st.booleans())
def test_a_step_that_was_given_up_draws_the_same_problems_again(before: int, stopped: bool, saved_late: bool) -> None:
    """Whether it was sampling, or had all its rollouts; and a step that was completed is not drawn again."""
    driver, _ = make()
    for step in range(before + 1):
        driver._collect(step)
    if stopped:
        driver._sample = lambda problems, step: (_ for _ in ()).throw(StopRequested(signal.SIGTERM))  # type: ignore[method-assign]
        with pytest.raises(StopRequested):
            driver._collect(before + 1)
    step = before + 1 if stopped or saved_late else before  # steps that were completed
    driver.drop_step(step)
    resumed, again = make()
    resumed.restore(driver.state())
    resumed._collect(step)
    uninterrupted, expected = make()
    for each in range(step + 1):
        uninterrupted._collect(each)
    assert again == expected[-1:]
