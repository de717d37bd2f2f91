"""The judge behind an address, asked over HTTP, against a small server that answers as it is told."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tepo_megatron.config.reward import RewardConfig
from tepo_megatron.core.problem import Problem, ResponseText
from tepo_megatron.tasks.reward.judge import Judge, JudgeError
from tepo_megatron.tasks.reward.pool import RewardPool
from tests.support.programs import TIMEOUT_S

KEY = "sk-very-secret"


class JudgeServer(ThreadingHTTPServer):
    """Grades as the response in the question says: ``right``, ``wrong``, a status, or something that is no grade."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.asked: Counter[str] = Counter()
        self.requests: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Answer(BaseHTTPRequestHandler):
    server: JudgeServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = body["messages"][0]["content"].rpartition("|")[2]
        server = self.server
        server.asked[question] += 1
        server.requests.append(body)
        server.keys.add(self.headers["Authorization"])
        if question == "silent":
            threading.Event().wait(TIMEOUT_S)
        status = 200
        if question == "busy once" and server.asked[question] == 1:
            status = 429
        elif question.startswith("status"):
            status = int(question.split()[1])
        said = {"right": "yes. Score: 0 … no, Score: 1", "half": "Score: 0.5", "busy once": "Score: 1"}.get(
            question, "I like it"
        )
        reply = {"choices": [{"message": {"role": "assistant", "content": said}}]}
        text = json.dumps(reply) if status == 200 else f"wrong: {self.headers['Authorization']}"
        if question == "no json":
            text = "<html>"
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.send_header("Retry-After", "0.01")
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[JudgeServer]:
    with JudgeServer() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def kwargs(server: JudgeServer, **others: object) -> dict[str, object]:
    prompt = "is {answer} to {prompt} in {{braces}} |{response}"
    return {"base_url": server.base_url, "model": "m", "prompt": prompt, "retries": 2, **others}


def test_scores_come_from_the_judge_and_outages_are_failures(server: JudgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    made = kwargs(server, api_key_env="JUDGE_KEY", body={"top_p": 0.5})
    expected = {
        "right": 1.0,
        "half": 0.5,
        "busy once": 1.0,
        "right {answer}": "reply has no score",
        "no grade": "the judge's reply has no score",
        "no json": "no chat completion: <html>",
        "status 503": "status 503: wrong: Bearer ***",
        "status 401": "status 401: wrong: Bearer ***",
    }
    config = RewardConfig.model_validate({"verifier": "judge", "kwargs": made, "timeout_s": 60.0})
    with RewardPool(config) as pool:
        results = pool.score([(Problem("p", "q", "a"), response) for response in expected])
        for result, wanted in zip(results, expected.values(), strict=True):
            if isinstance(wanted, str):
                assert result.reward is None
                assert wanted in str(result.error)
                assert KEY not in str(result.error)
            else:
                assert (result.reward, result.error) == (wanted, None)
        # What was answered is not asked again, what failed is.
        pool.score([(Problem("p", "q", "a"), response) for response in ("right", "half", "no grade", "status 401")])
    assert server.asked["right"] == server.asked["half"] == 1
    assert server.asked["no grade"] == 2
    assert server.asked["status 503"] == 3
    assert server.asked["status 401"] == 2
    assert server.asked["busy once"] == 2
    assert server.keys == {f"Bearer {KEY}"}
    assert server.requests[0]["model"] == "m"
    assert server.requests[0]["top_p"] == 0.5
    assert "is a to q in {{braces}} |right {answer}" in {body["messages"][0]["content"] for body in server.requests}


def test_nobody_at_the_address_is_a_failure_before_the_run(server: JudgeServer) -> None:
    made = {"base_url": "http://127.0.0.1:9/v1", "model": "m", "retries": 1}
    config = RewardConfig.model_validate({"verifier": "judge", "kwargs": made})
    with RewardPool(config) as pool, pytest.raises(ValueError, match=r"cannot score .*127\.0\.0\.1:9/v1.* gave no reply: Conn"):
        pool.rehearse([Problem("p", "q", "a")])


def test_a_judge_that_is_silent_fails_in_time(server: JudgeServer) -> None:
    """The limit of a try, then the limit of the response, which says what the last try met."""
    problem, silent = Problem("p", "q", "a"), ResponseText("silent")

    async def ask(judge: Judge, tries: int) -> None:
        """The response's time is over when so many tries have come to the server."""
        before = server.asked["silent"]

        async def end() -> None:
            while server.asked["silent"] < before + tries:
                await asyncio.sleep(0.01)
            limit.reschedule(asyncio.get_running_loop().time())

        async with asyncio.timeout(None) as limit:
            ending = asyncio.create_task(end())
            try:
                await judge.score(problem, silent)
            finally:
                ending.cancel()

    quick = Judge(**kwargs(server, timeout_s=1.0, retries=0))  # type: ignore[arg-type]
    with pytest.raises(JudgeError, match="gave no reply: ReadTimeout"):
        asyncio.run(quick.score(problem, silent))
    patient = Judge(**kwargs(server, timeout_s=1.0, retries=100))  # type: ignore[arg-type]
    with pytest.raises(JudgeError, match=r"gave no reply in reward\.timeout_s; its last: ReadTimeout"):
        asyncio.run(ask(patient, 2))
    slow = Judge(**kwargs(server, timeout_s=TIMEOUT_S))  # type: ignore[arg-type]
    with pytest.raises(TimeoutError):
        asyncio.run(ask(slow, 1))


def test_the_memory_of_replies_is_bounded(server: JudgeServer) -> None:
    judge = Judge(**kwargs(server, cache=2))  # type: ignore[arg-type]

    async def ask_all() -> None:
        for question in ("|1", "|2", "|1", "|3", "|1", "|2"):
            await judge.ask(question)

    before = server.asked.copy()
    asyncio.run(ask_all())
    assert {question: server.asked[question] - before[question] for question in "123"} == {"1": 1, "2": 2, "3": 1}


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"base_url": "localhost:8000", "model": "m"}, "is no address"),
        ({"base_url": "http://me:pass@host/v1", "model": "m"}, "holds a user or a password"),
        ({"base_url": "http://host/v1", "model": "m", "api_key_env": "NOT_SET_ANYWHERE"}, "NOT_SET_ANYWHERE, which is not set"),
        ({"base_url": "http://host/v1", "model": "m", "pattern": "("}, "missing \\), unterminated subpattern"),
    ],
)
def test_what_cannot_be_asked_is_refused(made: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        RewardPool(RewardConfig.model_validate({"verifier": "judge", "kwargs": made}))
    assert "pass@" not in str(caught.value)
