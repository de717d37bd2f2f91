"""Agents on the real OpenAI client in worker processes: what they say is read, and whatever they do is their own episode's."""

from __future__ import annotations

import asyncio
import random
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tepo_megatron.config import RunConfig
from tepo_megatron.core.problem import Problem, ResponseText
from tepo_megatron.core.rollout import Response
from tepo_megatron.runtime import worker_process
from tepo_megatron.sampler.vllm.resources import reserve_port
from tepo_megatron.tasks.environments.environment_task import EnvironmentTask
from tepo_megatron.tasks.environments.worker import EpisodeTable
from tepo_megatron.tasks.environments.workers import EnvironmentWorkers
from tepo_megatron.tasks.protocol import RewardResult
from tests.support import episodes
from tests.support.episodes import VOCABULARY, FakeSamples, Letters
from tests.support.programs import TIMEOUT_S

pytest.importorskip("openai")
pytest.importorskip("aiohttp")

AGENTS = f"{Path(__file__).parents[2] / 'support' / 'odd_agents.py'}"

FAILS = {
    "asks nothing": "the agent ended without asking the model anything",
    "raises at once": r"the agent raised KeyError: 'gone', at .*odd_agents.py:\d+: \"raise KeyError",
    "raises": r"the agent raised KeyError: 'gone', at .*odd_agents.py:\d+: \"raise KeyError",
    "exits": "the agent raised SystemExit: 3",
    "another key": "the agent raised AuthenticationError: Error code: 401 - .*no episode has this API key",
    "another temperature": "temperature = 0.5, and the run draws with rollout.sampling.temperature = 1.0",
    "a seed": "seed = 1: the run gives each turn a seed of its own",
    "several answers": "n = 2 is not answered here",
    "a format": r"response_format = {\"type\": \"json_object\"} would change what the model writes",
    "an unknown field": "guided_regex is not known here",
    "edits": r"another history than what was said: message 0 \(user\) was '0' and is '3'; an episode is trained on as one",
    "forgets": "another history than what was said: message 0",
    "edits the model's": r"another history than what was said: message 1 \(assistant\) was .* and is 'I said something else'",
    "goes on for the model": "the last message is the assistant's",
    "an image": r"messages\[2\] has a part of type 'image_url'; the model reads text alone",
    "unknown text": "the environment's observation has characters that the tokenizer does not know: 'é'",
    "too large": "the request is larger than environment.agent.max_request_mb allows",
    "returns nothing": "the agent returned nothing, and no reward; return a number, send one to /v1/reward, or set",
    "returns text": "the agent returned text, and no reward",
    "no number": "the environment returned nan, not a finite number",
    "posts text": "the environment returned str, not a number",
    "posts nothing": r"a reward is sent as {\"reward\": 1.0}, or with components by name",
}
"""What an agent does → what is said of its episode."""

REWARDS = {"fine": 1.0, "the run's own": 1.0, "posts": 0.25, "never ends": 0.0}

TAKEN = dict.fromkeys(("another temperature", "a seed", "forgets", "edits", "returns nothing"), 1.0)
TAKEN |= {"returns text": 0.5, "posts": 0.25, "posts and says": 0.75}
"""With settings that ignore, restart and rate."""


class Begun(Letters):
    """A tokenizer that puts a token before a text."""

    def encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        return [10 + ord(each) - ord("a") if "a" <= each <= "z" else super(Begun, self).encode(each)[0] for each in text]

    def prompt_ids(self, text: str) -> list[int]:
        return [1, *self.encode(text)]


def config(solve: str = "solve", agent: dict[str, Any] | None = None, **more: Any) -> RunConfig:
    common = {"name": f"{AGENTS}:{solve}", "adapter": "agent", "timeout_s": 600.0, "max_turns": 5}
    settings = {"chat_template": False, "max_request_mb": 1, **(agent or {})}
    return RunConfig.model_validate({"environment": {**common, "agent": settings, **more}})


@contextmanager
def opened(found: RunConfig) -> Iterator[EnvironmentTask]:
    with EnvironmentTask(found, Begun(), VOCABULARY, 120) as pool:  # type: ignore[arg-type]
        yield pool


def play(pool: EnvironmentTask, does: list[str]) -> list[tuple[Response, RewardResult, FakeSamples]]:
    problems = [Problem(what, "", what) for what in does]
    samples: Any = FakeSamples(random.Random(0))
    with pool.stream(samples, lambda at: problems[at]) as stream:
        for at in range(len(problems)):
            stream.submit(at, (1,), 7 * at + 1)
        found = episodes.play(stream)
    responses = [found[at, 0] for at in range(len(problems))]
    results = pool.score(
        [(problem, ResponseText("", it.response_ids)) for problem, it in zip(problems, responses, strict=True)]
    )
    return [(response, result, samples) for response, result in zip(responses, results, strict=True)]


def test_a_failing_agent_is_one_failed_sample_and_the_others_go_on() -> None:
    does = [*FAILS, *REWARDS, "fine"]
    with opened(config()) as pool:
        before = processes(pool)
        played = play(pool, does)
        figures = pool.take_figures([])
        assert processes(pool) == before
    said = {what: (result.reward, str(result.error)) for what, (_, result, _) in zip(does, played, strict=True)}
    other = [what for what in FAILS if said[what][0] is not None or not re.search(FAILS[what], said[what][1])]
    assert {what: said[what] for what in other} == {}
    for what, (response, result, samples) in zip(does, played, strict=True):
        if what in FAILS:
            continue
        assert (what, result.error, result.reward) == (what, None, REWARDS[what])
        assert (response.finish_reason == "length") >= (what == "never ends")
        assert response.loss_mask is not None
        context = response.response_ids[~response.loss_mask]
        assert context.tolist() == [3, *[4] * (len(context) - 1)]  # "0", and "1" each time: nothing of the model's
        assert len(context) == (5 if what == "never ends" else 2)  # environment.max_turns
        asked = [prompt for _, prompt, *_ in samples.asked]
        assert sum((1, *response.response_ids.tolist())[: len(prompt)] == prompt for prompt in asked) >= len(context)
    first = [room for _, prompt, _, room in played[0][2].asked if prompt == (1, 3)]
    assert [room for room in first if room < 100] == [2]  # max_tokens of "the run's own"
    assert figures["environment/restarts"] == 0
    assert figures["environment/new_histories"] == 0


def processes(pool: EnvironmentTask) -> list[Any]:
    """Of its workers."""
    assert isinstance(pool.host, EnvironmentWorkers)
    return [worker.process for worker in pool.host._workers]


def test_an_agent_that_hangs_is_one_failed_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apart from the many above, which make their clients at once and may take long over it."""
    monkeypatch.setattr(worker_process, "_EXTRA_TIME_S", 600.0)  # the worker ends the call itself, however slow it is
    with opened(config(timeout_s=8.0)) as pool:
        (_, hung, _), (_, fine, _) = play(pool, ["hangs", "fine"])
        assert pool.take_figures([])["environment/restarts"] == 0
    assert "the environment took longer in step than environment.timeout_s = 8 s" in str(hung.error)
    assert (fine.error, fine.reward) == (None, 1.0)


def test_settings_say_what_is_ignored_what_is_dropped_and_who_rates() -> None:
    """Fields that the run decides on; the last of two histories; text that a verifier rates; an agent that is async and
    streams."""
    agent = {"ignore": ["temperature", "seed"], "history": "restart", "verifier": f"{AGENTS}:is_not_empty"}
    with opened(config(agent=agent)) as pool:
        played = play(pool, list(TAKEN))
        figures = pool.take_figures([])
    assert [(result.error, result.reward) for _, result, _ in played] == [(None, reward) for reward in TAKEN.values()]
    assert figures["environment/new_histories"] == 2 / 8
    forgot, edited = played[2][0], played[3][0]
    assert forgot.response_ids[:1].tolist() == [4]  # of the last conversation alone
    assert edited.response_ids[:1].tolist() == [6]
    for response in (forgot, edited):
        assert response.loss_mask is not None
        runs = "".join("m" if own else "c" for own in response.loss_mask.tolist())
        assert "cm" not in runs.lstrip("c").lstrip("m")
    with opened(config("solve_async")) as pool:
        ((response, result, _),) = play(pool, ["any"])
    assert (result.error, result.reward) == (None, 1.0)
    assert response.loss_mask is not None
    assert response.response_ids[~response.loss_mask].tolist() == [5, 4, 3, 4]  # of its seed, 1, the second


def test_an_agent_outside_takes_its_episode_and_sends_its_reward(tmp_path: Path) -> None:
    held = reserve_port("127.0.0.1")
    port = held.getsockname()[1]
    agent = {"port": port, "key_file": str(tmp_path / "key")}
    with held, opened(config(name="outside", agent=agent)) as pool:
        key = (tmp_path / "key").read_text()
        told: list[Any] = []

        def work() -> None:
            root = f"http://127.0.0.1:{port}"
            for _ in range(2):
                while True:
                    try:
                        found = httpx.post(f"{root}/episodes", headers={"Authorization": f"Bearer {key}"}, timeout=TIMEOUT_S)
                        break
                    except httpx.ConnectError:
                        time.sleep(0.1)  # it listens from the first episode on
                no = {"Authorization": "Bearer no"}
                told.append(httpx.post(f"{root}/episodes", headers=no, timeout=TIMEOUT_S).status_code)
                told.append(httpx.get(f"{root}/nothing", timeout=TIMEOUT_S).json()["error"]["message"])
                episode = found.json()
                own = {"Authorization": f"Bearer {episode['api_key']}"}
                base = episode["base_url"]
                told.append(httpx.get(f"{base}/models", headers=own, timeout=TIMEOUT_S).json()["data"][0]["id"])
                asked = {"model": "policy", "messages": episode["problem"]["messages"]}
                answer = httpx.post(f"{base}/chat/completions", json=asked, headers=own, timeout=TIMEOUT_S).json()
                assert answer["choices"][0]["message"]["role"] == "assistant"
                rated = {"reward": float(episode["problem"]["answer"])}
                httpx.post(f"{base}/reward", json=rated, headers=own, timeout=TIMEOUT_S)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        problems = [Problem(f"p{at}", "012", str(at)) for at in (2, 3)]
        samples: Any = FakeSamples(random.Random(0))
        with pool.stream(samples, lambda at: problems[at]) as stream:
            for at in range(2):
                stream.submit(at, (1,), 7 * at)
            found = episodes.play(stream)
        thread.join(TIMEOUT_S)
        results = pool.score([(problems[at], ResponseText("", found[at, 0].response_ids)) for at in range(2)])
    assert [(result.error, result.reward) for result in results] == [(None, 2.0), (None, 3.0)]
    assert [found[at, 0].response_ids[:3].tolist() for at in range(2)] == [[3, 4, 5]] * 2
    assert told[0] == 401
    assert "GET /nothing is not served here" in told[1]
    assert told[2] == "policy"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "guess_number"}, "guess_number is an environment, and no agent"),
        ({"adapter": "none"}, "environment.agent without environment.adapter = agent"),
        ({"network": False}, "environment.network = false with adapter = agent"),
        ({"workers": 2, "agent": {"port": 8600}}, "environment.workers = 2 cannot share environment.agent.port = 8600"),
        ({"name": "outside"}, "outside needs environment.agent.port and environment.agent.key_file"),
        ({"agent": {"ignore": ["n"]}}, "environment.agent.ignore"),
        ({"agent": {"ignore": ["seed", "seed"]}}, "names a field twice"),
    ],
)
def test_agents_that_cannot_be_are_refused_before_anything_starts(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"solve": "is_not_empty"}, r"the agent '.*:is_not_empty' is called with \(problem, base_url=…, api_key=…\)"),
        ({"kwargs": {"depth": 3}}, r"which it does not take \(got an unexpected keyword argument 'depth'\)"),
        ({"agent": {"verifier": "judge"}}, "environment.agent.verifier = .* must be a function of one response"),
        ({"agent": {"verifier": "nobody"}}, "unknown verifier 'nobody'"),
    ],
)
def test_an_agent_that_cannot_be_called_is_refused_at_the_start(change: dict[str, Any], message: str) -> None:
    environment = config(**change).environment
    assert environment is not None
    with pytest.raises(ValueError, match=message):
        EpisodeTable({**environment.model_dump(), "agent": EnvironmentWorkers.agent_setup(environment, None)})


def test_a_tokenizer_without_a_beginning_is_refused() -> None:
    """END is in no prompt: all prompts of agents are the token that chats begin with."""
    from tepo_megatron.tasks.environments.episodes import opening_of

    environment = config().environment
    assert opening_of(environment, Begun()) == (1,)  # type: ignore[arg-type]

    class Bare(Letters):
        def prompt_ids(self, text: str) -> list[int]:
            return self.encode(text)

    with pytest.raises(ValueError, match="the model's tokenizer has no begin token"):
        opening_of(environment, Bare())  # type: ignore[arg-type]


def test_agents_that_run_on_wear_their_process_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """With no episode left, and more of them than are left behind; one that ends in time does not count."""
    from tepo_megatron.tasks.environments import agents

    monkeypatch.setattr(agents, "_MAX_RUNNING_AGENTS", 1)
    environment = config("runs_on").environment
    assert environment is not None
    desk = EpisodeTable({**environment.model_dump(), "agent": EnvironmentWorkers.agent_setup(environment, None)})
    given = ["", "", "", {}, [], ""]

    async def play() -> list[bool]:
        worn = []
        for at in range(3):
            answer = await desk.answer(at, ["reset", given, at, False])
            assert answer["observation"][0] == "chat"
            worn.append(desk.worn)
            await desk.answer(at, ["end"])
            while at == 0 and any(each.name == "agent" for each in threading.enumerate()):
                await asyncio.sleep(0.01)  # it hears that its episode is over
            worn.append(desk.worn)
        return worn

    assert asyncio.run(play()) == [False, False, False, False, False, True]
