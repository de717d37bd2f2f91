"""Scores Python programs with the problem's tests, in a sandbox."""

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
    """1 if a program passes all of the problem's tests, else 0; ``partial``: the share of passed tests. docs/guides/rewards.md
    describes the problem's columns.

    The program is the response's last code block that defines ``entry_point``, or the whole response without a block; text
    before ``</think>`` is ignored. It runs for ``seconds`` of wall and processor time (choose fewer than
    ``reward.timeout_s``). Needs ``reward.run_code`` and a kernel that can cut the worker's network; raises RuntimeError
    otherwise.
    """

    runs_code = True

    def __init__(self, seconds: float = 5.0, memory_mb: int = 256, partial: bool = False) -> None:
        require_no_network()
        self._sandbox, self._partial = Sandbox(seconds, memory_mb), partial

    async def score(self, problem: Problem, response: ResponseText) -> float:
        """Raises ValueError if the problem has no tests, RuntimeError if the sandbox does not start."""
        tests = problem.metadata.get("tests")
        if not isinstance(tests, list) or not tests or not all(isinstance(test, str) for test in tests):
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
    text = response.rpartition("</think>")[2]
    entry_point, stub = problem.metadata.get("entry_point"), problem.metadata.get("stub")
    first = _FENCE.search(text)
    if first is not None and not first[1].strip() and _defines(text[: first.start()], entry_point):
        return text[: first.start()]  # the prompt opened the block, which ends here
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
    lines: list[str] = []
    for line in text.splitlines(keepends=True):
        if line.strip() and line[0] not in " \t":
            break
        lines.append(line)
    return "".join(lines)


def _said(written: bytes, key: str) -> Sequence[str]:
    """The program does not know the key."""
    lines = written.decode("utf-8", "replace").splitlines()
    return [line.removeprefix(f"{key} ") for line in lines if line.startswith(f"{key} ")]
