"""What an environment can do to its process, here and on another machine, and what becomes of it: its own episode fails with a
sentence, the others go on. A server has a key: who has none is answered without being read, nobody takes all connections, and a
body that is no request is refused."""

import contextlib
import json
import math
import random
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest

from tepo_megatron.config import RunConfig
from tepo_megatron.config.reward import EnvironmentConfig
from tepo_megatron.core.problem import Problem, ResponseText
from tepo_megatron.core.rollout import Response, token_ids
from tepo_megatron.sampler.sampling import Sampling, prompt_seed
from tepo_megatron.sampler.vllm.resources import reserve_port
from tepo_megatron.tasks.environments.environment_task import EnvironmentTask
from tepo_megatron.tasks.environments.episodes import Episode
from tepo_megatron.tasks.environments.protocol import EpisodeAnswer, StepResult, read_key
from tepo_megatron.tasks.environments.service import EnvironmentService, RemoteEnvironments
from tepo_megatron.tasks.environments.workers import EnvironmentWorkers
from tepo_megatron.tasks.protocol import RewardResult
from tests.support import episodes
from tests.support.episodes import VOCABULARY, FakeHost, FakeSamples, Letters
from tests.support.processes import eventually
from tests.support.programs import TIMEOUT_S

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
    "too much": r"problem 'too much': the environment returned 1e\+39, beyond ±1e\+15",
    "component": r"problem 'component': the environment returned for its component 'right' 1e\+308, beyond ±1e\+15",
    "sum": r"problem 'sum': the reward is 2700000000000000.5, beyond ±1e\+15",
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

OWN = {"name": f"{HOSTILE}:Hostile", "timeout_s": 600.0, "max_turns": 4}
GAME: dict[str, Any] = {"name": "guess_number", "timeout_s": 600.0}


def opened(environment: dict[str, Any], reward: dict[str, Any] | None = None) -> EnvironmentTask:
    run = RunConfig.model_validate({"environment": environment, "reward": reward or {}})
    return EnvironmentTask(run, Letters(), VOCABULARY, 60)  # type: ignore[arg-type]


def play(pool: EnvironmentTask, problems: list[Problem]) -> dict[tuple[int, int], tuple[Response, RewardResult]]:
    samples: Any = FakeSamples(random.Random(0))
    with pool.stream(samples, lambda at: problems[at]) as stream:
        for at in range(len(problems)):
            stream.submit(at, PROMPT, 10 * at, 1)
        found = episodes.play(stream)
    keys = sorted(found)
    for at, index in keys:
        text = ResponseText("", found[at, index].response_ids, found[at, index].finish_reason)
        pool.submit((at, index), problems[at], text, group=at, group_size=1)
    assert pool.unfinished == len(keys)
    results = dict(pool.poll())
    return {key: (found[key], results[key]) for key in keys}


@pytest.mark.parametrize("name", ["Hostile", "Patient"])
def test_a_failing_episode_is_one_failed_sample_and_the_others_go_on(name: str) -> None:
    problems = [Problem(what, "", what) for what in [*FAILS, *REWARDS, "fine"]]
    with opened({**OWN, "name": f"{HOSTILE}:{name}", "timeout_s": 3.0}) as pool:
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


@pytest.mark.parametrize(("name", "concurrency"), [("Waits", 1), ("Leaking", 1), ("Leaking", 3), ("Large", 3)])
def test_what_an_episode_leaves_behind_costs_no_other(name: str, concurrency: int) -> None:
    """The others wait for room: a ``close`` that waits too long, and memory, 400 MB where a worker has 200 and is replaced
    between two episodes, also if they overlap, but not for memory that they give back."""
    problems = [Problem(str(at), "", "fine") for at in range(20)]
    limits = {"timeout_s": 3.0 if name == "Waits" else 600.0, "memory_mb": 200, "workers": 1, "concurrency": concurrency}
    with opened({**OWN, "name": f"{HOSTILE}:{name}", **limits}) as pool:
        assert [result.reward for _, result in play(pool, problems).values()] == [1.0] * 20
        if name == "Waits":
            time.sleep(3.2)  # the worker has given up to wait
            assert [result.reward for _, result in play(pool, problems).values()] == [1.0] * 20


def test_answers_to_episodes_that_were_given_up_are_nobody_elses() -> None:
    """A stream is left while its environments still work; the next one is that of a run that had no other before it."""
    problems = [Problem(str(at), "", str(at)) for at in range(4)]
    samples: Any = FakeSamples(random.Random(0))
    with opened({**OWN, "name": f"{HOSTILE}:Slow"}) as pool:
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


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"name": f"{HOSTILE}:Missing"}, "has no function Missing"),
        ({"name": "tests/support/missing.py:It"}, "there is no file"),
        ({"name": "guess"}, "unknown environment 'guess'; known: guess_number, calculator, python, or your own"),
        ({**OWN, "kwargs": {"broken": True}}, "cannot be made with environment.kwargs broken: it raised"),
        ({"name": "pathlib:Path"}, "the environment 'pathlib:Path' has no method reset"),
    ],
)
def test_an_environment_that_cannot_be_made_is_refused_at_the_start(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EnvironmentWorkers(EnvironmentConfig(**wrong)).close()


def test_a_rehearsal_refuses_what_cannot_begin() -> None:
    with opened(OWN) as pool:
        pool.rehearse([Problem("a", "", "fine"), Problem("b", "", "messages at reset")])
        with pytest.raises(ValueError, match="cannot begin an episode of the first 2 problems: the environment's reset ret"):
            pool.rehearse([Problem(each, "", "messages at reset") for each in "ab"])


@pytest.fixture
def unplayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker is started."""
    monkeypatch.setattr(EnvironmentTask, "open_host", Mock())


@pytest.mark.usefixtures("unplayed")
def test_rewards_by_components_are_weighed_and_a_cut_episode_has_none_of_them() -> None:
    """As those of a verifier; what failed counts as ``reward.failed_reward`` where the model wrote something."""
    problem, response = Problem("p", "", "1"), Response([5], [-1.0], "stop", ())
    with opened(GAME, {"weights": {"right": 2.0, "brief": 0.5}, "failed_reward": -1.0}) as pool:
        for paid, expected in (({"right": 1.0, "brief": 1.0}, 2.5), (0.0, 0.0), (1.0, -1.0)):
            pool.note(Episode("k", 0, problem, token_ids([1]), 0, reward=paid), response)
            (result,) = pool.score([(problem, ResponseText("", [5]))])
            assert result.reward == expected
        assert "the environment returned a number, not the components right, brief of reward.weights" in str(result.error)
        (again,) = pool.score([(problem, ResponseText("", [5]))])  # a teacher's judgement was lost with a server
        assert again.reward == -1.0
        nothing = Response([], [], "stop", ())
        pool.note(Episode("k", 0, problem, token_ids([1]), 0, error="it fell over"), nothing)
        (result,) = pool.score([(problem, ResponseText(""))])
        assert (result.reward, result.error) == (None, "problem 'p': it fell over")
        (unknown,) = pool.score([(problem, ResponseText("", [9]))])
        assert "was played before the interruption" in str(unknown.error)
        pool.note(Episode("k", 0, problem, token_ids([1]), 0), Response([5] * 1000, [-1.0] * 1000, "stop", ()))
        (result,) = pool.score([(problem, ResponseText("", [5] * 1000))])
        assert result.reward == 0.0
        assert {len(ids) for _, ids in pool._taken} == {16}  # not the ids, of tens of thousands of episodes


@pytest.mark.usefixtures("unplayed")
@pytest.mark.parametrize(
    ("weights", "paid"),
    [
        (None, [(0.0, 0.0), ({"right": 1.0, "brief": 0.5}, 1.5)]),
        (None, [({"format": 0.2}, 0.2), ({"format": 0.2, "right": 1.0}, 1.2), ({"format": 0.5}, 0.5), (0.0, 0.0)]),
        (None, [(0.5, 0.5), ({"right": 1.0}, None)]),
        ({"right": 1.0, "format": 1.0}, [({"format": 0.2}, 0.2), ({"other": 1.0}, None)]),
    ],
)
def test_the_first_episodes_do_not_decide_which_components_others_have(weights: Any, paid: Any) -> None:
    """A limit may end an episode before the turn that rates the rest. What is no component of the weights is refused."""
    problem, response = Problem("p", "", "1"), Response([5], [-1.0], "stop", ())
    with opened(GAME, {"weights": weights}) as pool:
        for reward, expected in paid:
            pool.note(Episode("k", 0, problem, token_ids([1]), 0, reward=reward), response)
            (result,) = pool.score([(problem, ResponseText("", [5]))])
            assert result.reward == expected, result.error


class TwoTurns:
    def reset(self, problem: Problem, seed: int) -> str:
        self.turns = 0
        return problem.answer

    def step(self, action: ResponseText) -> StepResult:
        self.turns += 1
        return StepResult("b", float(len(action.token_ids)), self.turns == 2)


def test_heldout_problems_are_played_and_scored_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a stream plays them with the same seeds. They are none of the step's episodes."""
    monkeypatch.setattr(EnvironmentTask, "open_host", lambda *_: FakeHost(TwoTurns, random.Random(1)))
    monkeypatch.setattr("tepo_megatron.tasks.environments.environment_task._MAX_RESULTS", 1)
    problems = [Problem(f"p{count}", "a" * count, "c") for count in range(3)]
    prompts = [Letters().prompt_ids(problem.prompt) for problem in problems]
    asked, progress = list[Sampling](), list[tuple[int, int]]()

    def sample_stream(sampling: Sampling, *, on_move: Any) -> FakeSamples:
        asked.append(sampling)
        return FakeSamples(random.Random(2))

    with opened(GAME) as pool:
        fleet, other = Mock(sample_stream=sample_stream), Mock(side_effect=AssertionError)
        settings: dict[str, Any] = {"n": 2, "temperature": 0.5, "max_new_tokens": 7, "seed": 3}
        generate = pool.heldout_generate(other, fleet, problems, top_k=5, on_progress=lambda *done: progress.append(done))
        groups = generate(prompts, **settings)
        assert (asked, progress) == ([Sampling(0.5, 7, top_k=5)], [(1, 3), (2, 3), (3, 3)])
        pairs = [(problem, response) for problem, group in zip(problems, groups, strict=True) for response in group]
        results = pool.score([(problem, ResponseText("", response.response_ids)) for problem, response in pairs])
        assert [result.reward for result in results] == [response.model_tokens for _, response in pairs]
        assert pool.take_figures([]) == {"environment/turns": 1.0, "environment/tokens": 0.0}
        samples: Any = FakeSamples(random.Random(4))
        with pool.stream(samples, lambda index: problems[index]) as stream:
            for index, prompt in enumerate(prompts):
                stream.submit(index, prompt, prompt_seed(3, index), 2)
            played = sorted(episodes.play(stream).items())
    assert [response.response_ids.tolist() for _, response in pairs] == [item.response_ids.tolist() for _, item in played]


@contextlib.contextmanager
def serving(key: str, port: int = 0, **changes: Any) -> Iterator[EnvironmentService]:
    service = EnvironmentService(EnvironmentConfig(**{**OWN, **changes}), host="127.0.0.1", port=port, key=key)
    thread = threading.Thread(target=service.serve)
    thread.start()
    try:
        yield service
    finally:
        service.stop()
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()


def test_episodes_on_servers_are_those_beside_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then one of the two goes: its episodes are begun again on the other; and then the other: the run cannot go on."""
    monkeypatch.setattr("tepo_megatron.tasks.environments.service._RETRY_INTERVAL_S", 2 * TIMEOUT_S)  # none comes back
    monkeypatch.setattr("tepo_megatron.tasks.environments.service._REOPEN_TIMEOUT_S", 0.0)
    key_file = tmp_path / "keys" / "environment"
    key = read_key(key_file, write=True)
    problems = [Problem(f"{what} {at}", "", what) for at in range(3) for what in ("fine", "raises", "dies", "ends at once")]
    with serving(key) as first, serving(key) as second:
        remote = {**OWN, "servers": [first.url, second.url], "key_file": str(key_file)}
        found = {}
        for name, environment in (("here", OWN), ("there", remote)):
            with opened(environment) as pool:
                pool.rehearse(problems)
                found[name] = play(pool, problems)
        assert list(found["here"]) == list(found["there"])
        for key_, (response, result) in found["here"].items():
            there, rated = found["there"][key_]
            assert (there.response_ids.tolist(), rated.reward) == (response.response_ids.tolist(), result.reward)
            assert str(rated.error)[:60] == str(result.error)[:60]

        with opened(remote) as pool:
            assert isinstance(pool.host, RemoteEnvironments)
            samples: Any = FakeSamples(random.Random(0))
            with pool.stream(samples, lambda at: problems[at]) as stream:
                for at in range(len(problems)):
                    stream.submit(at, PROMPT, 10 * at, 1)
                first._sessions.clear()  # it does not know the trainer any longer
                assert len(episodes.play(stream)) == len(problems)
            assert pool.take_figures([])["environment/restarts"] >= 1
            second._sessions.clear()
            with pool.stream(samples, lambda at: problems[at]) as stream:
                stream.submit(0, PROMPT, 0, 1)
                with pytest.raises(RuntimeError, match=r"no environment server is left: .*start them again"):
                    list(iter(lambda: stream.next(1.0), "never"))


def test_strangers_and_other_environments_are_refused(tmp_path: Path) -> None:
    key = read_key(tmp_path / "key", write=True)
    with serving(key) as service:
        with pytest.raises(ConnectionRefusedError):  # it listens on the address that it was given, not on all of this machine
            connect(service.url, "127.0.0.2")

        def post(path: str, **given: Any) -> httpx.Response:
            return httpx.post(f"{service.url}{path}", timeout=TIMEOUT_S, **given)

        for headers in ({}, {"Authorization": "Bearer no"}, {"Authorization": "Bearer " + key[:-1]}):
            assert post("/sessions", json={}, headers=headers).status_code == 401
        own = {"Authorization": f"Bearer {key}"}
        assert post("/sessions/none/calls", json=[], headers=own).status_code == 404
        assert post("/sessions", content=b"{", headers=own).status_code == 400
        wanted = {"name": OWN["name"], "adapter": "none", "kwargs": {}}
        session = post("/sessions", json={"environment": wanted}, headers=own).json()["session"]
        for calls in ([[1, ["run", "rm"]]], [["1", ["end"]]], {"a": 1}, [[1, ["step", "a"]]]):
            assert post(f"/sessions/{session}/calls", json=calls, headers=own).status_code == 400
        waits: list[Any] = ["x", None, [], -1, math.nan, math.inf, 10**400]
        for wait_s in waits:
            asked = json.dumps({"wait_s": wait_s})
            assert post(f"/sessions/{session}/answers", content=asked, headers=own).status_code == 400, wait_s
        assert post(f"/sessions/{session}/calls", json=[[1, ["step", "", "", ""]]], headers=own).is_success

        def refused(key_file: Path, **changes: Any) -> str:
            config = EnvironmentConfig(**{**OWN, "servers": (service.url,), "key_file": key_file, **changes})
            with pytest.raises(ValueError, match="environment") as caught:
                RemoteEnvironments(config)
            return str(caught.value)

        assert "this server runs" in refused(tmp_path / "key", kwargs={"broken": True})
        other = tmp_path / "other"
        assert read_key(other, write=True) != key
        assert "has another key than environment.key_file" in refused(other)
    with pytest.raises(RuntimeError, match="does not answer"):
        RemoteEnvironments(EnvironmentConfig(**{**OWN, "servers": (service.url,), "key_file": tmp_path / "key"}))


def test_a_key_is_its_owners_alone(tmp_path: Path) -> None:
    key = read_key(tmp_path / "key", write=True)
    assert read_key(tmp_path / "key") == key == read_key(tmp_path / "key", write=True)
    (tmp_path / "key").chmod(0o644)
    with pytest.raises(ValueError, match="can be read by others than you; chmod 600"):
        read_key(tmp_path / "key")
    with pytest.raises(ValueError, match="'tepo environment serve' writes it"):
        read_key(tmp_path / "none")
    with pytest.raises(ValueError, match=r"environment.key_file = .*/key/below cannot be written \(File exists\)"):
        read_key(tmp_path / "key" / "below", write=True)
    with ThreadPoolExecutor(8) as servers:  # that start together
        for number in range(50):
            barrier, path = threading.Barrier(8), tmp_path / str(number) / "key"
            keys = servers.map(lambda _: (barrier.wait(), read_key(path, write=True)), range(8))  # noqa: B023 read in this round
            assert (len({key for _, key in keys}), list(path.parent.iterdir())) == (1, [path])


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "key"
    read_key(path, write=True)
    return path


@pytest.fixture(scope="module")
def service(key_file: Path) -> Iterator[EnvironmentService]:
    with serving(key_file.read_text(), **GAME) as service:
        yield service


def begin(host: RemoteEnvironments, *metadata: str) -> dict[int, EpisodeAnswer]:
    for episode, context in enumerate(metadata):
        host.call(episode, ["reset", Problem("p", "", "3", {"context": context}).to_json(), 0, False])
    answers: dict[int, EpisodeAnswer] = {}
    while len(answers) < len(metadata):
        answers |= {answer.episode: answer for answer in host.poll(1.0)}
    for episode in answers:
        host.end(episode)
    return answers


def trainer(key_file: Path, *servers: str) -> contextlib.closing[RemoteEnvironments]:
    config = EnvironmentConfig.model_validate({**GAME, "servers": servers, "key_file": key_file})
    return contextlib.closing(RemoteEnvironments(config))


def play_an_episode(service: EnvironmentService, key_file: Path) -> None:
    with trainer(key_file, service.url) as host:
        answer = begin(host, "")[0]
    assert answer.error is answer.lost is None


def test_calls_beyond_the_longest_request_are_sent_in_pieces(
    service: EnvironmentService, key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tepo_megatron.tasks.environments.service._MAX_REQUEST_BYTES", 2**16)
    with trainer(key_file, service.url) as host:
        answers = begin(host, *["x" * 4000] * 40, "x" * 2**16, "x" * 60_000)
    assert not any(answer.lost for answer in answers.values())
    (failed,) = (answer for answer in answers.values() if answer.error is not None)
    assert failed.episode == 40
    assert re.fullmatch(r"a call of 65\d{3} bytes, and an environment server takes 65536; shorten the problem", failed.error)


def test_a_server_that_failed_is_asked_again(
    service: EnvironmentService, key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tepo_megatron.tasks.environments.service._RETRY_INTERVAL_S", 0.01)
    with trainer(key_file, service.url) as host:
        fails = {'404: {"error": "no such session"}': service._sessions.clear}  # as one that was started again
        fails['400: {"error": "neither calls nor a question for answers"}'] = lambda: host.call(0, ["no call"])
        for said, fail in fails.items():
            assert not begin(host, "")[0].lost
            fail()
            assert begin(host, "")[0].lost == f"{service.url} answered with status {said}"
        assert not begin(host, "")[0].lost
        assert eventually(lambda: len(service._sessions) == 1), "the old session is ended"


def test_a_server_that_is_not_there_yet_is_asked_again(
    service: EnvironmentService, key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tepo_megatron.tasks.environments.service._RETRY_INTERVAL_S", 0.01)
    with reserve_port("127.0.0.1") as reserved:
        port = reserved.getsockname()[1]
        with trainer(key_file, f"http://127.0.0.1:{port}", service.url) as host:
            assert f"http://127.0.0.1:{port} does not answer" in str(host.notice)
            assert not begin(host, "")[0].lost
            with serving(key_file.read_text(), port, **GAME) as late:
                assert eventually(lambda: not host.poll(0.0) and not host._servers[0].gone)
                assert not begin(host, "")[0].lost
                assert next(late._numbers) == 1  # it had the episode


def test_calls_of_an_ended_session_take_no_room() -> None:
    service = EnvironmentService(EnvironmentConfig.model_validate(GAME), host="127.0.0.1", port=0, key="")
    path = f"/sessions/{service.answer('POST', '/sessions', {'environment': service._described})[1]['session']}"
    for episode in range(2):
        call = ["reset", Problem("p", "", "3").to_json(), 0, False]
        assert service.answer("POST", f"{path}/calls", [[episode, call]]) == (200, {})
    service.answer("DELETE", path, None)
    for _ in range(2):
        service._work()
    service.stop()
    service.serve()
    assert not service._owners


def test_a_server_that_waits_for_calls_is_stopped_at_once(key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tepo_megatron.tasks.environments.service._IDLE_S", 2 * TIMEOUT_S)
    with serving(key_file.read_text(), **GAME) as service:
        play_an_episode(service, key_file)


def connect(url: str, host: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection((host, int(url.rpartition(":")[2])), timeout=TIMEOUT_S)


def test_the_key_comes_before_the_body_and_a_length_that_is_none_is_refused(
    service: EnvironmentService, key_file: Path
) -> None:
    key = key_file.read_text()
    cases = [(path, str(60 * 2**20), "", b"401") for path in ("/sessions", "/sessions/x/calls", "/")]
    cases += [("/sessions", length, key, b"413") for length in ("9" * 5000, "-1", "1_0", str(2**40), "x")]
    for path, length, sent, expected in cases:
        with connect(service.url) as client:
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {sent}\r\nContent-Length: {length}\r\n\r\n"
            client.sendall(head.encode())
            whole = b"".join(iter(lambda: client.recv(4096), b""))
            assert whole.split()[1] == expected, (path, length)
    play_an_episode(service, key_file)


@pytest.mark.parametrize("begun", [b"", b"POST /sess", b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\n1"])
def test_connections_without_a_key_do_not_add_up(begun: bytes, service: EnvironmentService, key_file: Path) -> None:
    """The oldest ones are closed, each has a thread until then; a trainer that comes later is served."""
    with contextlib.ExitStack() as stack:
        strangers = []
        for _ in range(300):
            strangers.append(stack.enter_context(connect(service.url)))
            strangers[-1].sendall(begun)
        assert strangers[0].recv(1) == b""
        play_an_episode(service, key_file)
        assert eventually(lambda: threading.active_count() < 150)


@pytest.mark.parametrize("begun", [b"P", b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\n1"])
def test_who_sends_a_byte_and_waits_is_hung_up_on(
    begun: bytes, service: EnvironmentService, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler: Any = service._http.RequestHandlerClass
    monkeypatch.setattr(handler, "timeout", handler.timeout and handler.timeout / 50)
    with connect(service.url) as client:
        client.sendall(begun)
        assert client.recv(1) == b""
