"""The worker process of ``RewardPool``, which runs a verifier. It reads and writes JSON lines, and imports no torch.

Input: one object with the fields of :data:`SETUP`, then lists of calls ``[number, problem, responses]``, a problem
``[id, prompt, answer, metadata, messages, source]``, each response ``[text, packed ids in base 64, finish reason]``. Output:
``{"ready": true, "notice": text or null, "of_groups": …, "concurrent": …}`` or ``{"error": text}``, then for each call
``[number, outcomes, seconds, last]``, each outcome ``[reward or components, null]`` or ``[null, error]``; ``last`` says that
the process has grown too large for another one, and ends. Calls are answered in their order unless the verifier is ``async``.
The process ends when its input ends, and whatever it has started with it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from queue import SimpleQueue
from threading import Thread
from typing import Any

from tepo_megatron.core.problem import Problem, ResponseText
from tepo_megatron.runtime.workers.child import has_grown, limit_processor_time, read_lines, redirect_standard_streams, reply
from tepo_megatron.runtime.workers.failure import NO_MEMORY
from tepo_megatron.runtime.workers.limits import (
    forget_memory_file,
    has_a_free_file,
    leave_network,
    limit_file_size,
    limit_memory,
    limit_process,
)
from tepo_megatron.tasks.reward.calls import Outcome, Verifier, make_verifier

SETUP = ("kwargs", "timeout_s", "memory_mb", "file_mb", "run_code")
"""Fields of ``reward`` that a worker is told, beside ``verifier``, ``network`` and ``path``, where modules are looked for."""


def main() -> None:
    """Scores what the parent sends, until the parent closes the pipe or dies."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # Slurm warns all processes of a step; the trainer acts on it
    try:
        _serve()
    except MemoryError:
        os._exit(NO_MEMORY)


def serve_in_fork(given: Any) -> None:
    """As :func:`main`, in a fork of the process whose verifier is ``given``."""
    forget_memory_file()
    try:
        _serve(given)
    except MemoryError:
        os._exit(NO_MEMORY)


def _serve(given: Any = None) -> None:
    requests, replies = redirect_standard_streams()
    line = requests.readline()
    if not line:
        return
    setup = json.loads(line)
    # Before there is a second thread: the kernel moves only one at a time.
    network = None if setup["network"] else leave_network()
    limit_process()
    inbox: SimpleQueue[Any] = SimpleQueue()
    Thread(target=read_lines, args=(requests, inbox), daemon=True).start()
    sys.path[:] = setup["path"]
    try:
        verifier = make_verifier(setup["verifier"], setup["kwargs"], setup, given)
    except ValueError as error:
        reply(replies, {"error": str(error)})
        return
    loaded = limit_memory(setup["memory_mb"])
    notice = network and f"verifiers keep their network: {network}"
    ready = {"ready": True, "notice": notice, "of_groups": verifier.of_groups, "concurrent": verifier.concurrent}
    reply(replies, ready)
    served = _Served(verifier, setup, replies, loaded)
    if verifier.concurrent:
        asyncio.run(_serve_concurrently(served, inbox))
        return
    while True:
        for call in inbox.get():
            served.begin()
            number, problem, responses = _read_call(call)
            started = time.monotonic()
            if served.reply(number, verifier.score(problem, responses), time.monotonic() - started):
                return


async def _serve_concurrently(served: _Served, inbox: SimpleQueue[Any]) -> None:
    """Starts each call as it comes; the parent bounds how many are under way."""
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

    def hand_over() -> None:
        while True:
            loop.call_soon_threadsafe(begin, inbox.get())

    Thread(target=hand_over, daemon=True).start()
    await ended
    os._exit(0)  # what is still under way is given to another worker


@dataclass(frozen=True)
class _Served:
    """A verifier under its limits, and the pipe for its rewards. ``loaded``: its memory before its first call, in bytes."""

    verifier: Verifier
    setup: Mapping[str, Any]
    replies: FileIO
    loaded: int

    def begin(self) -> None:
        """Before a call."""
        limit_processor_time(self.setup["timeout_s"])
        limit_file_size(self.setup["file_mb"])

    def reply(self, number: int, outcomes: Sequence[Outcome], seconds: float) -> bool:
        """After a call; whether the process has grown too large for another one."""
        last = has_grown(self.loaded, self.setup["memory_mb"]) or not has_a_free_file()
        reply(self.replies, [number, outcomes, seconds, last])
        return last


def _read_call(call: Any) -> tuple[int, Problem, list[ResponseText]]:
    number, (name, prompt, answer, metadata, messages, source), responses = call
    problem = Problem(name, prompt, answer, metadata, tuple((role, content) for role, content in messages), source)
    return number, problem, [ResponseText.unpack(text, b64decode(ids), why) for text, ids, why in responses]


if __name__ == "__main__":
    main()
