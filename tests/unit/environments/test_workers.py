"""What an environment can do to its process, and what becomes of it: its own episode fails with a sentence, the others go
on.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tepo_megatron.config import RunConfig
from tepo_megatron.config.reward import EnvironmentConfig
from tepo_megatron.core.problem import Problem, ResponseText
from tepo_megatron.core.rollout import Response, token_ids
from tepo_megatron.tasks.environments.environment_task import EnvironmentTask
from tepo_megatron.tasks.environments.episodes import Episode
from tepo_megatron.tasks.environments.workers import EnvironmentWorkers
from tepo_megatron.tasks.protocol import RewardResult
from tests.support import episodes
from tests.support.episodes import VOCABULARY, FakeSamples, Letters

HOSTILE = f"{Path(__file__).parents[2] / 'support' / 'hostile_environment.py'}"
PROMPT = (1, 7, 8)

FAILS = {
    "raises": r"problem 'raises': the environment raised KeyError: 'gone', at .*hostile_environment.py:\d+: \"raise KeyError",
    "exits": "the environment raised SystemExit: 3",
    "hangs": "the environment took longer in step than environment.timeout_s = 3 s",
    "dies": r"its worker ended 2 times under it, the last time since the environment's process ended \(exit status 1\)",
    "outside": "the environment returned 50 as token 1 of its observation, which is no token of the model's vocabulary of 50",
    "below": "the environment returned -1 as token 2 of its observation, which is no token of the model's vocabulary of 50",
    "unknown text": "the environment's observation has characters that the tokenizer does not know: 'é'",
    "no result": "the environment's step returned tuple, not a StepResult",
    "no number": "the environment returned nan, not a finite number",
    "odd": "the environment's step returned dict as observation, which is neither text, token ids nor messages",
    "two kinds": "the environment returned a number as the reward of one turn, and components as that of another",
    "messages at reset": "the environment's reset returned messages, but the prompt that begins a chat is the data's",
    "a step at reset": "the environment's reset returned a StepResult: an episode ends at the earliest when the model has",
}
"""What it does → what is said of the episode."""

REWARDS = {"fine": 1.0, "ends at once": 0.25, "never ends": 0.0} | {
    f"close {what}": 1.0 for what in ("raises", "exits", "hangs", "dies")
}

TURNS = {"ends at once": 1, "never ends": 4}
"""Of the model; two where it is not said. Between two of them the environment writes one token."""


def config(name: str, **more: Any) -> RunConfig:
    environment = {"name": f"{HOSTILE}:{name}", "timeout_s": 3.0, "max_turns": 4, **more}
    return RunConfig.model_validate({"environment": environment})


def play(pool: EnvironmentTask, problems: list[Problem], n: int = 1) -> dict[tuple[int, int], tuple[Response, RewardResult]]:
    samples: Any = FakeSamples(random.Random(0))
    with pool.stream(samples, lambda at: problems[at]) as stream:
        for at in range(len(problems)):
            stream.submit(at, PROMPT, 10 * at, n)
        found = episodes.play(stream)
    keys = sorted(found)
    for at, index in keys:
        text = ResponseText("", found[at, index].response_ids, found[at, index].finish_reason)
        pool.submit((at, index), problems[at], text, group=at, group_size=n)
    assert pool.unfinished == len(keys)
    results = dict(pool.poll())
    return {key: (found[key], results[key]) for key in keys}


@pytest.mark.parametrize("name", ["Hostile", "Patient"])
def test_a_failing_episode_is_one_failed_sample_and_the_others_go_on(name: str) -> None:
    problems = [Problem(what, "", what) for what in [*FAILS, *REWARDS, "fine"]]
    with EnvironmentTask(config(name), Letters(), VOCABULARY, 60) as pool:  # type: ignore[arg-type]
        played = play(pool, problems)
    assert len(played) == len(problems)
    other = {}
    for (at, _), (response, result) in played.items():
        what, said = problems[at].answer, str(result.error)
        told = 0 if response.loss_mask is None else int((~response.loss_mask).sum())
        if what in REWARDS:
            right = (result.error, result.reward) == (None, REWARDS[what]) and told == TURNS.get(what, 2) - 1
            right &= (response.finish_reason == "length") >= (what == "never ends")
        else:
            right = result.reward is None and re.search(FAILS[what], said) is not None
            right &= "reset" in what or response.model_tokens > 0
        if not right:
            other[what] = (said, result.reward, response)
    assert other == {}
    figures = pool.take_figures([])
    assert figures["environment/restarts"] >= 1
    assert pool.take_figures([]) == {"environment/turns": 1.0, "environment/tokens": 0.0}


@pytest.mark.parametrize("name", ["Waits", "Leaking"])
def test_what_an_episode_leaves_behind_costs_no_other(name: str) -> None:
    """A ``close`` that waits too long, and memory: 400 MB where a worker has 200 and is replaced between two episodes."""
    problems = [Problem(str(at), "", "fine") for at in range(20)]
    run = config(name, memory_mb=200, workers=1, concurrency=1)
    with EnvironmentTask(run, Letters(), VOCABULARY, 60) as pool:  # type: ignore[arg-type]
        assert [result.reward for _, result in play(pool, problems).values()] == [1.0] * 20
        if name == "Waits":
            time.sleep(3.2)  # the worker has given up to wait
            assert [result.reward for _, result in play(pool, problems).values()] == [1.0] * 20


def test_answers_to_episodes_that_were_given_up_are_nobody_elses() -> None:
    """A stream is left while its environments still work; the next one is that of a run that had no other before it."""
    problems = [Problem(str(at), "", str(at)) for at in range(4)]
    samples: Any = FakeSamples(random.Random(0))
    with EnvironmentTask(config("Slow"), Letters(), VOCABULARY, 60) as pool:  # type: ignore[arg-type]
        with pool.stream(samples, lambda at: problems[-1 - at]) as given_up:
            for at in range(4):
                given_up.submit(at, PROMPT, 10 * at, 1)
            while len(samples.asked) < 4:
                given_up.next(0.1)
        played = play(pool, problems)
    for (at, _), (response, result) in played.items():
        assert result.reward == 4.0 * at  # of four turns
        told = [token for token, own in zip(response.response_ids, response.loss_mask, strict=True) if not own]
        assert told == Letters().encode(str(at)) * 3


def test_more_episodes_than_there_is_room_for_wait() -> None:
    problems = [Problem(str(at), "", "fine") for at in range(5)]
    with EnvironmentTask(config("Hostile", concurrency=1, workers=2), Letters(), VOCABULARY, 60) as pool:  # type: ignore[arg-type]
        played = play(pool, problems, 2)
    assert [result.reward for _, result in played.values()] == [1.0] * 10


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"name": f"{HOSTILE}:Missing"}, "has no function Missing"),
        ({"name": "tests/support/missing.py:It"}, "there is no file"),
        ({"name": "guess"}, "unknown environment 'guess'; known: guess_number, calculator, python, or your own"),
        (
            {"name": f"{HOSTILE}:Hostile", "kwargs": {"broken": True}},
            "cannot be made with environment.kwargs broken: it raised",
        ),
        ({"name": "pathlib:Path"}, "the environment 'pathlib:Path' has no method reset"),
    ],
)
def test_an_environment_that_cannot_be_made_is_refused_at_the_start(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EnvironmentWorkers(EnvironmentConfig(**wrong)).close()


def test_a_rehearsal_refuses_what_cannot_begin() -> None:
    with EnvironmentTask(config("Hostile"), Letters(), VOCABULARY, 60) as pool:  # type: ignore[arg-type]
        pool.rehearse([Problem("a", "", "fine"), Problem("b", "", "messages at reset")])
        with pytest.raises(ValueError, match="cannot begin an episode of the first 2 problems: the environment's reset ret"):
            pool.rehearse([Problem(each, "", "messages at reset") for each in "ab"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rollout": {"partial": True, "oversample": 1.5, "uncorrected": True}}, "an episode cannot be put aside"),
        ({"rollout": {"truncated": "penalise", "overlong": {"buffer": 4}}}, "penalise with environment"),
        ({"reward": {"verifier": "exact"}}, "rewards come from the environment"),
        ({"environment": {"name": "python"}}, "set environment.run_code = true if you mean it"),
        ({"environment": {"name": "calculator", "servers": ["http://a:1"]}}, "environment.servers needs environment.key_file"),
        ({"environment": {"name": "calculator", "servers": ["a:1"], "key_file": "k"}}, "'a:1' is no address"),
        ({"environment": {"name": "calculator", "max_tokens": 1}}, "leaves no room"),
    ],
)
def test_what_episodes_cannot_do_is_refused_before_anything_starts(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RunConfig.model_validate({"environment": {"name": "calculator"}, **change})


def test_rewards_by_components_are_weighed_and_a_cut_episode_has_none_of_them() -> None:
    """As those of a verifier; what failed counts as ``reward.failed_reward`` where the model wrote something."""
    make: Callable[..., Any] = lambda **reward: RunConfig.model_validate(  # noqa: E731
        {"environment": {"name": "guess_number"}, "reward": {"weights": {"right": 2.0, "brief": 0.5}, **reward}}
    )
    problem, response = Problem("p", "", "1"), Response([5], [-1.0], "stop", ())
    with EnvironmentTask(make(failed_reward=-1.0), Letters(), VOCABULARY, 60) as pool:  # type: ignore[arg-type]
        for reward, expected in (({"right": 1.0, "brief": 1.0}, 2.5), (0.0, 0.0), (1.0, -1.0)):
            pool.note(Episode("k", 0, problem, token_ids([1]), 0, reward=reward), response)
            (result,) = pool.score([(problem, ResponseText("", [5]))])
            assert result.reward == expected
        assert "the environment returned a number, not the components right, brief of reward.weights" in str(result.error)
        nothing = Response([], [], "stop", ())
        pool.note(Episode("k", 0, problem, token_ids([1]), 0, error="it fell over"), nothing)
        (result,) = pool.score([(problem, ResponseText(""))])
        assert (result.reward, result.error) == (None, "problem 'p': it fell over")
        (unknown,) = pool.score([(problem, ResponseText("", [9]))])
        assert "was played before the interruption" in str(unknown.error)
