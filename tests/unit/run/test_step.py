"""Mini-batches, the end of a run, skipped steps, rollback, bounds below the noise, and clips."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.config import ObjectiveConfig, RunConfig, TrainConfig
from tepo_megatron.core.problem import Problem
from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.core.types import count_moves
from tepo_megatron.run.step.instability import ObjectiveWatch, Rollback, SkippedUpdates
from tepo_megatron.run.step.minibatches import derive_seed, minibatches, source_figures, summarize
from tepo_megatron.run.step.stopping import Stopping
from tepo_megatron.trainer.packing import pack
from tepo_megatron.trainer.protocol import UpdateResult


def test_minibatches_divide_the_batch_and_depend_on_seed_and_step_alone() -> None:
    batch, before = pack(rollouts(7)), torch.get_rng_state()

    def order(seed: int, step: int) -> list[list[int]]:
        return [part.tokens_T[2::3].tolist() for part in minibatches(batch, 3, seed=seed, step=step)]

    assert sorted(token for part in order(0, 0) for token in part) == sorted(batch.tokens_T[2::3].tolist())
    assert [len(part) for part in order(0, 0)] == [3, 2, 2]
    assert order(0, 0) == order(0, 0)
    assert len({str(order(seed, step)) for seed in range(3) for step in range(3)}) > 1
    assert torch.equal(torch.get_rng_state(), before)
    seeds = {derive_seed(seed, step, use) for seed in range(3) for step in range(50) for use in ("rollout", "evaluate")}
    assert len(seeds) == 300
    assert all(0 <= seed < 2**31 for seed in seeds)


def rollout(problem: str, group: int, reward: float, response: Sequence[int] = (4,)) -> Rollout:
    return Rollout(problem, group, (3,), response, [-1.0] * len(response), "stop", WeightsVersion(0), reward=reward)


def test_shares_are_of_groups_and_rewards_of_responses() -> None:
    """Names are given: a step does not look through all problems for them, of which there may be millions."""
    problems = {name: Problem(name, "q", "a", source=name[0]) for name in ("a/1", "a/2", "b/1")}
    drawn = (("a/1", 0, 1.0), ("a/1", 0, 0.0), ("b/1", 1, 1.0), ("a/2", 2, 0.5), ("x", 3, 1.0))
    batch = pack([rollout(*each) for each in drawn])
    teacher_T = torch.tensor([2.0, 2.0, 0.5, 2.0, 4.0]).double().log()[batch.sequence_index_T]  # of each rollout
    batch = batch.with_(old_logprobs_T=torch.zeros_like(teacher_T), teacher_logprobs_T=teacher_T)
    assert source_figures(("a", "b", "c"), [rollout(*each) for each in drawn], problems, [batch]) == {
        "source/a/share": 0.5,
        "source/a/reward": 0.5,
        "source/a/divergence": pytest.approx(2 - 1 - math.log(2)),
        "source/b/share": 0.25,
        "source/b/reward": 1.0,
        "source/b/divergence": pytest.approx(0.5 - 1 + math.log(2)),
        "source/c/share": 0.0,
    }
    assert source_figures((), [rollout("a", 0, 1.0)], {"a": Problem("a", "q", "a")}) == {}


@given(update=st.floats(0, 100), save=st.none() | st.floats(0, 100), left=st.floats(0, 200))
def test_a_step_is_finished_if_updates_and_a_save_fit_twice(update: float, save: float | None, left: float) -> None:
    stopping = Stopping(saved_step=0, signals=SimpleNamespace(seconds_left=lambda: left))  # type: ignore[arg-type]
    assert not stopping.update_fits()  # nobody knows how long the first updates take
    stopping.seconds = {"update": update} | ({} if save is None else {"save": save})
    assert stopping.update_fits() == (2 * (update + (update if save is None else save)) <= left)
    stopping.signals.seconds_left = lambda: math.inf  # type: ignore[method-assign]
    assert stopping.update_fits()


def test_a_checkpoint_is_due_when_the_last_one_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("tepo_megatron.run.step.stopping.time.monotonic", lambda: now[0])
    stopping, seen = Stopping(saved_step=0), []
    for step in range(1, 9):
        now[0] += 60.0
        seen.append(stopping.save_is_due(3))
        assert not stopping.save_is_due(0)
        assert stopping.at_risk(step)
        if seen[-1]:
            stopping.saved(step, stage_s=1.0, write_s=2.0, waited_s=3.0)
            assert stopping.seconds["save"] == 3.0
            assert not stopping.at_risk(step)
    assert seen == [False, False, True] * 2 + [False, False]
    now[0] += 60.0
    assert stopping.save_is_due(3)
    stopping.began_save()
    assert not stopping.save_is_due(3)  # it is written beside training
    assert stopping.at_risk(8) == "steps 7 to 8 are lost; the newest checkpoint is step_000006"


SUMS = {"entropy/mean": (3.0, 4.0), "ratio/sigma": (12.0, 4.0)}
MADE = UpdateResult(loss=1.0, grad_norm=2.0, lr=0.1, sums=SUMS, extrema={"ratio/max": 1.5, "ratio/min": 0.9})
SKIPPED = UpdateResult(float("nan"), float("inf"), 0.1, {}, {}, skipped="rank 1: a gradient", not_finite=[{"rank": 1}])


def rollouts(count: int) -> list[Rollout]:
    return [rollout(f"p{at // 2}", at // 2, float(at % 2), (4, 5 + at)) for at in range(count)]


def guard_of(allowed: int, **train: int) -> tuple[SkippedUpdates, dict[int, Any]]:
    """Also returns what it keeps: the entries of each step."""
    entries: dict[int, Any] = {}

    def keep(step: int, skipped: Sequence[Mapping[str, Any]]) -> Path:
        entries[step] = skipped
        return Path("out/skipped/step.json")

    config = RunConfig.model_validate({"seed": 5, "train": {"max_skipped": allowed, "minibatches": 2, **train}})
    return SkippedUpdates(config, keep, lambda value: value), entries


@given(st.lists(st.lists(st.booleans(), min_size=2, max_size=2), max_size=12), st.integers(0, 5))
def test_a_run_stops_at_the_first_row_of_skips_that_is_too_long(steps: list[list[bool]], allowed: int) -> None:
    flat = "".join("s" if skip else "." for skips in steps for skip in skips)
    at = flat.find("s" * (allowed + 1))
    expected = None if at < 0 else (at + allowed) // 2
    (guard, entries), batch, stopped = guard_of(allowed), pack(rollouts(8)), None
    for step, skips in enumerate(steps):
        try:
            guard.check(step, batch, [SKIPPED if skip else MADE for skip in skips])
        except RuntimeError:
            stopped = step
            break
    assert stopped == expected
    end = len(steps) if stopped is None else stopped + 1
    assert list(entries) == [step for step, skips in enumerate(steps[:end]) if any(skips)]


def test_the_sentence_names_the_first_cause_and_an_entry_the_rollouts_of_its_minibatch() -> None:
    (guard, entries), step = guard_of(1, minibatches=3), rollouts(7)
    guard.check(4, pack(step), [MADE, replace(SKIPPED, skipped="rank 3: the first"), MADE])
    (entry,) = entries[4]
    assert (entry["minibatch"], entry["cause"], entry["ranks"]) == (1, "rank 3: the first", [{"rank": 1}])
    parts = list(minibatches(pack(step), 3, seed=5, step=4))
    assert torch.equal(pack([step[index] for index in entry["rollouts"]]).tokens_T, parts[1].tokens_T)
    guard.check(5, pack(step), [MADE, MADE, replace(SKIPPED, skipped="rank 2: the next")])
    with pytest.raises(RuntimeError) as info:
        guard.check(6, pack(step), [SKIPPED, SKIPPED, MADE])
    assert str(info.value) == (
        "2 optimizer steps in a row were skipped (train.max_skipped = 1) since a number was not finite; the first in step 6, "
        "update 3 of 3: rank 2: the next. The weights are as they were before it, and the rollouts are in out/skipped. "
        "Look there, lower optimizer.lr, or raise train.max_skipped"
    )


def test_a_second_pass_skips_the_mini_batches_of_the_first() -> None:
    guard, entries = guard_of(3, epochs_per_batch=2)
    guard.check(4, pack(rollouts(7)), [SKIPPED, MADE, SKIPPED, SKIPPED])
    assert [entry["minibatch"] for entry in entries[4]] == [0, 0, 1]
    assert entries[4][0]["rollouts"] == entries[4][1]["rollouts"] != entries[4][2]["rollouts"]


def test_masked_responses_do_not_shorten_the_mean_length() -> None:
    cut = replace(rollout("p0", 0, 0.0, (4, 5, 6, 7)), finish_reason="length")
    row = summarize(pack([*rollouts(2), cut], mask_truncated=True), [MADE])
    assert (row["response_len/mean"], row["response_tokens"]) == (2, 4)


def test_skipped_steps_are_counted_and_in_no_mean() -> None:
    row = summarize(pack(rollouts(4)), [SKIPPED, MADE, SKIPPED])
    made = summarize(pack(rollouts(4)), [MADE])
    assert row == {**made, "update/skipped": 2.0}
    clipped = replace(MADE, sums={**MADE.sums, "clip/share": (1.0, 4.0)})
    assert summarize(pack(rollouts(4)), [SKIPPED, clipped])["clip/share_u2"] == 0.25  # by the number in the step
    sums, extrema = {"entropy/mean": (1.0, 8.0), "ratio/sigma": (36.0, 8.0)}, {"ratio/max": 1.2, "ratio/min": 0.5}
    row = summarize(pack(rollouts(4)), [MADE, SKIPPED, replace(MADE, loss=3.0, grad_norm=4.0, sums=sums, extrema=extrema)])
    expected = {"entropy/mean": 1 / 3, "loss": 2.0, "grad_norm": 3.0, "ratio/sigma": 2.0, "ratio/max": 1.5, "ratio/min": 0.5}
    assert row == {**made, **expected, "reward/std": 0.5, "update/skipped": 1.0}
    nothing = summarize(pack(rollouts(4)), [SKIPPED])
    assert nothing["update/skipped"] == 1
    assert nothing["loss"] != nothing["loss"]
    assert "entropy/mean" not in nothing


@given(st.lists(st.floats(0.1, 100.0) | st.floats(-1.0, 0.0) | st.just(math.inf), max_size=60), st.floats(1.5, 20.0))
def test_a_factor_is_of_the_median_of_the_steps_that_stayed(values: list[float], factor: float) -> None:
    guard = Rollback(TrainConfig(save_every=1, rollback={"metric": "loss", "factor": factor}))
    stayed: list[float] = []
    for value in values:
        recent = stayed[-guard.WINDOW :]
        positive = len(recent) >= guard.LEAST and median(recent) > 0  # no multiple of another median is a bound
        expected = value == math.inf or (positive and value > factor * median(recent))
        assert bool(guard.reason({"loss": value})) == expected
        if not expected:
            stayed.append(value)


def test_a_resumed_watch_has_the_values_of_its_metric_alone() -> None:
    settings = [{"metric": metric, "factor": 2.0} for metric in ("loss", "loss", "grad_norm")]
    guards = [Rollback(TrainConfig(save_every=1, rollback=rollback)) for rollback in settings]
    for _ in range(5):
        assert not guards[0].reason({"loss": 1.0})
    guards[0].count("a spike")
    state = json.loads(json.dumps(guards[0].state()))
    for guard in guards[1:]:
        guard.restore(state)
        assert guard.times == 1
    assert [bool(guard.reason({"loss": 3.0, "grad_norm": 3.0})) for guard in guards] == [True, True, False]


def test_a_metric_that_is_missing_is_a_mistake_unless_the_step_was_skipped() -> None:
    guard = Rollback(TrainConfig(save_every=1, rollback={"metric": "kl/reference", "above": 1.0}))
    assert guard.reason({"loss": float("nan"), "update/skipped": 4.0}) == ""
    with pytest.raises(ValueError, match="metric = kl/reference is no column of a step; there are grad_norm, loss"):
        guard.reason({"loss": 1.0, "grad_norm": 1.0})
    assert Rollback(TrainConfig()).reason({}) == ""


PRODUCT = {"kind": "sequence", "length_normalized": False}
QUIET = {"entropy/noise/p99": 1e-6, "ratio/noise/p99": 1e-6, "sequence_ratio/noise/p99": 1e-6}


@pytest.mark.parametrize(
    ("given", "row", "named"),
    [
        ({"preset": "tepo"}, {}, []),
        ({"preset": "tepo"}, QUIET, []),
        ({"preset": "tepo"}, QUIET | {"entropy/noise/p99": 0.1}, []),  # auto goes with it
        ({"preset": "tepo", "kl_mask": {"tolerance": 0.05}}, QUIET | {"entropy/noise/p99": 0.04}, []),
        ({"preset": "tepo", "kl_mask": {"tolerance": 0.05}}, QUIET | {"entropy/noise/p99": 0.06}, ["kl_mask.tolerance = 0.05"]),
        ({"preset": "tepo"}, QUIET | {"ratio/noise/p99": 0.03, "sequence_ratio/noise/p99": 9.0}, ["trust_region.low = 0.026"]),
        ({"preset": "grpo"}, QUIET | {"entropy/noise/p99": 9.0, "sequence_ratio/noise/p99": 9.0}, []),
        ({"preset": "gspo"}, QUIET | {"sequence_ratio/noise/p99": 3.5e-4}, ["trust_region.low = 0.0003"]),
        ({"preset": "gspo"}, QUIET | {"sequence_ratio/noise/p99": 1e-3}, ["trust_region.low", "trust_region.high"]),
        ({"preset": "grpo"}, QUIET | {"ratio/noise/p99": 0.3}, ["trust_region.low", "trust_region.high"]),
        ({"preset": "gspo", "ratio": PRODUCT}, QUIET | {"ratio/noise/p99": 3.5e-4}, ["trust_region.low = 0.0003"]),
        ({"preset": "gmpo"}, QUIET | {"sequence_ratio/noise/p99": 9.0}, []),  # it bounds tokens
        ({"preset": "gmpo"}, QUIET | {"ratio/noise/p99": 0.5}, ["trust_region.low", "trust_region.high"]),
    ],
)
def test_bounds_below_the_noise_are_named(given: dict[str, Any], row: dict[str, float], named: list[str]) -> None:
    watch = ObjectiveWatch(ObjectiveConfig.model_validate(given))
    said = watch.noise(row)
    assert not (said and watch.noise(row))
    assert len(said) == len(named)
    assert all(name in sentence for name, sentence in zip(named, said, strict=True))


@pytest.mark.parametrize(
    ("advantage", "said"), [({"kind": "group"}, 1), ({"kind": "whitened"}, 1), ({"kind": "teacher"}, 0), ({"kind": "gdpo"}, 0)]
)
def test_equal_rewards_in_five_steps_are_reported_once(advantage: dict[str, Any], said: int) -> None:
    watch = ObjectiveWatch(ObjectiveConfig.model_validate({"preset": "grpo", "advantage": advantage}))
    shares = [1.0] * 4 + [0.9] + [1.0] * 12
    steps = [step for step, share in enumerate(shares, 1) if watch.equal_rewards({"groups/zero_variance": share})]
    assert steps == [10] * said


FIXED = {"scale": "fixed", "low": 3e-4, "high": 4e-4}
LENGTH = {"scale": "length", "low": 0.03, "high": 0.03}
AUTO = {"scale": "length", "low": "auto", "high": "auto"}


def sentences(region: dict[str, Any], share: float, *, sigma: float = 0.02, steps: int = 12) -> list[tuple[int, str]]:
    """Half of the tokens with A < 0 and half with A > 0 moved by 0.01, 0.02, … 1."""
    watch = ObjectiveWatch(ObjectiveConfig(trust_region=region))
    counts = count_moves(torch.arange(1, 101) / 100, torch.ones(100, dtype=torch.bool))
    update = UpdateResult(0.0, 1.0, 1e-6, {}, {}, moves=torch.stack([counts, counts]))
    rows = [{"clip/share": share, "ratio/sigma": sigma}] * steps
    return [(step, text) for step, row in enumerate(rows, start=1) if (text := watch.clip(row, [update, update]))]


@pytest.mark.parametrize("region", [FIXED, LENGTH, AUTO, {**AUTO, "low": 0.03}])
def test_a_clip_that_takes_more_than_a_quarter_is_reported_once_with_the_range_for_a_tenth(region: dict[str, Any]) -> None:
    ((step, text),) = sentences(region, 0.26)
    assert step == 5
    assert text.startswith("more than 25% of the tokens")
    numbers = [f"objective.trust_region.{side}=0.91" for side in ("low", "high") if region[side] != "auto"]
    tenth = "a tenth of its side" if "auto" in region.values() else "a tenth"
    remedy = f"{' '.join(numbers)} would clip {tenth}" if numbers else "auto bounds do not follow; set a lower optimizer.lr"
    assert text.endswith(f"; {remedy}")
    assert f", with low = {region['low']}, high = " in text
    assert not sentences(region, 0.26, steps=4)
    assert not sentences(region, 0.24)
    if "auto" in region.values():
        assert not sentences({**region, "share": 0.3}, 0.3)


def test_bounds_that_do_nothing_are_reported() -> None:
    """A range that nothing reaches if it follows the length, and auto bounds without a spread."""
    ((_, unreached),) = sentences(LENGTH, 0.0)
    assert unreached.startswith("no response has reached the clip range")
    ((_, initial),) = sentences(AUTO, 0.0, sigma=0.0)
    assert "set a higher optimizer.lr" in initial
    assert not sentences(FIXED, 0.0)
    assert not sentences(LENGTH, 0.0, sigma=0.0)
