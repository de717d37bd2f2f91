"""Python programs that a model wrote, scored by the problem's tests in a sandbox."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tepo_megatron.core.problem import Problem, ResponseText
from tepo_megatron.runtime.workers.sandbox import Sandbox, require_no_network
from tepo_megatron.tasks.reward import run_tests

_FENCED = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.S | re.M)
_FENCE = re.compile(r"^[ \t]*```(.*)$", re.M)
_DEFINED = re.compile(r"^(?:async\s+)?(?:def|class)\s+(\w+)", re.M)
_LINE_BYTES = 100


class PythonTests:
    """Scores a program by the problem's tests: 1 if it passes all of them, else 0. ``partial``: the share that it passes.

    The problem has, beside ``prompt`` and ``answer``:

    - ``tests``: a list of Python texts, each of which raises where it fails, such as ``assert double(2) == 4``;
    - ``setup``, or not: what is run before the program, such as imports;
    - ``entry_point``, or not: the function that the program must define;
    - ``stub``, or not: the text that a response without that function continues, up to its first line that is not indented.

    The program is the last block of code in the response that defines the function, or the whole response where it has no
    block; what a model thinks before ``</think>`` is left out. A program's own ``abs`` does not stand in for Python's in the
    tests, unless the answer defines one too. Each program runs in a process of its own with the standard library alone, for
    ``seconds`` of the clock and of processor time, which should be fewer than ``reward.timeout_s``, and with ``memory_mb``. A
    program that ends early, or passes a limit, has not passed the tests that are left. Needs ``reward.run_code``, and a kernel
    that takes the network away from the worker; made elsewhere it raises RuntimeError.
    """

    runs_code = True

    def __init__(self, seconds: float = 5.0, memory_mb: int = 256, partial: bool = False) -> None:
        require_no_network()
        self._sandbox, self._partial = Sandbox(seconds, memory_mb), partial

    async def score(self, problem: Problem, response: ResponseText) -> float:
        """Raises ValueError where the problem has no tests, RuntimeError where the sandbox does not start."""
        tests = problem.metadata.get("tests")
        if not isinstance(tests, list) or not tests or not all(isinstance(each, str) for each in tests):
            raise ValueError('the problem has no tests; give it "tests": ["assert f(1) == 2", …] beside prompt and answer')
        key = secrets.token_hex(16)
        task = {
            "key": key,
            "setup": problem.metadata.get("setup") or "",
            "program": program_in(response, problem),
            "tests": tests,
            "may_hide": _DEFINED.findall(problem.answer),
            "all": not self._partial,
        }
        ran = await self._sandbox.run(
            (str(Path(run_tests.__file__)),), given=json.dumps(task).encode(), kept=_LINE_BYTES * (len(tests) + 1)
        )
        said = _said(ran.head, key)
        if run_tests.BEGUN not in said:
            why = ran.limit or ran.tail.decode("utf-8", "replace").strip()[-200:] or f"it ended with {ran.status}"
            raise RuntimeError(f"the sandbox did not start: {why}")
        passed = sum(f"{number}" in said for number in range(len(tests)))
        return passed / len(tests) if self._partial else float(passed == len(tests))


def program_in(response: str, problem: Problem) -> str:
    """The program that a response gives to a problem."""
    text = response.rpartition("</think>")[2]
    entry_point, stub = problem.metadata.get("entry_point"), problem.metadata.get("stub")
    first = _FENCE.search(text)
    if first is not None and not first[1].strip() and _defines(text[: first.start()], entry_point):
        return text[: first.start()]  # the prompt opened the block, and here it ends
    blocks = [match[1] for match in _FENCED.finditer(text)] or [text]
    defining = [block for block in blocks if _defines(block, entry_point)]
    if defining:
        return defining[-1]
    return f"{stub}{_indented(blocks[-1])}" if stub else blocks[-1]


def _defines(program: str, name: Any) -> bool:
    if name is None:
        return _DEFINED.search(program) is not None
    return re.search(rf"^(?:async\s+)?(?:def|class)\s+{re.escape(name)}\b|^{re.escape(name)}\s*=", program, re.M) is not None


def _indented(text: str) -> str:
    """A function's body: up to the first line that is not indented."""
    lines: list[str] = []
    for line in text.splitlines(keepends=True):
        if line.strip() and line[0] not in " \t":
            break
        lines.append(line)
    return "".join(lines)


def _said(written: bytes, key: str) -> Sequence[str]:
    """What the runner wrote with its key; the program does not have it."""
    lines = written.decode("utf-8", "replace").splitlines()
    return [line.removeprefix(f"{key} ") for line in lines if line.startswith(f"{key} ")]
