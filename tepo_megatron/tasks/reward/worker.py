"""The worker process of ``RewardPool``, which reads and writes JSON lines and imports no torch.

Input: the fields of :data:`SETUP`, then lists of calls ``[number, problem, responses]`` with problems ``[id, prompt, answer,
metadata, messages, source]`` and responses ``[text, packed ids in base 64, finish reason]``. Output: ``{"ready": true,
"notice": …, "of_groups": …, "concurrent": …}`` or ``{"error": text}``, then ``[number, outcomes, seconds, last]`` with
outcomes ``[reward or components, null]`` or ``[null, error]``. ``last``: the process ends. Answers are in order unless the
verifier is ``async``.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import signal
import sys
import time
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from io import FileIO
from queue import SimpleQueue
from threading import Thread
from typing import Any, SupportsFloat

from tepo_megatron.core.problem import Problem, ResponseText, is_reward, not_a_reward
from tepo_megatron.runtime.worker_child import (
    NO_MEMORY,
    OPEN_FILES,
    forget_memory_file,
    has_a_free_file,
    has_grown,
    leave_network,
    limit_file_size,
    limit_memory,
    limit_process,
    limit_processor_time,
    place_of,
    read_lines,
    redirect_standard_streams,
    reply,
    why_it_raised,
)
from tepo_megatron.tasks.reward.verifiers import load_verifier

SETUP = ("kwargs", "timeout_s", "memory_mb", "file_mb", "run_code")  # with verifier, network and path


@dataclass(frozen=True)
class WorkerChannel:
    """``network``: why the process keeps its network although the setup forbids it."""

    setup: Mapping[str, Any]
    replies: FileIO
    inbox: SimpleQueue[Any]
    network: str | None

    def feed(self, begin: Callable[[Sequence[Any]], None]) -> None:
        loop = asyncio.get_running_loop()

        def hand_over() -> None:
            while True:
                loop.call_soon_threadsafe(begin, self.inbox.get())

        Thread(target=hand_over, daemon=True).start()


def open_channel(open_files: Callable[[Mapping[str, Any]], int] = lambda setup: OPEN_FILES) -> WorkerChannel | None:
    """Limits this process; None if the parent closed the pipe."""
    requests, replies = redirect_standard_streams()
    line = requests.readline()
    if not line:
        return None
    setup = json.loads(line)
    # Before a second thread starts: the kernel moves only one at a time.
    network = None if setup["network"] else leave_network()
    limit_process(open_files(setup))
    inbox: SimpleQueue[Any] = SimpleQueue()
    Thread(target=read_lines, args=(requests, inbox), daemon=True).start()
    sys.path[:] = setup["path"]
    return WorkerChannel(setup, replies, inbox, network)


def run_worker(serve: Callable[[], None]) -> None:
    """The exit status tells whether memory was the cause."""
    try:
        serve()
    except MemoryError:
        os._exit(NO_MEMORY)


def main() -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # Slurm warns all processes of a step; the trainer acts on it
    run_worker(_serve)


def serve_in_fork(custom: Any) -> None:
    forget_memory_file()
    run_worker(partial(_serve, custom))


def _serve(custom: Any = None) -> None:
    channel = open_channel()
    if channel is None:
        return
    setup, replies = channel.setup, channel.replies
    try:
        verifier = _make_verifier(setup["verifier"], setup["kwargs"], setup, custom)
    except ValueError as error:
        reply(replies, {"error": str(error)})
        return
    loaded = limit_memory(setup["memory_mb"])
    notice = channel.network and f"verifiers keep their network: {channel.network}"
    ready = {"ready": True, "notice": notice, "of_groups": verifier.of_groups, "concurrent": verifier.concurrent}
    reply(replies, ready)
    served = _Served(verifier, setup, replies, loaded)
    if verifier.concurrent:
        asyncio.run(_serve_concurrently(served, channel))
        return
    while True:
        for call in channel.inbox.get():
            served.begin()
            number, problem, responses = _read_call(call)
            started = time.monotonic()
            if served.reply(number, verifier.score(problem, responses), time.monotonic() - started):
                return


async def _serve_concurrently(served: _Served, channel: WorkerChannel) -> None:
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    running: set[asyncio.Task[None]] = set()

    async def answer(call: Any) -> None:
        number, problem, responses = _read_call(call)
        started = time.monotonic()
        outcomes = await served.verifier.score_concurrently(problem, responses)
        if not ended.done() and served.reply(number, outcomes, time.monotonic() - started):
            ended.set_result(None)

    def begin(calls: Sequence[Any]) -> None:
        served.begin()
        for call in calls:
            task = loop.create_task(answer(call))
            running.add(task)
            task.add_done_callback(running.discard)

    channel.feed(begin)
    await ended
    os._exit(0)  # another worker receives the open calls


@dataclass(frozen=True)
class _Served:
    """``loaded``: bytes before the first call."""

    verifier: _Verifier
    setup: Mapping[str, Any]
    replies: FileIO
    loaded: int

    def begin(self) -> None:
        limit_processor_time(self.setup["timeout_s"])
        limit_file_size(self.setup["file_mb"])

    def reply(self, number: int, outcomes: Sequence[ScoreOutcome], seconds: float) -> bool:
        """Returns whether the process must end."""
        last = has_grown(self.loaded, self.setup["memory_mb"]) or not has_a_free_file()
        reply(self.replies, [number, outcomes, seconds, last])
        return last


def _read_call(call: Any) -> tuple[int, Problem, list[ResponseText]]:
    number, (name, prompt, answer, metadata, messages, source), responses = call
    problem = Problem(name, prompt, answer, metadata, tuple((role, content) for role, content in messages), source)
    return number, problem, [ResponseText.unpack(text, b64decode(ids), why) for text, ids, why in responses]


Value = float | dict[str, float]
ScoreOutcome = tuple[Value | None, str | None]  # the value, or the reason for its absence


@dataclass(frozen=True)
class _Verifier:
    function: Callable[..., Any]
    of_groups: bool
    setup: Mapping[str, Any]

    @property
    def concurrent(self) -> bool:
        return inspect.iscoroutinefunction(self.function)

    def score(self, problem: Problem, responses: Sequence[ResponseText]) -> list[ScoreOutcome]:
        try:
            return self._check(self.function(problem, self._argument(responses)), len(responses))
        # SystemExit too: a verifier that calls sys.exit() must not end the worker.
        except BaseException as error:
            return self._failed(why_it_raised(error, self.function, self.setup), len(responses))

    async def score_concurrently(self, problem: Problem, responses: Sequence[ResponseText]) -> list[ScoreOutcome]:
        timeout_s = self.setup["timeout_s"]
        try:
            async with asyncio.timeout(timeout_s) as limit:
                value = await self.function(problem, self._argument(responses))
            return self._check(value, len(responses))
        except BaseException as error:
            late = isinstance(error, TimeoutError) and limit.expired()
            why = took_too_long(timeout_s) if late else why_it_raised(error, self.function, self.setup)
            return self._failed(why, len(responses))

    def _argument(self, responses: Sequence[ResponseText]) -> Any:
        return list(responses) if self.of_groups else responses[0]

    def _failed(self, why: str, count: int) -> list[ScoreOutcome]:
        return [(None, why)] * count

    def _check(self, value: Any, count: int) -> list[ScoreOutcome]:
        if not self.of_groups:
            return [self._placed(check_value(value))]
        if isinstance(value, str | Mapping) or not hasattr(value, "__len__") or not hasattr(value, "__iter__"):
            return self._failed(f"the verifier's score_group returned {type(value).__name__}, not a list of rewards", count)
        if len(value) != count:
            what = f"{len(value)} rewards for a group of {count} responses"
            return self._failed(f"the verifier's score_group returned {what}{place_of(self.function)}", count)
        return [self._placed(check_value(item)) for item in value]

    def _placed(self, outcome: ScoreOutcome) -> ScoreOutcome:
        value, why = outcome
        return outcome if why is None else (value, f"{why}{place_of(self.function)}")


def _make_verifier(name: str, kwargs: Mapping[str, Any], setup: Mapping[str, Any], custom: Any = None) -> _Verifier:
    verifier = load_verifier(name) if custom is None else custom
    if getattr(verifier, "runs_code", False) and not setup["run_code"]:
        raise ValueError(
            f"the verifier {name!r} runs programs that the model writes; set reward.run_code = true if you mean it"
        )
    if inspect.isclass(verifier):
        try:
            verifier = verifier(**kwargs)
        except Exception as error:
            why = why_it_raised(error, verifier.__init__, setup).removeprefix("the verifier ")
            arguments = f"reward.kwargs {', '.join(kwargs)}" if kwargs else "no reward.kwargs"  # values may be private
            raise ValueError(f"the verifier {name!r} cannot be made with {arguments}: it {why}") from error
    elif kwargs:
        raise ValueError(f"reward.kwargs is for a verifier that is a class, and {name!r} is none; leave it out")
    if hasattr(verifier, "score_group"):
        return _Verifier(verifier.score_group, of_groups=True, setup=setup)
    if hasattr(verifier, "score"):
        return _Verifier(verifier.score, of_groups=False, setup=setup)
    if not callable(verifier) or inspect.isclass(verifier):
        raise ValueError(f"the verifier {name!r} has neither a method score nor score_group, and cannot be called itself")
    if not hasattr(verifier, "__code__") and inspect.iscoroutinefunction(getattr(verifier, "__call__", None)):  # noqa: B004
        verifier = verifier.__call__
    return _Verifier(verifier, of_groups=getattr(verifier, "__name__", "") == "score_group", setup=setup)


def took_too_long(timeout_s: float) -> str:
    return f"the verifier took longer than reward.timeout_s = {timeout_s:g} s"


def check_value(value: Any, *, what: str = "verifier") -> ScoreOutcome:
    """``what``: the source in messages."""
    if not isinstance(value, Mapping):
        number, fault = _number(value)
        return number, fault and f"the {what} returned {fault}"
    if not value:
        return None, f"the {what} returned no component"
    parts: dict[str, float] = {}
    for name, component in value.items():
        number, fault = _number(component)
        if number is None:
            return None, f"the {what} returned for its component {str(name)[:60]!r} {fault}"
        parts[str(name)] = number
    return parts, None


def _number(value: Any) -> tuple[float | None, str | None]:
    if not isinstance(value, SupportsFloat):
        return None, f"{type(value).__name__}, not a number"
    try:
        number = float(value)
    except Exception as error:  # here, so that it fails one response of a group
        return None, f"{type(value).__name__}, whose number cannot be taken ({type(error).__name__})"
    return (number, None) if is_reward(number) else (None, not_a_reward(number))


if __name__ == "__main__":
    main()
