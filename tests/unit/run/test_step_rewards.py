"""Responses without a reward leave the step and nothing of the others changes; long responses; filters of groups."""

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tepo_megatron.config import ObjectiveConfig, RolloutConfig, RunConfig
from tepo_megatron.config.load import load_run
from tepo_megatron.core.objective.compose import build_objective
from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.run.sampling.step_rewards import GroupFilters, StepRewards
from tepo_megatron.run.step.minibatches import minibatches
from tepo_megatron.sampler.rollout_file import Record, write_rollouts
from tepo_megatron.tasks.protocol import RewardResult
from tepo_megatron.trainer.packing import pack
from tests.support.fake_sampling import MAX_NEW_TOKENS


def a_step(rewards: Sequence[Sequence[float | None]]) -> tuple[list[Rollout], list[RewardResult]]:
    """Groups of responses of different lengths, and what a pool says of them; None fails."""
    rollouts, results = [], []
    for group, members in enumerate(rewards):
        for number, reward in enumerate(members):
            drawn = rollout(group, 1 + (3 * group + number) % 5, None)
            rollouts.append(replace(drawn, text=f"{group}/{number}"))
            results.append(RewardResult(reward, None if reward is not None else f"problem 'p{group}': why"))
    return rollouts, results


def config(*overrides: str) -> RunConfig:
    return load_run(None, ["train.minibatches=1", "reward.max_failed=1", *overrides])


reward = st.none() | st.sampled_from([0.0, 1.0, -0.5])
steps = st.lists(st.lists(reward, min_size=1, max_size=5), min_size=1, max_size=5)


@settings(max_examples=15)
@given(rewards=steps)
def test_a_step_is_what_it_would_be_if_the_failed_responses_had_never_been(
    rewards: list[list[float | None]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    rollouts, results = a_step(rewards)
    said: list[str] = []
    step = StepRewards(config(), said.append)
    whole = [None not in members or len(members) - members.count(None) >= 2 for members in rewards]
    failed = sum(result.reward is None for result in results)
    recorded = step.reward(rollouts, results, 3)
    assert recorded == [replace(r, reward=given.reward) for r, given in zip(rollouts, results, strict=True)]
    expected = [r for r in recorded if r.reward is not None and whole[r.group]]
    assert len(said) == bool(failed)
    if not expected:
        with pytest.raises(RuntimeError, match="too few"):
            step.leave_out(recorded)
        return
    kept = step.leave_out(recorded)
    assert [(r.text, r.reward) for r in kept] == [(r.text, r.reward) for r in expected]
    figures = {"reward/failed": failed, "groups/dropped": whole.count(False)}
    assert step.take_figures() == figures
    assert step.take_figures() == dict.fromkeys(figures, 0.0)
    write_rollouts(folder := tmp_path_factory.mktemp("record"), 3, recorded)
    assert step.leave_out(Record.read(folder, 3).rollouts) == kept  # a recorded step is trained on as it was
    assert step.take_figures() == figures
    objective = build_objective(ObjectiveConfig(preset="dr_grpo"))
    sizes = Counter(r.group for r in kept)
    for r, advantage in zip(kept, objective.advantages(pack(kept)).tolist(), strict=True):
        mean = sum(other.reward or 0.0 for other in kept if other.group == r.group) / sizes[r.group]  # of what is left
        assert advantage == pytest.approx((r.reward or 0.0) - mean, abs=1e-6)


def test_components_are_recorded_measured_and_trained_on(tmp_path: Path) -> None:
    rollouts, given = a_step([[1.0, 0.0], [0.5, None], [0.25, 0.75]])
    results = [r if r.error else RewardResult(r.reward, parts={"right": r.reward or 0.0, "short": 1.0}) for r in given]
    step = StepRewards(config(), lambda text: None)
    recorded = step.reward(rollouts, results, 0)
    assert recorded[0].reward_parts == {"right": 1.0, "short": 1.0}
    write_rollouts(tmp_path, 0, recorded)
    assert Record.read(tmp_path, 0).rollouts == recorded
    step.leave_out(Record.read(tmp_path, 0).rollouts)
    figures = {"reward/failed": 1.0, "groups/dropped": 1.0, "reward/right": 0.5, "reward/short": 1.0}
    assert step.take_figures() == figures
    assert step.take_figures() == {"reward/failed": 0.0, "groups/dropped": 0.0}


@pytest.mark.parametrize(("share", "stops"), [(0.5, True), (0.6, False), (0, True)])
def test_too_large_a_share_of_failures_stops_the_run_with_the_first_cause(share: float, stops: bool) -> None:
    rollouts, scored = a_step([[1.0, None, 0.0, None], [None, 1.0, None]])
    step = StepRewards(config(f"reward.max_failed={share}"), lambda text: None)
    says = r"^4 of 7 rewards of step 8 failed, more than reward\.max_failed = .*problem 'p0': why\. Correct that, .*--resume"
    with pytest.raises(RuntimeError, match=says) if stops else nullcontext():
        assert len(step.leave_out(step.reward(rollouts, scored, 7))) == 2


def test_a_step_without_enough_for_its_minibatches_stops_the_run() -> None:
    rollouts, scored = a_step([[1.0, 0.0], [None, 1.0], [1.0, 1.0]])
    said: list[str] = []
    step = StepRewards(config("train.minibatches=4"), said.append)
    recorded = step.reward(rollouts, scored, 0)
    assert len(step.leave_out(recorded)) == 4
    with pytest.raises(RuntimeError, match=r"1 of 6 rewards failed, and the 4 responses .* too few for train.minibatches = 5"):
        StepRewards(config("train.minibatches=5"), said.append).leave_out(recorded)
    with pytest.raises(ValueError, match="rollout of problem p1 has no reward; leave it out of the step"):
        pack(recorded)
    step = StepRewards(config("reward.failed_reward=-1"), said.append)
    scored = [RewardResult(-1.0 if r.error else r.reward, r.error) for r in scored]
    assert [r.reward for r in step.leave_out(step.reward(rollouts, scored, 0))] == [1.0, 0.0, -1.0, 1.0, 1.0, 1.0]
    assert step.take_figures() == {"reward/failed": 1.0, "groups/dropped": 0.0}
    assert said[1:] == ["1 of 6 rewards failed and count as reward.failed_reward = -1; the first: problem 'p1': why"]


def rollout(group: int, length: int, reward: float | None, *, cut: bool = False) -> Rollout:
    reason = "length" if cut else "stop"
    ids = [5 + at for at in range(length)]
    return Rollout(f"p{group}", group, [3, 4], ids, [-1.0] * length, reason, WeightsVersion(0), "", reward)


def long(**sections: object) -> StepRewards:
    rollout = {"prompts_per_step": 2, "samples_per_prompt": 4, "sampling": {"max_new_tokens": MAX_NEW_TOKENS}, **sections}
    run = RunConfig.model_validate({"output": "out", "rollout": rollout, "train": {"minibatches": 2}})
    return StepRewards(run, print)


@pytest.mark.parametrize(
    ("length", "expected"),
    # DAPO's own numbers: L_max = 20480 with L_cache = 4096
    [(1, 0.0), (16384, 0.0), (16385, -1 / 4096), (17408, -0.25), (18432, -0.5), (20480, -1.0), (20481, -1.0)],
)
def test_the_punishment_is_that_of_dapo(length: int, expected: float) -> None:
    """A response within the room keeps its reward to the last bit, and one without a reward stays without."""
    for penalty, reward in ((1.0, 0.0), (0.5, 0.0), (1.0, 1 / 3), (1.0, None)):
        overlong = {"truncated": "penalise", "overlong": {"buffer": 4096, "penalty": penalty}}
        before = rollout(0, length, reward)
        (trained,), _ = long(sampling={"max_new_tokens": 20480}, **overlong).apply_overlong([before], 0)
        assert trained.reward == (None if reward is None else reward + expected * penalty)
        assert (trained is before) == (reward is None or not expected)


def test_figures_say_how_many_were_cut_and_what_they_lost() -> None:
    rewards = long(truncated="penalise", overlong={"buffer": 4})
    step = [rollout(0, 2, 1.0), rollout(0, 6, 1.0), rollout(0, 8, 0.0, cut=True), rollout(0, 4, 0.0)]
    trained, figures = rewards.apply_overlong(step, 0)
    assert [each.reward for each in trained] == [1.0, 0.5, -1.0, 0.0]
    assert figures == {"response_len/truncated": 0.25, "reward/overlong": -0.375}
    assert long().apply_overlong(step, 0) == (step, {"response_len/truncated": 0.25})


def test_a_masked_response_counts_for_its_group_and_for_nothing_else() -> None:
    """By hand, for a mean over tokens (dapo): rewards 1, 0, 0 with the last one cut have the mean 1/3 with it, and 1/2 without;
    the loss is over the tokens of the first two alone."""
    first = [rollout(0, 2, 1.0), rollout(0, 3, 0.0), rollout(0, 8, 0.0, cut=True)]
    step = [*first, rollout(1, 8, 1.0, cut=True), rollout(1, 2, 0.0)]
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
    long().apply_overlong(step, 3)
    long(truncated="mask").apply_overlong([*step, rollout(0, 2, 1.0)], 3)
    with pytest.raises(RuntimeError, match=r"2 of the 3 responses of step 4 were cut, .* the 1 others are too few"):
        long(truncated="mask").apply_overlong(step, 3)


def group(rewards: list[float | None], cut: int = 0) -> list[Rollout]:
    """Responses with these rewards, the first ``cut`` of which are cut."""
    return [replace(rollout(0, 1, reward, cut=at < cut), problem_id="p") for at, reward in enumerate(rewards)]


@pytest.mark.parametrize(
    ("settings", "rewards", "cut", "cause"),
    [
        ({}, [0.0, 0.0], 0, "zero_variance"),
        ({}, [0.0, 1.0], 2, None),
        ({}, [1.0, None, 1.0], 0, "zero_variance"),  # what has no reward is not looked at
        ({}, [1.0, None], 0, "no_reward"),
        ({}, [1.0, None, 0.0], 0, None),
        ({"filters": ["too_long"], "max_truncated": 0.5}, [0.0] * 4, 2, None),
        ({"filters": ["too_long"], "max_truncated": 0.5}, [0.0] * 4, 3, "too_long"),
        ({"filters": ["reward_range"], "reward_range": [0.25, 0.5]}, [1.0, 0.0, 0.0, 0.0], 0, None),
        ({"filters": ["reward_range"], "reward_range": [0.25, 0.5]}, [1.0, 1.0, 0.0], 0, "reward_range"),
        ({"filters": ["reward_range"], "reward_range": [0.25, 0.5]}, [0.0, 0.0, 0.0], 0, "reward_range"),
        ({"filters": ["too_long", "zero_variance"], "max_truncated": 0.0}, [1.0, 1.0], 1, "too_long"),  # the first counts
    ],
)
def test_which_groups_are_kept(settings: dict[str, object], rewards: list[float | None], cut: int, cause: str | None) -> None:
    assert GroupFilters(RolloutConfig(filter_groups=settings)).refuse(group(rewards, cut)) == cause


def test_ones_own_filter_is_a_function_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "my_filters.py"
    path.write_text(
        "def few(group):\n    return len(group) < 3\n\ndef broken(group):\n    return group[0].grade\n\n"
        "def vague(group):\n    return len(group)\n\n"
        "import numpy, torch\n"
        "def differ(group):\n    return numpy.std([item.reward for item in group]) > 0\n"
        "def solved(group):\n    return torch.tensor([item.reward for item in group]).max() > 0\n"
        "def arrays(group):\n    return numpy.array([True])\n"
    )
    filters = GroupFilters(RolloutConfig(filter_groups={"filters": (f"{path}:few", "zero_variance")}))
    assert filters.causes == ("few", "zero_variance", "no_reward")
    assert filters.refuse(group([0.0, 1.0, 1.0])) == "few"
    assert filters.refuse(group([1.0, 1.0])) == "zero_variance"
    scalars = GroupFilters(RolloutConfig(filter_groups={"filters": (f"{path}:differ", f"{path}:solved")}))
    assert [scalars.refuse(group(rewards)) for rewards in ([0.0, 1.0], [1.0, 1.0], [-1.0, 0.0])] == [None, "differ", "solved"]
    for name, sentence in (
        ("arrays", r"the filter arrays .* returned array\(\[ True\]\) for the group of problem 'p'"),
        ("broken", r"the filter broken .* raised AttributeError on the group of problem 'p': .* \(/.*/my_filters\.py:5\)$"),
        ("vague", "the filter vague .* returned 2 for the group of problem 'p'; return True to keep it"),
    ):
        with pytest.raises(RuntimeError, match=sentence):
            GroupFilters(RolloutConfig(filter_groups={"filters": (f"{path}:{name}",)})).refuse(group([0.0, 1.0]))
