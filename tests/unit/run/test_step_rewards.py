"""Responses without a reward leave the step: nothing is learnt from them, and nothing of the others changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tepo_megatron.config import ObjectiveConfig, RunConfig
from tepo_megatron.config.load import load_run
from tepo_megatron.config.objective.presets import PRESETS
from tepo_megatron.core.objective.compose import build_objective
from tepo_megatron.core.problem import Problem, ResponseText
from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.run.sampling.step_rewards import StepRewards, answer_of, rehearsed
from tepo_megatron.sampler.rollout_file import read_rollouts, write_rollouts
from tepo_megatron.tasks.protocol import RewardResult
from tepo_megatron.tasks.reward.verifier_task import VerifierTask
from tepo_megatron.trainer.packing import pack


class Rewards:
    """A pool that gives each text its reward; None fails."""

    def __init__(self, rewards: dict[str, float | None]) -> None:
        self.rewards = rewards

    def score(self, items: Sequence[tuple[Problem, str]], groups: Sequence[Hashable]) -> list[RewardResult]:
        given = [(problem, self.rewards[text]) for problem, text in items]
        return [RewardResult(r, None if r is not None else f"problem {p.id!r}: why") for p, r in given]

    def score_all(self, rollouts: Sequence[Rollout], problems: Sequence[Problem]) -> list[RewardResult]:
        return self.score([(problems[r.group], answer_of(r)) for r in rollouts], [r.group for r in rollouts])


def a_step(rewards: Sequence[Sequence[float | None]]) -> tuple[list[Rollout], list[Problem], Rewards]:
    """Groups of responses of different lengths."""
    rollouts, by_text = [], {}
    for group, members in enumerate(rewards):
        for number, reward in enumerate(members):
            text, length = f"{group}/{number}", 1 + (3 * group + number) % 5
            tokens = tuple(5 + at for at in range(length))
            rollouts.append(Rollout(f"p{group}", group, (3, 4), tokens, (-1.0,) * length, "stop", WeightsVersion(0), text))
            by_text[text] = reward
    return rollouts, [Problem(f"p{group}", "q", "a") for group in range(len(rewards))], Rewards(by_text)


def config(*overrides: str) -> RunConfig:
    return load_run(None, ["train.minibatches=1", "reward.max_failed=1", *overrides])


reward = st.none() | st.sampled_from([0.0, 1.0, -0.5])
steps = st.lists(st.lists(reward, min_size=1, max_size=5), min_size=1, max_size=5)


@settings(deadline=None, max_examples=40)
@given(rewards=steps)
def test_a_step_is_what_it_would_be_if_the_failed_responses_had_never_been(
    rewards: list[list[float | None]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """What is kept, from the rule alone; then the very batch of a step that never had the others, whatever the objective."""
    rollouts, problems, pool = a_step(rewards)
    said: list[str] = []
    step = StepRewards(config(), said.append)
    valid = [[text for text in members if text is not None] for members in rewards]
    whole = [not (len(kept) < 2 and len(kept) < len(members)) for kept, members in zip(valid, rewards, strict=True)]
    expected = [r for r in rollouts if pool.rewards[r.text] is not None and whole[r.group]]
    failed = sum(reward is None for members in rewards for reward in members)
    recorded = step.reward(rollouts, pool.score_all(rollouts, problems), 3)
    assert [(r.text, r.reward) for r in recorded] == list(pool.rewards.items())
    assert len(said) == bool(failed)
    if not expected:
        with pytest.raises(RuntimeError, match="too few"):
            step.leave_out(recorded)
        return
    kept = step.leave_out(recorded)
    assert [(r.text, r.reward) for r in kept] == [(r.text, pool.rewards[r.text]) for r in expected]
    figures = {"reward/failed": failed, "groups/dropped": whole.count(False)}
    assert step.take_figures() == figures
    assert step.take_figures() == dict.fromkeys(figures, 0.0)
    write_rollouts(folder := tmp_path_factory.mktemp("record"), 3, recorded)
    assert step.leave_out(read_rollouts(folder, 3)) == kept  # a recorded step is trained on as it was
    assert step.take_figures() == figures

    batch = pack(kept)
    for preset in PRESETS:
        if preset == "max_rl":  # takes no negative reward
            continue
        objective = build_objective(ObjectiveConfig(preset=preset))
        advantages_S = objective.advantages(batch)
        assert torch.isfinite(advantages_S).all()
        if objective.config.advantage.kind != "no_std":
            continue
        sizes = Counter(r.group for r in kept)
        for at, r in enumerate(kept):  # the mean is over what is left of the group
            mean = sum(other.reward for other in kept if other.group == r.group) / sizes[r.group]
            alike = len({other.reward for other in kept if other.group == r.group}) == 1
            assert advantages_S[at].item() == pytest.approx(0.0 if alike else r.reward - mean, abs=1e-6)
    objective = build_objective(ObjectiveConfig(preset="dapo"))  # a mean over tokens
    ready = batch.with_(advantages_S=objective.advantages(batch), old_logprobs_T=batch.sampler_logprobs_T)
    assert objective.prepare(ready).denominator.item() == sum(len(r.response_ids) for r in kept)


def test_a_response_can_be_given_a_reward_where_it_has_none() -> None:
    rollouts, problems, pool = a_step([[1.0, None], [None, None]])

    class Given(Rewards):
        def score(self, items: Sequence[tuple[Problem, str]], groups: Sequence[Hashable]) -> list[RewardResult]:
            return [RewardResult(-1.0 if r.error else r.reward, r.error) for r in super().score(items, groups)]

    said: list[str] = []
    step = StepRewards(config("reward.failed_reward=-1"), said.append)
    recorded = step.reward(rollouts, Given(pool.rewards).score_all(rollouts, problems), 0)
    assert [r.reward for r in step.leave_out(recorded)] == [1.0, -1.0, -1.0, -1.0]
    assert step.take_figures() == {"reward/failed": 3.0, "groups/dropped": 0.0}
    assert said == ["3 of 4 rewards failed and count as reward.failed_reward = -1; the first: problem 'p0': why"]


def test_components_are_recorded_measured_and_trained_on(tmp_path: Path) -> None:
    rollouts, problems, pool = a_step([[1.0, 0.0], [0.5, None], [0.25, 0.75]])

    class Parts(Rewards):
        def score(self, items: Sequence[tuple[Problem, str]], groups: Sequence[Hashable]) -> list[RewardResult]:
            assert list(groups) == [0, 0, 1, 1, 2, 2]
            assert all(isinstance(text, ResponseText) and text.token_ids for _, text in items)
            scored = super().score(items, groups)
            return [r if r.error else RewardResult(r.reward, parts={"right": r.reward, "short": 1.0}) for r in scored]

    step = StepRewards(config(), lambda text: None)
    recorded = step.reward(rollouts, Parts(pool.rewards).score_all(rollouts, problems), 0)
    assert recorded[0].reward_parts == {"right": 1.0, "short": 1.0}
    write_rollouts(tmp_path, 0, recorded)
    assert read_rollouts(tmp_path, 0) == recorded
    kept = step.leave_out(read_rollouts(tmp_path, 0))
    figures = {"reward/failed": 1.0, "groups/dropped": 1.0, "reward/right": 0.5, "reward/short": 1.0}
    assert step.take_figures() == figures
    assert step.take_figures() == {"reward/failed": 0.0, "groups/dropped": 0.0}
    batch = pack(kept)
    objective = build_objective(ObjectiveConfig(preset="gdpo", advantage={"weights": [2.0, 1.0]}))
    # the second component differs nowhere: ±1/√2 of the first, twice, over the deviation √(4 · 2 / 3)
    expected = torch.tensor([1.0, -1.0, -1.0, 1.0]) * 0.75**0.5
    torch.testing.assert_close(objective.advantages(batch), expected, rtol=1e-5, atol=0)


GDPO = ("objective.preset=gdpo",)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("objective.advantage.weights=[1,2]",), "names 2 rewards, but a run has one for each response unless reward.weights"),
        (("reward.weights={a: 1, b: 2}",), r"set objective.advantage.weights=\[1, 2\], in this order"),
        (
            ("reward.weights={a: 1, b: 1, c: 1}", "objective.advantage.weights=[1,2]"),
            "has 2 entries, .* names 3 components: a, b, c",
        ),
    ],
)
def test_gdpo_is_told_how_to_weigh(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(*GDPO, *overrides)
    config(*GDPO, "reward.weights={a: 1, b: 1}")
    config(*GDPO, "reward.weights.a=1", "reward.weights.b=2", "objective.advantage.weights=[3,1]")
    config("reward.weights={a: 1, b: 2}")


@pytest.mark.parametrize(("share", "stops"), [(0.5, True), (0.6, False), (0, True)])
def test_too_large_a_share_of_failures_stops_the_run_with_the_first_cause(share: float, stops: bool) -> None:
    rollouts, problems, pool = a_step([[1.0, None, 0.0, None], [None, 1.0, None]])
    step = StepRewards(config(f"reward.max_failed={share}"), lambda text: None)
    if not stops:
        assert len(step.leave_out(step.reward(rollouts, pool.score_all(rollouts, problems), 7))) == 2
        return
    with pytest.raises(
        RuntimeError, match=r"^4 of 7 rewards of step 7 failed, more than reward\.max_failed = .*problem 'p0': why$"
    ):
        step.reward(rollouts, pool.score_all(rollouts, problems), 7)


def test_a_step_without_enough_for_its_minibatches_stops_the_run() -> None:
    rollouts, problems, pool = a_step([[1.0, 0.0], [None, 1.0], [1.0, 1.0]])
    step = StepRewards(config("train.minibatches=4"), lambda text: None)
    assert len(step.leave_out(step.reward(rollouts, pool.score_all(rollouts, problems), 0))) == 4
    step = StepRewards(config("train.minibatches=5"), lambda text: None)
    with pytest.raises(RuntimeError, match=r"1 of 6 rewards failed, and the 4 responses .* too few for train.minibatches = 5"):
        step.leave_out(step.reward(rollouts, pool.score_all(rollouts, problems), 0))
    with pytest.raises(ValueError, match="rollout of problem p1 has no reward; leave it out of the step"):
        pack(step.reward(rollouts, pool.score_all(rollouts, problems), 0))


def test_verifiers_are_tried_before_anything_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_judge.py").write_text("def judge(problem, response):\n    return problem.grade\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def rehearse(config: RunConfig) -> None:
        rehearsed(VerifierTask({"": config.reward}), config, [Problem("p0", "q", "a")]).close()

    with pytest.raises(
        ValueError, match=r"raised AttributeError: 'Problem' object has no attribute 'grade', at .*broken_judge.py:2"
    ):
        rehearse(config("reward.verifier=broken_judge:judge"))
    rehearse(config("reward.verifier=broken_judge:judge", f"rollout.replay={tmp_path}"))
    rehearse(config())
