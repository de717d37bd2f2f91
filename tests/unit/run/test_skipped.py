"""Skipped optimizer steps: kept with their rollouts, counted in a row, and the end after too many."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.config import RunConfig
from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.run.step.instability import SkippedUpdates
from tepo_megatron.run.step.minibatches import minibatches, summarize
from tepo_megatron.trainer.packing import pack
from tepo_megatron.trainer.protocol import UpdateResult

MADE = UpdateResult(loss=1.0, grad_norm=2.0, lr=0.1, sums={"entropy/mean": (3.0, 4.0)}, extrema={"ratio/max": 1.5})
SKIPPED = UpdateResult(float("nan"), float("inf"), 0.1, {}, {}, skipped="rank 1: a gradient", not_finite=[{"rank": 1}])


def rollouts(count: int) -> list[Rollout]:
    return [
        Rollout(f"p{at // 2}", at // 2, (3,), (4, 5 + at), (-1.0, -1.0), "stop", WeightsVersion(0), reward=float(at % 2))
        for at in range(count)
    ]


def guard_of(allowed: int, keep: Callable[[int, Any], Path]) -> SkippedUpdates:
    config = RunConfig.model_validate({"seed": 5, "train": {"max_skipped": allowed}})
    return SkippedUpdates(config, keep, lambda value: value)


def first_stop(steps: Sequence[Sequence[bool]], allowed: int) -> tuple[int | None, list[int]]:
    """The step after which the run stops, and the steps that were kept."""
    kept: list[int] = []

    def keep(step: int, skipped: Sequence[Mapping[str, Any]]) -> Path:
        kept.append(step)
        return Path("out/skipped/step.json")

    guard, batch = guard_of(allowed, keep), pack(rollouts(8))
    for step, skips in enumerate(steps):
        updates = [SKIPPED if skip else MADE for skip in skips]
        try:
            guard.check(step, batch, updates)
        except RuntimeError:
            return step, kept
    return None, kept


@given(st.lists(st.lists(st.booleans(), min_size=2, max_size=2), max_size=12), st.integers(0, 5))
def test_a_run_stops_at_the_first_row_of_skips_that_is_too_long(steps: list[list[bool]], allowed: int) -> None:
    flat, expected = "".join("s" if skip else "." for skips in steps for skip in skips), None
    at = flat.find("s" * (allowed + 1))
    if at >= 0:
        expected = (at + allowed) // 2
    stopped, kept = first_stop(steps, allowed)
    assert stopped == expected
    end = len(steps) if stopped is None else stopped + 1
    assert kept == [step for step, skips in enumerate(steps[:end]) if any(skips)]


def test_the_sentence_names_the_first_cause_and_the_folder() -> None:
    guard, batch = guard_of(2, lambda step, skipped: Path("out/skipped/step_0000007.json")), pack(rollouts(4))
    guard.check(6, batch, [MADE, replace(SKIPPED, skipped="rank 3: the first")])
    with pytest.raises(RuntimeError) as info:
        guard.check(7, batch, [SKIPPED, SKIPPED])
    assert str(info.value) == (
        "3 optimizer steps in a row were skipped (train.max_skipped = 2) since a number was not finite; the first in step 7, "
        "mini-batch 2 of 2: rank 3: the first. The weights are as they were before it, and the rollouts are in out/skipped. "
        "Look there, lower optimizer.lr, or raise train.max_skipped"
    )


def test_an_entry_names_the_rollouts_of_its_minibatch() -> None:
    step, entries = rollouts(7), list[Mapping[str, Any]]()

    def keep(number: int, skipped: Sequence[Mapping[str, Any]]) -> Path:
        entries.extend(skipped)
        return Path("out")

    guard_of(1, keep).check(4, pack(step), [MADE, SKIPPED, MADE])
    (entry,) = entries
    assert (entry["minibatch"], entry["cause"], entry["ranks"]) == (1, "rank 1: a gradient", [{"rank": 1}])
    parts = list(minibatches(pack(step), 3, seed=5, step=4))
    assert torch.equal(pack([step[index] for index in entry["rollouts"]]).tokens_T, parts[1].tokens_T)


def test_skipped_steps_are_counted_and_in_no_mean() -> None:
    row = summarize(pack(rollouts(4)), [SKIPPED, MADE, SKIPPED])
    made = summarize(pack(rollouts(4)), [MADE])
    assert row == {**made, "update/skipped": 2.0}
    nothing = summarize(pack(rollouts(4)), [SKIPPED])
    assert nothing["update/skipped"] == 1
    assert nothing["loss"] != nothing["loss"]
    assert "entropy/mean" not in nothing
