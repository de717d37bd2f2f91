"""A verifier that is an object of this process: its workers are forks, with the limits that all workers have."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tepo_megatron.config.reward import RewardConfig
from tepo_megatron.core.problem import Problem, ResponseText
from tepo_megatron.tasks.protocol import RewardResult
from tepo_megatron.tasks.reward.pool import RewardPool
from tests.support import odd_verifiers
from tests.support.programs import TIMEOUT_S

OPTIONS = {"verifier": "(python):mine", "timeout_s": 60.0, "memory_mb": 100, "file_mb": 1}


def scored(verifier: Any, *responses: str, **options: Any) -> list[RewardResult]:
    items = [(Problem("p", "q", "4"), ResponseText(response)) for response in responses]
    with RewardPool(RewardConfig.model_validate({**OPTIONS, **options}), custom=verifier) as pool:
        return pool.score(items, [0] * len(items))


def test_a_closure_scores_with_what_it_closes_over() -> None:
    table = {"a": 1.0, "b": 0.5}

    def mine(problem: Problem, response: str) -> float:
        return table[response] + float(problem.answer)

    assert [result.reward for result in scored(mine, "a", "b", workers=2)] == [5.0, 4.5]


class Ordered:
    """An object with a state, that scores groups."""

    def __init__(self) -> None:
        self.best = "b"

    def score_group(self, problem: Problem, responses: list[str]) -> list[dict[str, float]]:
        return [{"best": float(response == self.best), "group": len(responses)} for response in responses]


def test_an_object_scores_groups_and_a_coroutine_function_side_by_side() -> None:
    assert [result.parts for result in scored(Ordered(), "a", "b")] == [
        {"best": 0.0, "group": 2.0},
        {"best": 1.0, "group": 2.0},
    ]
    under_way = []

    async def mine(problem: Problem, response: str) -> float:
        under_way.append(response)
        while len(under_way) < 3:
            await asyncio.sleep(0.001)
        return len(under_way)

    assert [result.reward for result in scored(mine, "x", "y", "z")] == [3.0] * 3


def test_the_limits_are_those_of_every_worker(tries: Path) -> None:
    def mine(problem: Problem, response: ResponseText) -> Any:
        return odd_verifiers.judge(problem, response)

    messages = {
        "raise": "raised ValueError: invalid literal",
        "spin": "took longer than",
        "exit": "SystemExit",
        "die": "ended (signal 9)",
        "memory 1000000000": "more memory than",
        "file 10000000": "file_mb = 1",
    }
    *failed, printed, good = scored(mine, *messages, "print", "good", timeout_s=2.0)
    for result, message in zip(failed, messages.values(), strict=True):
        assert message in str(result.error)
    assert (printed.reward, good.reward) == (1.0, 1.0)
    assert __file__ in str(failed[0].error)


def test_a_fork_has_no_handler_and_no_pipe_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that ends when its pipe is closed must not be kept by a worker; Ctrl-C is for the parent."""
    read, write = os.pipe()
    monkeypatch.setattr("sys.stdout", None)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    busy = threading.Event()
    thread = threading.Thread(target=lambda: [sum(range(1000)) for _ in iter(busy.is_set, True)], daemon=True)
    thread.start()

    def mine(problem: Problem, response: str) -> float:
        print("there is a standard output")
        return float(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and os.getsid(0) == os.getpid())

    try:
        with RewardPool(RewardConfig.model_validate(OPTIONS), custom=mine) as pool:
            (result,) = pool.score([(Problem("p", "q", "a"), ResponseText("x"))])
            assert result.reward == 1.0, result.error
            os.close(write)
            assert os.read(read, 1) == b""  # the last end was ours
    finally:
        busy.set()
        signal.signal(signal.SIGTERM, before)
        os.close(read)


def test_workers_are_gone_and_waited_for_after_close() -> None:
    def mine(problem: Problem, response: str) -> float:
        return float(os.getpid())

    pids = {int(result.reward or 0) for result in scored(mine, *"abcdefgh", workers=2)}
    for pid in pids:
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                break
            assert time.monotonic() < deadline


def test_what_has_no_form_is_refused_by_its_name() -> None:
    with pytest.raises(ValueError, match=r"the verifier '\(python\):mine' has neither a method score nor score_group"):
        scored(4.0, "x")
