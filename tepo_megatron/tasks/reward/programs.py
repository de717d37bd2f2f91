"""Scores programs with the problem's tests: Python in a sandbox, and a stack machine. Each character of its program
is an instruction; white space is ignored:

    0 … 9     push the digit
    x y z     push the first, second or third input
    + - * <   pop b, then a; push a + b, a - b, a * b, or 1 if a < b and else 0
    ?         pop b, then a, then c; push a if c is not 0, else b
    d s p     duplicate the top; exchange the two topmost values; pop
    [ ]       repeat the instructions between them while the top is not 0; the top stays

The result is the only remaining value.
"""

import json
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from tepo_megatron.core.problem import Problem, ResponseText
from tepo_megatron.runtime.sandbox import Sandbox
from tepo_megatron.tasks.reward import run_tests

_FENCED = re.compile(r"^([ \t]*)```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.S | re.M)
_FENCE = re.compile(r"^[ \t]*```(.*)$", re.M)
_DEFINED = re.compile(r"^(?:async\s+)?(?:def|class)\s+(\w+)", re.M)
_LINE_BYTES = 100


class PythonTests:
    """1 if a program passes all tests, else 0; ``partial``: the share of passed tests. Columns: docs/guides/rewards.md. The
    program is the last code block that defines ``entry_point``, or the whole response; text before ``</think>`` is
    ignored. ``seconds``: of wall and processor time, fewer than ``reward.timeout_s``. Raises RuntimeError without
    ``reward.run_code`` or a kernel that can cut the network.
    """

    runs_code = True

    def __init__(self, seconds: float = 5.0, memory_mb: int = 256, partial: bool = False) -> None:
        self._sandbox, self._partial = Sandbox(seconds, memory_mb), partial

    async def score(self, problem: Problem, response: ResponseText) -> float:
        """Raises ValueError without tests, RuntimeError without a sandbox."""
        tests = problem.metadata.get("tests")
        if not isinstance(tests, list) or not tests or not all(isinstance(test, str) for test in tests):
            raise ValueError('the problem has no tests; give it "tests": ["assert f(1) == 2", …] beside prompt and answer')
        key = secrets.token_hex(16)
        task = {
            "key": key,
            "setup": problem.metadata.get("setup") or "",
            "program": self.program_in(response, problem),
            "tests": tests,
            "may_hide": [*_DEFINED.findall(problem.answer), problem.metadata.get("entry_point")],
            "all": not self._partial,
        }
        script, kept = str(Path(run_tests.__file__)), _LINE_BYTES * (len(tests) + 1)
        ran = await self._sandbox.run(
            (script, "tests"), given=json.dumps(task).encode(), kept=kept, partner=(script, "program")
        )
        # The program does not know the key.
        lines = ran.head.decode("utf-8", "replace").splitlines()
        said = [line.removeprefix(f"{key} ") for line in lines if line.startswith(f"{key} ")]
        if run_tests.STARTED not in said:
            why = ran.limit or ran.tail.decode("utf-8", "replace").strip()[-200:] or f"it ended with {ran.status}"
            raise RuntimeError(f"the sandbox did not start: {why}")
        passed = sum(f"{number}" in said for number in range(len(tests)))
        return passed / len(tests) if self._partial else float(passed == len(tests))

    @staticmethod
    def program_in(response: str, problem: Problem) -> str:
        text = response.rpartition("</think>")[2]
        entry_point, stub = problem.metadata.get("entry_point"), problem.metadata.get("stub")
        first = _FENCE.search(text)
        if first is not None and not first[1].strip() and _defines(text[: first.start()], entry_point):
            return text[: first.start()]  # the prompt opened the block, which ends here
        blocks = [(match[1], match[2]) for match in _FENCED.finditer(text)] or [("", text)]
        programs = [_without(indent, block) for indent, block in reversed(blocks)]
        tests = " ".join(problem.metadata.get("tests") or ())  # a response may have its own behind the program
        called = {name for name in _DEFINED.findall(problem.answer) if re.search(rf"\b{name}\b", tests)}
        known = called if entry_point is None else ()
        for names in (known, [entry_point]):
            program = max(programs, key=partial(_count_defined, names))
            if _count_defined(names, program):
                return program
        lines = blocks[-1][1].splitlines(keepends=True)
        body = takewhile(lambda line: not line.strip() or line[0] in " \t", lines)  # indented
        return f"{stub}{''.join(body)}" if stub else programs[0]


def _without(indent: str, block: str) -> str:
    lines = block.splitlines(keepends=True)
    whole = all(line.startswith(indent) for line in lines if line.strip())
    return "".join(line.removeprefix(indent) for line in lines) if whole else block


def _count_defined(names: Collection[Any], program: str) -> int:
    return sum(_defines(program, name) for name in names)


def _defines(program: str, name: Any) -> bool:
    if name is None:
        return _DEFINED.search(program) is not None
    return re.search(rf"^(?:async\s+)?(?:def|class)\s+{re.escape(name)}\b|^{re.escape(name)}\s*=", program, re.M) is not None


_INPUTS = "xyz"
_LARGEST = 10**12
_INSTRUCTIONS: Mapping[str, tuple[int, Callable[..., tuple[int, ...]]]] = {
    "+": (2, lambda a, b: (a + b,)),
    "-": (2, lambda a, b: (a - b,)),
    "*": (2, lambda a, b: (a * b,)),
    "<": (2, lambda a, b: (int(a < b),)),
    "?": (3, lambda c, a, b: (a if c else b,)),
    "d": (1, lambda a: (a, a)),
    "s": (2, lambda a, b: (b, a)),
    "p": (1, lambda a: ()),
    "[": (1, lambda a: (a,)),
    "]": (1, lambda a: (a,)),
    **{digit: (0, partial(lambda value: (value,), int(digit))) for digit in "0123456789"},
}
"""(number of values taken, function that returns those pushed)"""


class StackMachine:
    """As ``PythonTests``. ``tests``: pairs of inputs (at most three) and the result: ``[[[3, 5, 1], 16], …]``."""

    def __init__(self, steps: int = 1000, depth: int = 100, partial: bool = False) -> None:
        for name, value in (("steps", steps), ("depth", depth)):
            if value < 1:
                raise ValueError(f"{name} = {value} lets no program run; give 1 or more")
        self._steps, self._depth, self._partial = steps, depth, partial

    def score(self, problem: Problem, response: str) -> float:
        tests = problem.metadata.get("tests")
        if not tests:
            raise ValueError('the problem has no tests; give it "tests": [[inputs, result], …] beside prompt and answer')
        passed = sum(self._passes(response, inputs, expected) for inputs, expected in tests)
        return passed / len(tests) if self._partial else float(passed == len(tests))

    def run(self, program: str, inputs: Sequence[int]) -> int:
        """Raises ValueError, also at a limit or for a value beyond 10¹²."""
        code = "".join(program.split())
        partners = _partners(code)
        stack: list[int] = []
        index = 0
        for _ in range(self._steps):
            if index == len(code):
                if len(stack) != 1:
                    raise ValueError(f"it left {len(stack)} values")
                return stack[0]
            stack += _execute(code[index], stack, inputs)
            if len(stack) > self._depth:
                raise ValueError(f"it holds more than {self._depth} values")
            if code[index] in "[]" and (stack[-1] == 0) == (code[index] == "["):
                index = partners[index]
            index += 1
        raise ValueError(f"it runs longer than {self._steps} steps")

    def _passes(self, program: str, inputs: Sequence[int], expected: int) -> bool:
        try:
            return self.run(program, inputs) == expected
        except ValueError:
            return False


def _execute(instruction: str, stack: list[int], inputs: Sequence[int]) -> Sequence[int]:
    if instruction in _INPUTS:
        if _INPUTS.index(instruction) >= len(inputs):
            raise ValueError(f"there is no input {instruction}")
        return (inputs[_INPUTS.index(instruction)],)
    if instruction not in _INSTRUCTIONS:
        raise ValueError(f"{instruction!r} is no instruction")
    count, compute = _INSTRUCTIONS[instruction]
    if len(stack) < count:
        raise ValueError(f"{instruction} takes {count}, and there are {len(stack)}")
    taken = stack[len(stack) - count :]
    del stack[len(stack) - count :]
    pushed = compute(*taken)
    if any(abs(value) > _LARGEST for value in pushed) and instruction in "+-*":
        raise ValueError(f"{instruction} gives a value beyond {_LARGEST}")
    return pushed


def _partners(code: str) -> dict[int, int]:
    partners: dict[int, int] = {}
    opened: list[int] = []
    for index, instruction in enumerate(code):
        if instruction == "[":
            opened.append(index)
        elif instruction == "]":
            if not opened:
                raise ValueError("a ] has no [")
            partners[index] = opened.pop()
            partners[partners[index]] = index
    if opened:
        raise ValueError("a [ has no ]")
    return partners
