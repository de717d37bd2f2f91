"""The worker process of ``EnvironmentWorkers``, which runs episodes. It reads and writes JSON lines, and imports no torch.

Input: one object with the fields of :data:`SETUP`, then lists of ``[call's number, episode's number, call]`` (``calls``).
Output: ``{"ready": true, "notice": text or null, "concurrent": …}`` or ``{"error": text}``, then for each call
``[call's number, answer, seconds, last]``; ``last`` says that the process has grown too large, holds no episode, and ends.
Calls are answered in their order unless the environment is ``async``.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import FileIO
from queue import SimpleQueue
from threading import Thread
from typing import Any

from tepo_megatron.runtime.workers.child import has_grown, limit_processor_time, read_lines, redirect_standard_streams, reply
from tepo_megatron.runtime.workers.failure import NO_MEMORY
from tepo_megatron.runtime.workers.limits import (
    OPEN_FILES,
    has_a_free_file,
    leave_network,
    limit_file_size,
    limit_memory,
    limit_process,
)
from tepo_megatron.tasks.environments.calls import Desk

SETUP = ("name", "adapter", "kwargs", "timeout_s", "memory_mb", "file_mb", "run_code")
"""Fields of ``environment`` that a worker is told, beside ``concurrency``, ``network``, ``agent`` (``agent_setup``'s, or null)
and ``path``, where modules are looked for."""

_FILES_OF_AGENT = 8
"""Files and sockets that an agent's episode may take: its side of a connection, the address's, and an event loop of its own."""


def main() -> None:
    """Answers what the parent asks, until the parent closes the pipe or dies."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # Slurm warns all processes of a step; the trainer acts on it
    try:
        _serve()
    except MemoryError:
        os._exit(NO_MEMORY)


def _serve() -> None:
    requests, replies = redirect_standard_streams()
    line = requests.readline()
    if not line:
        return
    setup = {**json.loads(line), "what": "environment", "section": "environment"}
    # Before there is a second thread: the kernel moves only one at a time.
    network = None if setup["network"] else leave_network()
    limit_process(OPEN_FILES + (_FILES_OF_AGENT * setup["concurrency"] if setup["agent"] else 0))
    inbox: SimpleQueue[Any] = SimpleQueue()
    Thread(target=read_lines, args=(requests, inbox), daemon=True).start()
    sys.path[:] = setup["path"]
    try:
        desk = Desk(setup)
    except ValueError as error:
        reply(replies, {"error": str(error)})
        return
    notice = network and f"environments keep their network: {network}"
    served = _Served(desk, setup, replies, limit_memory(setup["memory_mb"]))
    reply(replies, {"ready": True, "notice": notice, "concurrent": desk.concurrent})
    asyncio.run(_answer_all(served, inbox) if desk.concurrent else _answer_in_turn(served, inbox))


@dataclass
class _Served:
    """The desk under its limits, and the pipe for its answers. ``loaded``: its memory before its first call, in bytes."""

    desk: Desk
    setup: Mapping[str, Any]
    replies: FileIO
    loaded: int
    ended: bool = False
    running: set[asyncio.Task[None]] = field(default_factory=set)

    async def answer(self, number: int, episode: int, call: list[Any]) -> None:
        limit_processor_time(self.setup["timeout_s"])
        limit_file_size(self.setup["file_mb"])
        started = time.monotonic()
        answer = await self.desk.answer(episode, call)
        if not self.ended:
            grown = has_grown(self.loaded, self.setup["memory_mb"]) or not has_a_free_file() or self.desk.worn
            self.ended = grown and not self.desk
            reply(self.replies, [number, answer, time.monotonic() - started, self.ended])


async def _answer_in_turn(served: _Served, inbox: SimpleQueue[Any]) -> None:
    while not served.ended:
        for call in inbox.get():
            await served.answer(*call)


async def _answer_all(served: _Served, inbox: SimpleQueue[Any]) -> None:
    """Begins each call as it comes; the parent bounds how many episodes there are."""
    loop = asyncio.get_running_loop()

    def begin(calls: list[Any]) -> None:
        for call in calls:
            task = loop.create_task(served.answer(*call))
            served.running.add(task)
            task.add_done_callback(served.running.discard)

    def hand_over() -> None:
        while True:
            loop.call_soon_threadsafe(begin, inbox.get())

    Thread(target=hand_over, daemon=True).start()
    while not served.ended:
        await asyncio.sleep(1.0)
    os._exit(0)


if __name__ == "__main__":
    main()
