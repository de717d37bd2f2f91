"""How old the weights are that drew each token, and what follows for metrics, canary and records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.config import RolloutConfig, RunConfig
from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.run.consistency_checks import check_agreement
from tepo_megatron.run.sampling.collector import idle_shares
from tepo_megatron.run.sampling.step_rewards import mismatch_by_age, part_ages, token_ages, trained_places, version_figures
from tepo_megatron.run.step.minibatches import minibatches
from tepo_megatron.sampler.rollout_file import check_rollouts
from tepo_megatron.trainer.packing import pack


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


def test_what_an_environment_wrote_has_no_age() -> None:
    mixed = rollout(0, [(0, 3), (2, 5)], 4)
    mask = np.array([True, False, False, True])
    with_tool = replace(mixed, sampler_logprobs=np.array([-1.0, 0.0, 0.0, -1.0], np.float32), loss_mask=mask)
    assert version_figures([with_tool], 6)["staleness/mean"] == (3 + 1) / 2
    (ages_T,) = part_ages([with_tool], [pack([with_tool])], seed=3, step=6)
    assert ages_T.tolist() == [-1, 3, -1, -1, 1, -1]


@given(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=4, max_size=9), st.integers(1, 4))
def test_the_ages_of_a_minibatch_are_those_of_its_tokens(lengths: list[list[int]], count: int) -> None:
    """Each token's log-prob is made to say its own age, and goes with it through packing and cutting."""
    step, rollouts = 9, []
    for group, spans in enumerate(lengths):
        starts = [sum(spans[:at]) for at in range(len(spans))]
        given = rollout(group, [(start, 5 + at) for at, start in enumerate(starts)], sum(spans))
        rollouts.append(
            Rollout(given.problem_id, group, [1, 2], given.response_ids, -token_ages(given, step), "stop", given.versions)
        )
    parts = list(minibatches(pack(rollouts), count, seed=3, step=step))
    for part, ages_T in zip(parts, part_ages(rollouts, parts, seed=3, step=step), strict=True):
        assert torch.equal(-part.sampler_logprobs_T[part.loss_mask_T], ages_T[part.loss_mask_T].float())
        assert (ages_T[~part.loss_mask_T] == -1).all()
    # Of responses that are masked since they were cut, mini-batches have none.
    cut = [replace(each, finish_reason="length") if at % 2 else each for at, each in enumerate(rollouts)]
    parts = list(minibatches(pack(cut, mask_truncated=True), count, seed=3, step=step))
    trained = trained_places(cut, RunConfig(rollout=RolloutConfig(truncated="mask")).rollout)
    assert trained == list(range(0, len(cut), 2))
    for part, ages_T in zip(parts, part_ages(cut, parts, seed=3, step=step, trained=trained), strict=True):
        assert torch.equal(-part.sampler_logprobs_T[part.loss_mask_T], ages_T[part.loss_mask_T].float())


def test_the_canary_looks_at_what_the_present_weights_drew_only() -> None:
    batch = pack([rollout(0, [(0, 0), (2, 1)], 4)])
    ages = part_ages([rollout(0, [(0, 0), (2, 1)], 4)], [batch], seed=0, step=1)
    old_T = batch.sampler_logprobs_T.clone()
    old_T[batch.loss_mask_T] += torch.tensor([0.5, -0.5, 0.001, -0.001])
    scored = batch.with_(old_logprobs_T=old_T)
    fresh = [ages_T == 0 for ages_T in ages]
    found = check_agreement(1, [scored], tolerance=0.01, token_tolerance=0.1, fresh=fresh)
    assert found["canary/rollouts_max_gap"] == pytest.approx(0.001, rel=1e-3)
    with pytest.raises(RuntimeError, match="not drawn from the trainer's policy"):
        check_agreement(1, [scored], tolerance=0.01, token_tolerance=0.1)
    kl = mismatch_by_age([scored], ages)
    expected = (torch.tensor([0.5, -0.5]).double().exp() - 1 - torch.tensor([0.5, -0.5]).double()).mean()
    assert kl["staleness/kl_1"] == pytest.approx(float(expected), rel=1e-5)
    assert kl["staleness/kl_0"] == pytest.approx(0.5e-6, rel=1e-2)


@pytest.mark.parametrize(
    ("spans", "stalest", "message"),
    [
        ([(0, 4)], 0, None),
        ([(0, 3), (1, 4)], 1, None),
        ([(0, 3), (1, 4)], 0, "drawn by the weights of step 3, not of step 4"),
        ([(0, 2), (1, 4)], 1, "drawn by the weights of step 2, not of step 4, for which the file is, nor of one of the 1"),
        ([(0, 5)], 3, "drawn by the weights of step 5"),
        ([(1, 4)], 1, "places in order from 0"),
        ([(0, 3), (2, 4)], 1, "places in order from 0"),
        ([], 1, "places in order from 0"),
    ],
)
def test_a_record_of_older_weights_than_a_schedule_allows_is_refused(
    spans: list[tuple[int, int]], stalest: int, message: str | None
) -> None:
    given = [rollout(0, spans, 2)]
    if message is None:
        check_rollouts(Path("r"), given, step=4, prompts=1, samples=1, stalest=stalest)
    else:
        with pytest.raises(ValueError, match=message):
            check_rollouts(Path("r"), given, step=4, prompts=1, samples=1, stalest=stalest)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"train": {"schedule": "overlap"}},
            r"objective\.mismatch = null with train\.schedule = overlap: train\.max_staleness = 1",
        ),
        (
            {"train": {"schedule": "overlap"}, "rollout": {"uncorrected": True, "server": {"placement": "colocated"}}},
            r"train\.schedule = overlap with rollout\.server\.placement = colocated",
        ),
        ({"train": {"max_staleness": 2}}, r"max_staleness = 2 does nothing with schedule = sync"),
        ({"train": {"stale": "keep"}}, r"stale = keep does nothing with schedule = sync"),
        ({"train": {"kv_cache": "keep"}}, r"kv_cache = keep does nothing with schedule = sync"),
        ({"train": {"schedule": "overlap", "max_staleness": 0}}, "greater than or equal to 1"),
        ({"train": {"schedule": "overlap"}, "rollout": {"uncorrected": True}, "model": {"lora": {"serve": "adapter"}}}, None),
        ({"train": {"schedule": "overlap"}, "rollout": {"uncorrected": True, "oversample": 1.5, "partial": True}}, None),
        ({"train": {"schedule": "overlap", "max_staleness": 4}, "objective": {"preset": "decoupled_ppo"}}, None),
    ],
)
def test_what_a_schedule_cannot_do_is_refused(changes: dict[str, object], message: str | None) -> None:
    if message is None:
        RunConfig.model_validate(changes)
    else:
        with pytest.raises(ValueError, match=message):
            RunConfig.model_validate(changes)


def test_idle_shares_leave_the_evaluation_out() -> None:
    split = {"time/rollout": 3.0, "time/reward": 1.0, "time/journal": 0.0, "time/eval": 2.0, "time/step": 12.0}
    assert idle_shares(split, 6.0) == {"idle/trainer": 0.4, "idle/servers": 0.4}
    assert idle_shares({**split, "time/step": 2.0}, 1.0) == {}
