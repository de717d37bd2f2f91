"""The worker process of ``RewardPool``, which runs a verifier. It reads and writes JSON lines, and imports no torch.

Input: one object ``{"verifier", "path", "timeout_s"}``, then lists of ``[id, prompt, answer, response]``. Output:
``{"ready": true}`` or ``{"error": text}``, then for each item in order ``[reward, null]`` or ``[null, error]``. The process
ends when its input ends.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from io import FileIO
from queue import SimpleQueue
from threading import Thread
from typing import Any, BinaryIO, SupportsFloat

from tepo_megatron.reward.verifiers import Verifier, load_verifier
from tepo_megatron.types import Problem

_LONGEST_ERROR = 500


def main() -> None:
    """Scores what the parent sends, until the parent closes the pipe or dies."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # Slurm warns all processes of a step; the trainer acts on it
    requests, replies = _redirect_standard_streams()
    inbox: SimpleQueue[Any] = SimpleQueue()
    Thread(target=_read, args=(requests, inbox), daemon=True).start()
    setup = inbox.get()
    sys.path[:] = setup["path"]
    try:
        verifier = load_verifier(setup["verifier"])
    except ValueError as error:
        _reply(replies, {"error": str(error)})
        return
    _reply(replies, {"ready": True})
    while True:
        for problem_id, prompt, answer, response in inbox.get():
            _limit_processor_time(setup["timeout_s"])
            _reply(replies, _score(verifier, Problem(problem_id, prompt, answer), response))


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
    for line in requests:
        inbox.put(json.loads(line))
    os._exit(0)


def _limit_processor_time(timeout_s: float) -> None:
    """Has the kernel end a process whose verifier runs on after the parent died.

    ``_read`` cannot: a regular expression that backtracks holds the interpreter's lock, so that no other thread runs. The limit
    counts processor time of all threads, and is far above the one that the parent enforces.
    """
    signal.setitimer(signal.ITIMER_PROF, 60 + 10 * timeout_s)


def _score(verifier: Verifier, problem: Problem, response: str) -> list[Any]:
    try:
        value = verifier(problem, response)
        if not isinstance(value, SupportsFloat):
            return [None, f"the verifier returned {type(value).__name__}, not a number"]
        reward = float(value)
    # SystemExit too: a verifier that calls sys.exit() must not end the worker.
    except BaseException as error:
        return [None, f"the verifier raised {type(error).__name__}: {error}"[:_LONGEST_ERROR]]
    if not math.isfinite(reward):
        return [None, f"the verifier returned {reward}, not a finite number"]
    return [reward, None]


def _reply(replies: FileIO, value: Any) -> None:
    replies.write(json.dumps(value).encode() + b"\n")


if __name__ == "__main__":
    main()
