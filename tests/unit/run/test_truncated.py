"""Responses that are cut: their punishment by hand, and the mask, with which they still count for their group."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.config import ObjectiveConfig, RunConfig
from tepo_megatron.core.objective.compose import build_objective
from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.run.sampling.step_rewards import apply_overlong
from tepo_megatron.run.step.minibatches import minibatches
from tepo_megatron.trainer.packing import pack
from tests.support.fake_sampling import MAX_NEW_TOKENS


def rollout(group: int, length: int, reward: float | None, *, cut: bool = False) -> Rollout:
    reason = "length" if cut else "stop"
    ids = [5 + at for at in range(length)]
    return Rollout(f"p{group}", group, [3, 4], ids, [-1.0] * length, reason, WeightsVersion(0), "", reward)


def config(**sections: object) -> RunConfig:
    rollout = {"prompts_per_step": 2, "samples_per_prompt": 4, "sampling": {"max_new_tokens": MAX_NEW_TOKENS}, **sections}
    return RunConfig.model_validate({"output": "out", "rollout": rollout, "train": {"minibatches": 2}})


@pytest.mark.parametrize(
    ("length", "expected"),
    # DAPO's own numbers: L_max = 20480 with L_cache = 4096
    [(1, 0.0), (16384, 0.0), (16385, -1 / 4096), (17408, -0.25), (18432, -0.5), (20480, -1.0), (20481, -1.0)],
)
def test_the_punishment_is_that_of_dapo(length: int, expected: float) -> None:
    for penalty in (1.0, 0.5):
        overlong = {"truncated": "penalise", "overlong": {"buffer": 4096, "penalty": penalty}}
        (trained,), _ = apply_overlong([rollout(0, length, 0.0)], config(sampling={"max_new_tokens": 20480}, **overlong), 0)
        assert trained.reward == expected * penalty


@given(lengths=st.lists(st.integers(1, MAX_NEW_TOKENS), min_size=1, max_size=6), buffer=st.integers(1, MAX_NEW_TOKENS))
def test_the_punishment_never_grows_with_room(lengths: list[int], buffer: int) -> None:
    """A longer response never loses less; one within the room loses nothing; others keep their rewards to the last bit."""
    run = config(truncated="penalise", overlong={"buffer": buffer, "penalty": 2.0})
    given_rewards = [rollout(0, length, 1 / 3) for length in sorted(lengths)]
    trained, _ = apply_overlong(given_rewards, run, 0)
    rewards = [each.reward or 0.0 for each in trained]
    assert rewards == sorted(rewards, reverse=True)
    for before, after in zip(given_rewards, trained, strict=True):
        room = len(before.response_ids) <= MAX_NEW_TOKENS - buffer
        assert after is before if room else (after.reward or 0.0) < 1 / 3
        assert after.reward is not None
        assert after.reward >= 1 / 3 - 2.0
    assert apply_overlong([rollout(0, 8, None)], run, 0)[0][0].reward is None


def test_figures_say_how_many_were_cut_and_what_they_lost() -> None:
    run = config(truncated="penalise", overlong={"buffer": 4})
    step = [rollout(0, 2, 1.0), rollout(0, 6, 1.0), rollout(0, 8, 0.0, cut=True), rollout(0, 4, 0.0)]
    trained, figures = apply_overlong(step, run, 0)
    assert [each.reward for each in trained] == [1.0, 0.5, -1.0, 0.0]
    assert figures == {"response_len/truncated": 0.25, "reward/overlong": -0.375}
    assert apply_overlong(step, config(), 0) == (step, {"response_len/truncated": 0.25})


def test_a_masked_response_counts_for_its_group_and_for_nothing_else() -> None:
    """By hand, for a mean over tokens (dapo): rewards 1, 0, 0 with the last one cut have the mean 1/3 with it, and 1/2 without;
    the loss is over the tokens of the first two alone."""
    step = [
        rollout(0, 2, 1.0),
        rollout(0, 3, 0.0),
        rollout(0, 8, 0.0, cut=True),
        rollout(1, 8, 1.0, cut=True),
        rollout(1, 2, 0.0),
    ]
    objective = build_objective(ObjectiveConfig(preset="dr_grpo"))
    batch = pack(step, mask_truncated=True)
    advantages_S = objective.advantages(batch)
    torch.testing.assert_close(advantages_S, torch.tensor([2 / 3, -1 / 3, -1 / 3, 0.5, -0.5]))
    torch.testing.assert_close(advantages_S, objective.advantages(pack(step)))
    assert batch.loss_mask_T.sum().item() == 2 + 3 + 2
    batch = batch.with_(advantages_S=advantages_S, old_logprobs_T=batch.sampler_logprobs_T)

    parts = list(minibatches(batch, 2, seed=0, step=0))
    assert sorted(part.num_sequences for part in parts) == [1, 2]  # of the three that are whole
    assert sorted(int(length) for part in parts for length in part.lengths_S) == [4, 4, 5]
    dapo = build_objective(ObjectiveConfig(preset="dapo"))
    assert dapo.prepare(batch).denominator.item() == 7
    assert sum(dapo.prepare(part).denominator.item() for part in parts) == 7


def test_a_step_of_which_the_mask_leaves_too_little_stops_the_run() -> None:
    step = [rollout(0, 8, 0.0, cut=True), rollout(0, 8, 0.0, cut=True), rollout(0, 2, 1.0)]
    apply_overlong(step, config(), 3)
    apply_overlong([*step, rollout(0, 2, 1.0)], config(truncated="mask"), 3)
    with pytest.raises(RuntimeError, match=r"2 of the 3 responses of step 3 were cut .* the 1 others are too few"):
        apply_overlong(step, config(truncated="mask"), 3)


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"truncated": "penalise"}, "truncated = penalise needs overlong.buffer"),
        ({"overlong": {"buffer": 2}}, "truncated = train and overlong belong together"),
        ({"truncated": "mask", "overlong": {"buffer": 2}}, "truncated = mask and overlong belong together"),
        ({"truncated": "penalise", "overlong": {"buffer": 9}}, "even an empty response would be punished"),
        ({"oversample": 1.5}, "set filter_groups or partial, or leave oversample out"),
        ({"partial": True}, "oversample = 1 begins no more groups than a step needs"),
        ({"partial": True, "oversample": 1.5}, "which biases the gradient; set objective.mismatch.kind"),
        ({"oversample": 2.5}, "oversample"),
        ({"filter_groups": {"filters": []}}, "filters is empty"),
        ({"filter_groups": {"filters": ["variance"]}}, "'variance' is no filter; known: zero_variance"),
        ({"filter_groups": {"filters": ["too_long"]}}, "the filter too_long needs max_truncated"),
        ({"filter_groups": {"max_truncated": 0.5}}, "max_truncated is for the filter too_long"),
        ({"filter_groups": {"filters": ["reward_range"], "reward_range": [1, 0]}}, "holds no number"),
        ({"filter_groups": {"filters": ["a:keep", "b.py:keep"]}}, "two filters are called keep"),
        ({"filter_groups": {}, "samples_per_prompt": 1}, "refuses every group of samples_per_prompt = 1"),
    ],
)
def test_what_cannot_act_is_refused(sections: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        config(**sections)


@pytest.mark.parametrize(("preset", "sentence"), [("max_rl", "divides by their mean"), ("gdpo", "a component of its own")])
def test_a_punishment_is_refused_where_it_could_not_be_taken(preset: str, sentence: str) -> None:
    sections = {"rollout": {"truncated": "penalise", "overlong": {"buffer": 2}}, "objective": {"preset": preset}}
    with pytest.raises(ValueError, match=sentence):
        RunConfig.model_validate(sections)
