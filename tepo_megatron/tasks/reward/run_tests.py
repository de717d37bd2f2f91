"""Runs a program and its tests in a sandbox; needs only the standard library.

Input: a JSON object with ``key``, ``setup``, ``program``, ``tests``, ``may_hide``, ``all``. Output: ``KEY started``, then
``KEY n`` for each passed test n; with ``all`` it stops at the first failure.
"""

from __future__ import annotations

import builtins
import json
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

STARTED = "started"


def _main() -> None:
    """Exits with status 0, also if tests fail."""
    task = json.load(sys.stdin)
    key, replies = task.pop("key"), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)

    def say(what: str) -> None:
        os.write(replies, f"{key} {what}\n".encode())

    say(STARTED)
    try:
        _run(task, say)
    finally:
        os._exit(0)  # does not wait for the program's threads


def _run(task: dict[str, Any], say: Callable[[str], None]) -> None:
    module = ModuleType("solution")  # not __main__: the program's main part must not run
    sys.modules[module.__name__] = module
    for text in (task["setup"], task["program"]):
        exec(compile(text, "<program>", "exec", dont_inherit=True), module.__dict__)  # noqa: S102
    for number, test in enumerate(task["tests"]):
        names = {name: value for name, value in vars(module).items() if name in task["may_hide"] or not hasattr(builtins, name)}
        try:
            exec(compile(test, f"<test {number}>", "exec", dont_inherit=True), names)  # noqa: S102
        except BaseException:  # SystemExit too
            if task["all"]:
                return
        else:
            say(str(number))


if __name__ == "__main__":
    _main()
