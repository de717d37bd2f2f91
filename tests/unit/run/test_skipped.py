"""Skipped optimizer steps: kept with their rollouts, counted in a row, and the end after too many."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.core.rollout import Rollout, WeightsVersion, token_logprobs
from tepo_megatron.run.step.instability import SkippedUpdates, describe, write_skipped
from tepo_megatron.run.step.minibatches import minibatches, summarize
from tepo_megatron.sampler.rollout_file import read_rollouts
from tepo_megatron.trainer.packing import pack
from tepo_megatron.trainer.protocol import UpdateResult

MADE = UpdateResult(loss=1.0, grad_norm=2.0, lr=0.1, sums={"entropy/mean": (3.0, 4.0)}, extrema={"ratio/max": 1.5})
SKIPPED = UpdateResult(float("nan"), float("inf"), 0.1, {}, {}, skipped="rank 1: a gradient", not_finite=[{"rank": 1}])


def rollouts(count: int) -> list[Rollout]:
    return [
        Rollout(f"p{at // 2}", at // 2, (3,), (4, 5 + at), (-1.0, -1.0), "stop", WeightsVersion(0), reward=float(at % 2))
        for at in range(count)
    ]


def first_stop(steps: Sequence[Sequence[bool]], allowed: int) -> tuple[int | None, list[int]]:
    """The step after which the run stops, and the steps that were kept."""
    kept: list[int] = []

    def keep(step: int, skipped: Sequence[Mapping[str, Any]]) -> Path:
        kept.append(step)
        return Path("out/skipped/step.json")

    guard = SkippedUpdates(allowed, keep, lambda value: value)
    for step, skips in enumerate(steps):
        updates = [SKIPPED if skip else MADE for skip in skips]
        try:
            guard.check(step, updates, partial(describe, updates, 8, seed=0, step=0))
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
    guard = SkippedUpdates(2, lambda step, skipped: Path("out/skipped/step_0000007.json"), lambda value: value)
    guard.check(6, [MADE, replace(SKIPPED, skipped="rank 3: the first")], list)
    with pytest.raises(RuntimeError) as info:
        guard.check(7, [SKIPPED, SKIPPED], list)
    assert str(info.value) == (
        "3 optimizer steps in a row were skipped (train.max_skipped = 2) since a number was not finite; the first in step 7, "
        "mini-batch 2 of 2: rank 3: the first. The weights are as they were before it, and the rollouts are in out/skipped. "
        "Look there, lower optimizer.lr, or raise train.max_skipped"
    )


def test_what_is_kept_is_the_steps_rollouts_and_which_of_them_were_skipped(tmp_path: Path) -> None:
    given = rollouts(7)
    given[2] = replace(given[2], sampler_logprobs=token_logprobs((-1.0, float("-inf"))))
    parts = list(minibatches(pack(given), 3, seed=5, step=4))
    updates = [MADE, SKIPPED, MADE]
    path = write_skipped(tmp_path, 4, given, describe(updates, 7, seed=5, step=4))
    assert read_rollouts(tmp_path, 4) == given
    (found,) = json.loads(path.read_text())["skipped"]
    assert (found["minibatch"], found["cause"], found["ranks"]) == (1, "rank 1: a gradient", [{"rank": 1}])
    assert torch.equal(pack([given[at] for at in found["rollouts"]]).tokens_T, parts[1].tokens_T)


def test_skipped_steps_are_counted_and_in_no_mean() -> None:
    row = summarize(pack(rollouts(4)), [SKIPPED, MADE, SKIPPED])
    made = summarize(pack(rollouts(4)), [MADE])
    assert row == {**made, "update/skipped": 2.0}
    nothing = summarize(pack(rollouts(4)), [SKIPPED])
    assert nothing["update/skipped"] == 1
    assert nothing["loss"] != nothing["loss"]
    assert "entropy/mean" not in nothing
