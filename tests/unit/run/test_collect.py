"""What a step is trained on: full batches of groups that filters keep, or what the user's own function draws."""

import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tepo_megatron.config import RunConfig
from tepo_megatron.config.load import load_run
from tepo_megatron.core.problem import Problem
from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.errors import is_ours
from tepo_megatron.run.sampling.collector import RolloutCollector
from tepo_megatron.run.sampling.custom_rollout import StepSampler, load_collect
from tepo_megatron.sampler.protocol import ServerDied
from tepo_megatron.tasks.data.sources import ProblemSampler
from tepo_megatron.tasks.protocol import RewardResult
from tests.support.fake_sampling import (
    MAX_NEW_TOKENS,
    FakeFleet,
    FakeVerifiers,
    Killed,
    collector,
    groups_of,
    groups_on_disk,
    run_steps,
)

PROBLEMS = [Problem(f"p{number}", "q" * (1 + number % 3), "a") for number in range(200)]
STEPS = 4

SCHEDULES: dict[str, dict[str, Any]] = {
    "sync": {"minibatches": 1},
    "overlap": {"minibatches": 1, "schedule": "overlap", "max_staleness": 2, "stale": "keep", "steps": 1000},
}


def config(output: Path, n: int = 3, g: int = 2, schedule: str = "sync", **rollout: Any) -> RunConfig:
    sections = {"prompts_per_step": n, "samples_per_prompt": g, "sampling": {"max_new_tokens": MAX_NEW_TOKENS}, **rollout}
    document = {"output": str(output), "rollout": {"uncorrected": True, **sections}, "train": SCHEDULES[schedule]}
    return RunConfig.model_validate(document)


def reward_by(seed: int, chance: float) -> Any:
    """1 or 0 by the text, so that what is drawn again is rewarded as before."""
    return lambda problem, text: float(random.Random(f"{seed}/{problem.id}/{text}").random() < chance)


def collect_with(run: RunConfig, fleet: FakeFleet, order: int = 0, reward: Any = lambda problem, text: 1.0) -> RolloutCollector:
    return collector(run, PROBLEMS, FakeVerifiers(order, reward), fleet)


def problems_of(rollouts: Sequence[Rollout]) -> list[str]:
    return [group[0].problem_id for group in groups_of(rollouts).values()]


CHOICES: Any = st.tuples(
    st.integers(1, 4), st.integers(2, 4), st.sampled_from([1.0, 1.1, 1.5, 2.0]), st.sampled_from([None, 50]), st.booleans()
).filter(lambda choice: choice[2] > 1 if choice[4] else choice[2] == 1 or bool(choice[3]))
"""prompts_per_step, samples_per_prompt, oversample, max_batches, partial"""


@settings(max_examples=20)
@given(
    chosen=CHOICES, order=st.integers(0, 10**6), chance=st.sampled_from([0.3, 0.5, 0.9]), schedule=st.sampled_from([*SCHEDULES])
)
def test_batches_are_full_and_no_prompt_is_lost_or_drawn_twice(
    chosen: tuple[int, int, float, int | None, bool], order: int, chance: float, schedule: str, tmp_path_factory: Any
) -> None:
    n, g, oversample, max_batches, partial = chosen
    filters = {"filters": ["zero_variance"], "max_batches": max_batches} if max_batches else None
    settings = {"oversample": oversample, "partial": partial, "filter_groups": filters, "journal": False}
    run = config(tmp_path_factory.mktemp("run"), n=n, g=g, schedule=schedule, **settings)
    fleet = FakeFleet(order)
    of = collect_with(run, fleet, order, reward_by(7, chance))
    is_counted = schedule == "sync" and (partial or filters)
    used: list[str] = []
    drawn = filtered = carried = 0.0
    for rollouts, figures in run_steps(of, fleet, range(STEPS)):
        groups = groups_of(rollouts)
        assert list(groups) == list(range(n))
        assert all(len(group) == g for group in groups.values())
        if filters:
            assert all(len({rollout.reward for rollout in group}) > 1 for group in groups.values())
        used += problems_of(rollouts)
        if is_counted:
            assert figures["groups/carried_in"] == carried
            assert figures["groups/kept"] == n
            left = figures["groups/kept"] + figures["groups/filtered"] + figures["groups/carried"]
            assert figures["groups/carried_in"] + figures["groups/drawn"] == left
            drawn, filtered = drawn + figures["groups/drawn"], filtered + figures["groups/filtered"]
            carried = figures["groups/carried"]
    of.close()
    assert len(set(used)) == len(used)
    if schedule == "overlap":
        assert len({(key, seed) for key, seed, *_ in fleet.asked}) == len(fleet.asked)
    if is_counted:
        assert drawn == len(used) + filtered + carried
        assert len({key for key, *_ in fleet.asked}) == drawn
    elif schedule == "sync":
        assert len(fleet.asked) == STEPS * n * g


@pytest.mark.parametrize(
    ("schedule", "more", "drawn"),
    [("sync", {"partial": True}, 55), ("sync", {"filter_groups": {}}, 55), ("overlap", {"filter_groups": {}}, 3 * 50 + 5)],
)
def test_more_groups_are_drawn_than_trained_on(schedule: str, more: dict[str, Any], drawn: int, tmp_path: Path) -> None:
    buffer = collect_with(config(tmp_path, n=50, schedule=schedule, oversample=1.1, **more), FakeFleet(0))._buffer
    buffer.begin(0)
    assert len(buffer.claim()) == drawn


@settings(max_examples=12)
@given(
    order=st.integers(0, 10**6),
    dies_after=st.integers(0, 40),
    saved=st.integers(0, STEPS - 1),
    oversample=st.sampled_from([1.0, 1.5]),
)
def test_a_run_that_is_killed_in_mid_batch_goes_on_and_draws_nothing_twice(
    order: int, dies_after: int, saved: int, oversample: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """From any checkpoint before the kill: complete groups come from the disk, of steps and of the batch under way. The batches
    do not depend on what finishes first.
    """
    first = FakeFleet(1)
    chosen: dict[str, Any] = {"n": 3, "oversample": oversample, "filter_groups": {"max_batches": 50}}
    whole = collect_with(config(tmp_path_factory.mktemp("whole"), **chosen), first, 1, reward_by(5, 0.5))
    expected = run_steps(whole, first, range(STEPS))

    run = config(tmp_path_factory.mktemp("killed"), **chosen)
    fleet = FakeFleet(order, dies_after)
    states: dict[int, dict[str, Any]] = {}
    killed = collect_with(run, fleet, order, reward_by(5, 0.5))
    with suppress(Killed):
        run_steps(killed, fleet, range(STEPS), states)
    on_disk = groups_on_disk(run.output)
    saved = min(saved, max(states))
    again = FakeFleet(order + 1)
    resumed = collect_with(run, again, order + 1, reward_by(5, 0.5))
    assert resumed.restore({"sampler": states[saved], "step": saved}) == []
    assert run_steps(resumed, again, range(saved, STEPS)) == expected[saved:]
    complete = {number for number, rollouts in on_disk.items() if len(rollouts) == 2}
    assert not complete & {key for key, *_ in again.asked}
    assert set(groups_on_disk(run.output)) == {each["number"] for each in resumed.state().get("carried", ())}


@settings(max_examples=10)
@given(
    order=st.integers(0, 10**6), dies_after=st.integers(0, 30), partial=st.booleans(), schedule=st.sampled_from([*SCHEDULES])
)
def test_a_server_that_dies_costs_only_what_was_not_finished(
    order: int, dies_after: int, partial: bool, schedule: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    settings = {"oversample": 1.5, "partial": partial, "filter_groups": {"max_batches": 50}}
    run = config(tmp_path_factory.mktemp("run"), n=3, g=3, schedule=schedule, **settings)
    fleet = FakeFleet(order, dies_after, lambda: ServerDied("gone"))
    of = collect_with(run, fleet, order, reward_by(5, 0.5))
    used, died = [], False
    for step in range(3):
        try:
            rollouts = of.collect(step)
        except ServerDied:
            died = True
            assert len(fleet.asked) == fleet.asked_before  # nothing is asked of servers that have no weights
            of.published(fleet.weights_version)
            rollouts = of.collect(step)
        used += problems_of(rollouts)
        assert Counter(rollout.group for rollout in rollouts) == {0: 3, 1: 3, 2: 3}
    of.close()
    assert len(set(used)) == 9
    if schedule == "overlap":  # what was under way is asked for again with the same seeds, and nothing else
        times = Counter((key, seed) for key, seed, *_ in fleet.asked)
        assert Counter(key for (key, _), count in times.items() if count == 2) == (fleet.lost if died else Counter())
        assert max(times.values()) <= 2


def test_a_continued_response_keeps_its_tokens_and_says_which_weights_drew_which(tmp_path: Path) -> None:
    run = config(tmp_path, n=3, g=4, oversample=2.0, partial=True)
    fleet = FakeFleet(0)
    of = collect_with(run, fleet)
    parts: dict[tuple[str, tuple[int, ...]], Rollout] = {}
    mixed = 0
    for step in range(8):
        ((rollouts, _),) = run_steps(of, fleet, range(step, step + 1))
        for rollout in rollouts:
            ids = tuple(rollout.response_ids.tolist())
            starts = [start for start, _ in rollout.versions]
            assert starts == sorted(set(starts))
            assert starts[0] == 0
            assert len(ids) == len(rollout.sampler_logprobs)
            if len(starts) > 1:
                mixed += 1
                before = parts[rollout.problem_id, ids[: starts[-1]]]
                assert before.versions == rollout.versions[:-1]
                assert before.versions[-1][1] < rollout.versions[-1][1]
        for group in groups_on_disk(tmp_path).values():
            for part in group:
                if part.finish_reason == "abort":
                    parts[part.problem_id, tuple(part.response_ids.tolist())] = part
    assert mixed > 5
    continued = {(key, seed) for key, seed, _, again in fleet.asked if again}
    first = {seed for _, seed, _, again in fleet.asked if not again}
    assert continued
    assert not {seed for _, seed in continued} & first  # the same random numbers would come again


def test_a_killed_run_goes_on_with_the_parts_that_a_step_had_put_aside(tmp_path: Path) -> None:
    run = config(tmp_path, n=3, g=4, oversample=2.0, partial=True)
    states: dict[int, dict[str, Any]] = {}
    fleet = FakeFleet(0)
    of = collect_with(run, fleet)
    run_steps(of, fleet, range(3), states)
    after = of.state()
    parts = groups_on_disk(tmp_path)
    assert {each["number"] for each in after["carried"]} >= set(parts)
    assert any(rollout.finish_reason == "abort" for group in parts.values() for rollout in group)
    fleet = FakeFleet(9)
    resumed = collect_with(run, fleet, 9)
    resumed.restore({"sampler": after, "step": 3})
    run_steps(resumed, fleet, range(3, 4))
    asked, continued = (Counter(key for key, *_, again in fleet.asked if again >= least) for least in (0, 1))
    for number, group in parts.items():
        unfinished = sum(each.finish_reason == "abort" for each in group)
        assert asked[number] == unfinished + 4 - len(group)
        assert continued[number] == unfinished


def test_a_run_that_went_back_takes_no_tokens_of_the_weights_that_it_passed_over(tmp_path: Path) -> None:
    """Of groups that were drawn before."""
    run = config(tmp_path, n=3, g=4, oversample=2.0, partial=True)
    states: dict[int, dict[str, Any]] = {}
    run_steps(collect_with(run, fleet := FakeFleet(0)), fleet, range(3), states)
    of = collect_with(run, fleet := FakeFleet(9), 9)
    of.restore({"sampler": states[2], "step": 2})
    fleet.weights_version = now = WeightsVersion(2, "other")
    of.published(now)
    assert {version for rollout in of.collect(2) for _, version in rollout.versions if version.step >= 2} == {now}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_filter_that_never_fills_the_batch_stops_the_run_and_shows_the_rewards(schedule: str, tmp_path: Path) -> None:
    filters = {"filters": ["zero_variance"], "max_batches": 3}
    limit = r"rollout\.filter_groups\.max_batches = 3 times prompts_per_step,"
    says = {
        "sync": rf"step 0 drew 12 prompts, {limit} and 0 of the 4 groups that it needs .*",
        "overlap": rf"filters refused 12 groups, {limit} before a step was full; .*",
    }
    for reward, shown in (
        (lambda problem, text: float(problem.id == "p17"), "0 × 2"),
        (lambda problem, text: float(problem.id[1:]), r"\S+ to \S+ × \d+, .* to \S+ × \d+\. If nearly all"),
    ):
        run = config(tmp_path, n=4, g=2, schedule=schedule, filter_groups=filters, journal=False)
        of = collect_with(run, fleet := FakeFleet(0), reward=reward)
        with pytest.raises(RuntimeError, match=rf"{says[schedule]}refused by zero_variance 12\. .*responses: {shown}"):
            run_steps(of, fleet, range(1))
        of.close()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_groups_that_an_earlier_run_has_drawn_come_first_whatever_its_schedule(schedule: str, tmp_path: Path) -> None:
    order = ProblemSampler(PROBLEMS, 0)
    names = [problem.id for problem in order.next(5)]
    states: list[dict[str, Any]] = [
        {**order.state(), "drawn": 2, "ahead": [[0, names[2]], [1, names[4]]]},  # as checkpoints up to 0.2 have it
        {**order.state(), "carried": [{"number": at, "step": 0, "place": at, "version": [0, "w0"]} for at in (2, 4)]},
        {**order.state(), "carried": [{"number": at, "step": None, "place": 0, "version": None} for at in (2, 4)]},
    ]
    for state in states:
        fleet = FakeFleet(0)
        of = collect_with(config(tmp_path, journal=False, schedule=schedule), fleet, reward=reward_by(0, 0.5))
        assert of.restore({"sampler": state}) == []
        ((rollouts, _),) = run_steps(of, fleet, range(1))
        of.close()
        if schedule == "sync":
            assert problems_of(rollouts) == [names[2], names[4], order.problem(5).id]
        asked = list(dict.fromkeys(key for key, *_ in fleet.asked))  # an overlapped step trains on what is complete first
        assert asked[:3] == ([0, 1, 5] if "ahead" in state else [2, 4, 5])


def run_of(output: Path, collect: Any, fleet: FakeFleet, schedule: str = "sync", **rollout: Any) -> Any:
    run = config(output, schedule=schedule, collect="mine.py:best", **rollout)
    return collector(run, PROBLEMS, FakeVerifiers(0, lambda problem, text: float(len(text) % 3)), fleet, collect=collect)


def collect_steps(of: Any, fleet: FakeFleet, steps: range) -> list[list[Rollout]]:
    try:
        return [rollouts for rollouts, _ in run_steps(of, fleet, steps)]
    finally:
        of.close()


def best_of_six(problems: Sequence[Problem], sampler: StepSampler) -> list[Rollout]:
    """The two of six with the largest reward."""
    found = []
    for group in sampler.sample(problems, n=6):
        found += sorted(sampler.reward(group), key=lambda rollout: -(rollout.reward or 0.0))[: sampler.samples]
    return found[::-1]  # their order does not matter


def key(rollouts: Sequence[Rollout]) -> list[Any]:
    return [(each.problem_id, each.group, each.response_ids.tolist(), each.reward) for each in rollouts]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_best_of_many_are_trained_on_and_a_killed_run_finds_them_again(schedule: str, tmp_path: Path) -> None:
    fleets = [FakeFleet(order) for order in (0, 7, 3)]
    first = run_of(tmp_path, best_of_six, fleets[0], schedule)
    steps = collect_steps(first, fleets[0], range(2))
    for rollouts in steps:
        assert [rollout.group for rollout in rollouts] == [0, 0, 1, 1, 2, 2]
        assert len({rollout.problem_id for rollout in rollouts}) == 3
    assert sum(rollout.reward or 0.0 for rollout in steps[0]) > 0
    scored = first._task.scored
    assert scored == 2 * 3 * 6 if schedule == "sync" else scored % (3 * 6) == 0  # nothing is scored twice

    def never(problems: Any, sampler: Any) -> list[Rollout]:
        raise AssertionError("the journal has the step")

    assert key(run_of(tmp_path, never, fleets[1], schedule).collect(0)) == key(steps[0])
    again = run_of(tmp_path / "other", best_of_six, fleets[2])  # of whatever schedule
    assert [key(rollouts) for rollouts in collect_steps(again, fleets[2], range(2))] == [key(rollouts) for rollouts in steps]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_server_that_dies_is_no_fault_of_the_function_and_the_step_is_repeated(schedule: str, tmp_path: Path) -> None:
    fleet = FakeFleet(0, dies_after=4, error=lambda: ServerDied("gone"))
    of = run_of(tmp_path, best_of_six, fleet, schedule, journal=False)
    with pytest.raises(ServerDied):
        of.collect(0)
    of.published(fleet.weights_version)
    whole = run_of(tmp_path, best_of_six, FakeFleet(5), journal=False)
    assert key(of.collect(0)) == key(whole.collect(0))
    of.close()


def draw(problems: Sequence[Problem], sampler: StepSampler) -> list[Rollout]:
    return [rollout for group in sampler.sample(problems) for rollout in group]


def test_what_has_no_reward_gets_one_and_a_reward_of_ones_own_stays(tmp_path: Path) -> None:
    """A verifier that fails gives the function none, whatever reward.failed_reward is: the run asks again."""
    given: list[float | None] = []

    def mine(problems: Sequence[Problem], sampler: StepSampler) -> list[Rollout]:
        drawn = draw([replace(problem, prompt="qq") for problem in problems], sampler)  # another prompt, the same problem
        given.extend(rollout.reward for rollout in sampler.reward(drawn))
        return [replace(rollout, reward=None if at % 2 else 9.0) for at, rollout in enumerate(drawn)]

    of = run_of(tmp_path, mine, FakeFleet(0))
    of._task._result = lambda *_: RewardResult(1.0) if given else RewardResult(-1.0, "the judge does not answer")
    assert [rollout.reward for rollout in of.collect(0)] == [9.0, 1.0] * 3
    assert given == [None] * 6
    assert of._task.scored == 6 + 3


def test_a_changed_prompt_is_asked_and_judged_also_where_prompts_are_messages(tmp_path: Path) -> None:
    """By teachers too: each answer has the prompt that it answers."""
    judged: list[Any] = []

    def mine(problems: Sequence[Problem], sampler: StepSampler) -> list[Rollout]:
        return draw([replace(problem, prompt="changed") for problem in problems], sampler)

    fleet = FakeFleet(0)
    run = config(tmp_path, schedule="sync", collect="mine.py:best")
    problems = [replace(problem, messages=(("system", "s"), ("user", problem.prompt))) for problem in PROBLEMS]
    of: Any = collector(run, problems, FakeVerifiers(0, lambda problem, text: 0.0), fleet, collect=mine)
    of._inputs.tokenizer.chat_ids = lambda messages: [len(content) for _, content in messages]

    def score(items: Sequence[tuple[Problem, Any]], _groups: Any) -> list[RewardResult]:
        judged.extend(text.prompt_ids for _, text in items)
        return [RewardResult(0.0)] * len(items)

    of._task.score = score
    of.collect(0)
    assert {tuple(prompt) for _, _, prompt, _ in fleet.asked} == {(1, 7)} == {tuple(ids) for ids in judged}


async def cancelled() -> None:
    raise asyncio.CancelledError


def spoiled(**changes: Any) -> Any:
    """Changes the first rollout."""
    return lambda found: [replace(found[0], **changes), *found[1:]]


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (lambda found: found[1:], "returned 1 rollouts for problem 'p"),
        (lambda found: [*found, found[0]], "that the step did not ask for"),
        (spoiled(problem_id="other"), "returned 1 rollouts for problem"),
        (spoiled(response_ids=[99], sampler_logprobs=[-1.0]), "token 99 is not one of"),
        (spoiled(versions=WeightsVersion(3)), "drawn by the weights of step 3, not of step 0"),
        (spoiled(prompt_ids=[1, 2]), "different prompts"),
        (spoiled(reward=1e39), r"for problem 'p.*: the reward is 1e\+39, beyond ±1e\+15"),
        (spoiled(reward=1.0, reward_parts={"a": 1e308}), r"the reward's component 'a' is 1e\+308, beyond ±1e\+15"),
        (lambda found: None, "returned no list of rollouts in step 1"),
        (lambda found: [each.text for each in found], "returned no list of rollouts in step 1"),
        (lambda found: found[0].nothing, r"raised AttributeError in step 1: .*test_collect\.py:\d+\)"),
        (lambda found: json.loads("{"), r"raised JSONDecodeError in step 1: .*test_collect\.py:\d+\)"),
        (lambda found: sys.exit(3), r"raised SystemExit in step 1: 3 \(.*test_collect\.py:\d+\)"),
        (lambda found: asyncio.run(cancelled()), r"raised CancelledError in step 1: .*test_collect\.py:\d+\)"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_with_a_sentence(how: Any, says: str, tmp_path: Path) -> None:
    def mine(problems: Sequence[Problem], sampler: StepSampler) -> Any:
        return how(draw(problems, sampler))

    of = run_of(tmp_path, mine, FakeFleet(0))
    with pytest.raises(RuntimeError, match=says) as caught:
        of.collect(0)
    of.close()
    assert is_ours(caught.value)
    assert "rollout.collect = mine.py:best" in str(caught.value)


def test_it_is_loaded_by_name_or_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Best:\n    def __call__(self, problems, sampler):\n        return []\nvalue = 3\n")
    config = load_run(None, [f"rollout.collect={tmp_path}/mine.py:Best"])
    loaded = load_collect(config)
    assert loaded([], None) == []
    assert load_collect(config, best_of_six) is best_of_six
    assert load_collect(RunConfig()) is None
    for name, says in (
        (f"{tmp_path}/mine.py:value", "cannot be called: it is int"),
        ("(python):mine", r"give it again, tepo_megatron.train\(…, collect=…\)"),
    ):
        with pytest.raises(ValueError, match=says):
            load_collect(load_run(None, [f"rollout.collect='{name}'"]))
