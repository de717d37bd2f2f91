"""The worker process of ``RewardPool``, which runs a verifier. It reads and writes JSON lines, and imports no torch.

Input: one object ``{"verifier", "path", "timeout_s", "memory_mb", "file_mb", "network"}``, then lists of
``[id, prompt, answer, response]``. Output: ``{"ready": true, "notice": text or null}`` or ``{"error": text}``, then for each
item in order ``[reward, null, last]`` or ``[null, error, last]``; ``last`` says that the process has grown too large for
another one, and ends. The process ends when its input ends, and whatever it has started with it.
"""

from __future__ import annotations

import gc
import json
import math
import os
import signal
import sys
from collections.abc import Mapping
from io import FileIO
from queue import SimpleQueue
from threading import Thread
from typing import Any, BinaryIO, SupportsFloat

from tepo_megatron.reward.failure import NO_MEMORY, why_it_raised
from tepo_megatron.reward.limits import (
    data_bytes,
    has_a_free_file,
    leave_network,
    limit_file_size,
    limit_memory,
    limit_process,
)
from tepo_megatron.reward.verifiers import Verifier, load_verifier
from tepo_megatron.types import Problem

_GROWTH = 0.25
"""The part of its memory that a worker may keep from one response to the next."""


def main() -> None:
    """Scores what the parent sends, until the parent closes the pipe or dies."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # Slurm warns all processes of a step; the trainer acts on it
    try:
        _serve()
    except MemoryError:
        os._exit(NO_MEMORY)


def _serve() -> None:
    requests, replies = _redirect_standard_streams()
    line = requests.readline()
    if not line:
        return
    setup = json.loads(line)
    # Before there is a second thread: the kernel moves only one at a time.
    network = None if setup["network"] else leave_network()
    limit_process()
    inbox: SimpleQueue[Any] = SimpleQueue()
    Thread(target=_read, args=(requests, inbox), daemon=True).start()
    sys.path[:] = setup["path"]
    try:
        verifier = load_verifier(setup["verifier"])
    except ValueError as error:
        _reply(replies, {"error": str(error)})
        return
    loaded = limit_memory(setup["memory_mb"])
    _reply(replies, {"ready": True, "notice": network and f"verifiers keep their network: {network}"})
    while True:
        for problem_id, prompt, answer, response in inbox.get():
            _limit_processor_time(setup["timeout_s"])
            limit_file_size(setup["file_mb"])
            reward, why = _score(verifier, Problem(problem_id, prompt, answer), response, setup)
            last = _has_grown(loaded, setup["memory_mb"]) or not has_a_free_file()
            _reply(replies, [reward, why, last])
            if last:
                return


def _redirect_standard_streams() -> tuple[BinaryIO, FileIO]:
    """Returns the pipes to the parent. A verifier has them no longer: it prints to stderr, and reads an empty input."""
    requests = os.fdopen(os.dup(0), "rb")
    replies = FileIO(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, replies


def _read(requests: BinaryIO, inbox: SimpleQueue[Any]) -> None:
    """Reads requests in a thread of its own, so that the end of the input ends the process also while a verifier runs."""
    try:
        for line in requests:
            inbox.put(json.loads(line))
    except MemoryError:
        os._exit(NO_MEMORY)
    if os.getpgrp() == os.getpid():  # what the verifier has started ends too
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(0)


def _limit_processor_time(timeout_s: float) -> None:
    """Has the kernel end a process whose verifier runs on after the parent died.

    ``_read`` cannot: a regular expression that backtracks holds the interpreter's lock, so that no other thread runs. The limit
    counts processor time of all threads, and is far above the one that the parent enforces.
    """
    signal.setitimer(signal.ITIMER_PROF, 60 + 10 * timeout_s)


def _score(verifier: Verifier, problem: Problem, response: str, setup: Mapping[str, Any]) -> tuple[float | None, str | None]:
    try:
        value = verifier(problem, response)
        if not isinstance(value, SupportsFloat):
            return None, f"the verifier returned {type(value).__name__}, not a number"
        reward = float(value)
    # SystemExit too: a verifier that calls sys.exit() must not end the worker.
    except BaseException as error:
        return None, why_it_raised(error, verifier, setup)
    if not math.isfinite(reward):
        return None, f"the verifier returned {reward}, not a finite number"
    return reward, None


def _has_grown(loaded: int, memory_mb: int) -> bool:
    """Whether the process keeps so much that a response would find less memory than another one before it."""
    most = loaded + int(_GROWTH * memory_mb * 10**6)
    if data_bytes() <= most:
        return False
    gc.collect()
    return data_bytes() > most


def _reply(replies: FileIO, value: Any) -> None:
    remaining = memoryview(json.dumps(value).encode() + b"\n")
    while remaining:
        remaining = remaining[replies.write(remaining) :]


if __name__ == "__main__":
    main()
