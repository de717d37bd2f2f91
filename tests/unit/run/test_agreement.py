"""Rollouts as a canary: a group whose log-probs are not the trainer's stops the step; rounding and one rare token do not."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.core.types import Batch
from tepo_megatron.run.consistency_checks import check_agreement
from tepo_megatron.trainer.packing import pack


def scored(gaps: list[list[float]], groups: list[int], *, sampler: bool = False) -> Batch:
    """A batch whose response tokens differ by ``gaps``, sequence by sequence, by the sampler's fault or by the trainer's;
    ``groups`` numbers the sequences' groups.
    """
    rollouts = [
        Rollout("p", group, (1, 2), tuple([3] * len(gap)), tuple([-1.0] * len(gap)), "stop", WeightsVersion(0))
        for group, gap in zip(groups, gaps, strict=True)
    ]
    batch = pack(rollouts)
    wrong_T = batch.sampler_logprobs_T.clone()
    wrong_T[batch.loss_mask_T] += torch.tensor([value for gap in gaps for value in gap])
    if sampler:
        return batch.with_(old_logprobs_T=batch.sampler_logprobs_T, sampler_logprobs_T=wrong_T)
    return batch.with_(old_logprobs_T=wrong_T)


def check(*parts: Batch, tolerance: float = 0.01, token_tolerance: float = 0.1) -> dict[str, float]:
    return check_agreement(7, parts, tolerance=tolerance, token_tolerance=token_tolerance)


def test_figures_are_over_the_response_tokens_of_all_minibatches() -> None:
    one, two = scored([[0.002, -0.004], [0.0]], [0, 1]), scored([[0.001]], [0])
    found = check(one, two)
    assert found["canary/rollouts_mean_gap"] == pytest.approx(0.007 / 4, rel=1e-3)
    assert found["canary/rollouts_worst_group"] == pytest.approx(0.007 / 3, rel=1e-3)
    assert found["canary/rollouts_max_gap"] == pytest.approx(0.004, rel=1e-3)


def test_one_wrong_group_among_many_stops_the_step_and_is_named() -> None:
    """One of many servers may be wrong: a mean over all rollouts would hide it."""
    gaps = [[0.0] * 20 for _ in range(50)]
    gaps[31] = [0.03] * 20
    with pytest.raises(RuntimeError, match=r"step 7: 1 of 50 groups .* in group 31 the log-probs of 20 tokens differ by 0\.03"):
        check(scored(gaps, list(range(50))))


@given(st.integers(1, 200), st.floats(0, 1))
def test_a_group_may_have_one_token_beyond_the_mean(tokens: int, gap: float) -> None:
    batch = scored([[gap] + [0.0] * (tokens - 1)], [0])
    limit = 0.01 * tokens + 0.1
    if gap > limit * 1.0001:
        with pytest.raises(RuntimeError, match="not drawn from the trainer's policy"):
            check(batch)
    elif gap < limit * 0.9999:
        check(batch)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_sampler_that_says_no_number_stops(value: float) -> None:
    with pytest.raises(RuntimeError, match="in group 1 "):
        check(scored([[0.0] * 9, [0.0, value]], [0, 1], sampler=True))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_trainer_that_finds_no_number_is_no_fault_of_the_sampler(value: float) -> None:
    """Its optimizer step is skipped, for its own reason."""
    found = check(scored([[0.0] * 9, [0.004, value]], [0, 1]), scored([[value]], [2]))
    assert found["canary/rollouts_worst_group"] == pytest.approx(0.004, rel=1e-3)
    assert check(scored([[value]], [0])) == {}


def test_replayed_rollouts_are_measured_and_never_stop() -> None:
    found = check(scored([[3.0, 5.0]], [0]), tolerance=math.inf)
    assert found["canary/rollouts_mean_gap"] == pytest.approx(4.0)
