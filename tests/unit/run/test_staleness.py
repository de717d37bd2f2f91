"""How old the weights are that drew each token, and what follows for metrics, canary and records."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.config import RunConfig
from tepo_megatron.core.problem import Problem
from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.run.consistency_checks import Canaries
from tepo_megatron.run.sampling.step_rewards import token_ages, version_figures
from tepo_megatron.run.step.minibatches import minibatches
from tepo_megatron.sampler.rollout_file import check_rollouts
from tepo_megatron.trainer.packing import pack
from tests.support.fake_sampling import FakeFleet, FakeVerifiers, collector


def rollout(group: int, spans: list[tuple[int, int]], tokens: int, logprob: float = -1.0) -> Rollout:
    versions = tuple((start, WeightsVersion(step)) for start, step in spans)
    return Rollout(f"p{group}", group, [1, 2], [3] * tokens, [logprob] * tokens, "stop", versions)


def test_ages_are_counted_token_by_token() -> None:
    mixed, fresh = rollout(0, [(0, 3), (2, 5)], 3), rollout(1, [(0, 6)], 1)
    assert token_ages(mixed, 6).tolist() == [3, 3, 1]
    assert version_figures([mixed, fresh], 6) == {
        "weights_version/min": 3.0,
        "weights_version/max": 6.0,
        "staleness/mean": 7 / 4,
        "staleness/max": 3.0,
        "staleness/versions": 1.5,
    }


def figures_of(rollouts: list[Rollout], step: int, count: int = 1, gaps: list[float] | None = None, **settings: Any) -> Any:
    """What the check of a step finds, with the log-probs of the trainer 0, or those of the sampler and ``gaps``."""
    train = {"schedule": "overlap", "max_staleness": 9, "minibatches": count}
    run = {"seed": 3, "train": train, "rollout": {"uncorrected": True, **settings}}
    batch = pack(rollouts, mask_truncated=settings.get("truncated") == "mask")
    old_T = torch.zeros_like(batch.sampler_logprobs_T) if gaps is None else batch.sampler_logprobs_T.clone()
    old_T[batch.loss_mask_T] += torch.tensor(gaps or [0.0])
    parts = list(minibatches(batch.with_(old_logprobs_T=old_T), count, seed=3, step=step))
    spec: Any = SimpleNamespace(vocab_size=9, max_positions=64)
    checks = Canaries(RunConfig.model_validate(run), spec)
    checks.check_rollouts(step, parts, rollouts)
    return checks.take_figures()


def of_ages(ages: Iterable[int]) -> dict[str, Any]:
    """The mismatch of tokens with the sampler's log-prob −age."""
    return {f"staleness/kl_{age}": pytest.approx(math.expm1(age) - age, rel=1e-6) for age in ages}


def test_what_an_environment_wrote_has_no_age() -> None:
    logprobs, mask = np.array([-3.0, 0.0, 0.0, -1.0], np.float32), np.array([True, False, False, True])
    with_tool = replace(rollout(0, [(0, 3), (2, 5)], 4), sampler_logprobs=logprobs, loss_mask=mask)
    assert version_figures([with_tool], 6)["staleness/mean"] == (3 + 1) / 2
    figures = figures_of([with_tool], 6, canary={"every": 0})
    assert {name: value for name, value in figures.items() if "/kl_" in name} == of_ages([1, 3])


@given(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=4, max_size=9), st.integers(1, 4), st.booleans())
def test_every_token_has_its_own_age_through_packing_and_minibatches(lengths: list[list[int]], count: int, cut: bool) -> None:
    """Each token's log-prob is its own age, so that a wrong age would show in the mean of another. Mini-batches have no
    masked responses.
    """
    step, rollouts = 9, []
    for group, spans in enumerate(lengths):
        starts = [sum(spans[:index]) for index in range(len(spans))]
        drawn = rollout(group, [(start, 5 + index) for index, start in enumerate(starts)], sum(spans))
        reason = "length" if cut and group % 2 else "stop"
        logprobs = -token_ages(drawn, step).astype(np.float32)
        rollouts.append(replace(drawn, sampler_logprobs=logprobs, finish_reason=reason))
    trained = [each for each in rollouts if each.finish_reason == "stop"]
    count = min(count, len(trained))
    figures = figures_of(rollouts, step, count, canary={"every": 0}, truncated="mask" if cut else "train")
    ages = {int(age) for each in trained for age in token_ages(each, step)}
    assert {name: value for name, value in figures.items() if "/kl_" in name} == of_ages(ages)


def test_the_canary_looks_at_what_the_present_weights_drew_only() -> None:
    mixed, gaps = rollout(0, [(0, 0), (2, 1)], 4), [0.5, -0.5, 0.001, -0.001]
    canary = {"tolerance": 0.1, "rollouts_tolerance": 0.01}
    figures = figures_of([mixed], 1, gaps=gaps, canary=canary)
    assert figures["canary/rollouts_max_gap"] == pytest.approx(0.001, rel=1e-3)
    assert figures["staleness/kl_1"] == pytest.approx((math.expm1(0.5) - 0.5 + math.expm1(-0.5) + 0.5) / 2, rel=1e-5)
    assert figures["staleness/kl_0"] == pytest.approx(0.5e-6, rel=1e-2)
    with pytest.raises(RuntimeError, match="not drawn from the trainer's policy"):
        figures_of([rollout(0, [(0, 1)], 4)], 1, gaps=gaps, canary=canary)


@pytest.mark.parametrize(
    ("spans", "stalest", "message"),
    [
        ([(0, 3), (1, 4)], 0, "drawn by the weights of step 3, not of step 4"),
        ([(0, 2), (1, 4)], 1, "drawn by the weights of step 2, not of step 4, for which the file is, nor of one of the 1"),
        ([(0, 5)], 3, "drawn by the weights of step 5"),
        ([(1, 4)], 1, "places in order from 0"),
        ([(0, 3), (2, 4)], 1, "places in order from 0"),
        ([], 1, "places in order from 0"),
    ],
)
def test_a_record_of_older_weights_than_a_schedule_allows_is_refused(
    spans: list[tuple[int, int]], stalest: int, message: str
) -> None:
    check_rollouts(Path("r"), [rollout(0, [(0, 3), (1, 4)], 2)], step=4, prompts=1, samples=1, stalest=1)
    with pytest.raises(ValueError, match=message):
        check_rollouts(Path("r"), [rollout(0, spans, 2)], step=4, prompts=1, samples=1, stalest=stalest)


def test_idle_shares_leave_the_evaluation_out(tmp_path: Path) -> None:
    rollouts = collector(RunConfig(output=tmp_path), [Problem("p", "q", "a")], FakeVerifiers(0, lambda *_: 0.0), FakeFleet(0))
    split = {"time/rollout": 3.0, "time/reward": 1.0, "time/journal": 0.0, "time/eval": 2.0, "time/step": 12.0}
    assert rollouts.idle_shares(split) == {"idle/trainer": 0.4, "idle/servers": 1.0}  # the servers did nothing
    assert rollouts.idle_shares({**split, "time/step": 2.0}) == {}
