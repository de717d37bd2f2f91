"""A calculator, a guessing game, and a Python tool (docs/guides/environments.md)."""

from __future__ import annotations

import ast
import asyncio
import operator
import re
from collections.abc import Callable, Mapping
from decimal import Decimal

from tepo_megatron.core.problem import Problem, ResponseText
from tepo_megatron.runtime.workers.sandbox import Sandbox, require_no_network
from tepo_megatron.tasks.environments.protocol import StepResult
from tepo_megatron.tasks.reward.verifiers import load_verifier

_LONGEST = 200
_LARGEST = Decimal(10) ** 25
_OPERATORS: Mapping[type[ast.operator], Callable[[Decimal, Decimal], Decimal]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class Calculator:
    """An invalid expression (allowed: numbers, ``+ - * / // %`` and brackets) is answered by ``error`` and the reason, and
    costs ``penalty``. A turn without an expression is the answer, which ``verifier`` scores.
    """

    def __init__(
        self,
        begin: str = "<calc>",
        end: str = "</calc>",
        open: str = "<result>",
        close: str = "</result>",
        verifier: str = "last_word",
        penalty: float = 0.0,
    ) -> None:
        self._call = re.compile(re.escape(begin) + r"(.*?)" + (re.escape(end) if end else "$"), re.S)
        self._open, self._close, self._penalty = open, close, penalty
        self._verify = load_verifier(verifier)
        self._problem: Problem | None = None

    def reset(self, problem: Problem, seed: int) -> None:
        self._problem = problem

    def step(self, action: ResponseText) -> StepResult:
        asked = self._call.findall(action)
        if not asked:
            return StepResult(reward=self._verify(self._problem, action), done=True)
        try:
            result, wrong = compute(asked[-1]), False
        except ValueError as error:
            result, wrong = f"error: {error}", True
        return StepResult(f"{self._open}{result}{self._close}", reward=-self._penalty * wrong, tool_error=wrong)


def compute(expression: str) -> str:
    """The value in plain decimal notation: ``3/4`` gives ``0.75``. Raises ValueError: not arithmetic, division by zero, too
    long or too large.
    """
    if len(expression) > _LONGEST:
        raise ValueError(f"longer than {_LONGEST} characters")
    try:
        tree = ast.parse(expression.strip().lstrip("="), mode="eval")
        value = _value(tree.body) + 0  # no -0
    except (SyntaxError, RecursionError, MemoryError, ArithmeticError) as error:
        raise ValueError("not computable") from error
    text = f"{value:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _value(node: ast.expr) -> Decimal:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Decimal(str(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        result = _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
        if abs(result) > _LARGEST:
            raise ValueError("too large")
        return result
    raise ValueError("not arithmetic")


_NUMBER = re.compile(r"\d+")


class GuessNumber:
    """The first number in a turn is the guess; the reward is 1 if it is found within ``turns``. A turn without a number is a
    tool error. Bisection finds one of 2^k − 1 numbers in k turns.
    """

    def __init__(self, turns: int = 3) -> None:
        self._left = turns
        self._number = 0

    def reset(self, problem: Problem, seed: int) -> None:
        self._number = int(problem.answer)

    def step(self, action: ResponseText) -> StepResult:
        self._left -= 1
        match = _NUMBER.search(action)
        guess = None if match is None else int(match[0])
        if guess == self._number:
            return StepResult(reward=1.0, done=True)
        hint = "?" if guess is None else ("<" if self._number < guess else ">")
        return StepResult(hint, done=self._left <= 0, tool_error=guess is None)


class PythonTool:
    """Limits: ``seconds`` of wall and processor time, ``memory_mb``, ``output`` characters, 64 open files of 10 MB, no child
    processes (except as root), the standard library, 16 programs at a time per worker.

    A program that raises, prints nothing or exceeds a limit counts as a tool error. A turn without a program is the answer.
    Needs ``environment.run_code`` and a kernel that can cut the worker's network; raises RuntimeError otherwise.
    """

    runs_code = True
    _at_once = asyncio.Semaphore(16)

    def __init__(
        self,
        begin: str = "<python>",
        end: str = "</python>",
        open: str = "<output>",
        close: str = "</output>",
        verifier: str = "last_word",
        seconds: float = 5.0,
        memory_mb: int = 256,
        output: int = 2000,
    ) -> None:
        require_no_network()
        self._program = re.compile(re.escape(begin) + r"(.*?)" + (re.escape(end) if end else "$"), re.S)
        self._open, self._close = open, close
        self._verify = load_verifier(verifier)
        self._sandbox, self._output = Sandbox(seconds, memory_mb), output
        self._problem: Problem | None = None

    def reset(self, problem: Problem, seed: int) -> None:
        self._problem = problem

    async def step(self, action: ResponseText) -> StepResult:
        programs = self._program.findall(action)
        if not programs:
            return StepResult(reward=self._verify(self._problem, action), done=True)
        async with self._at_once:
            said, failed = await self._run(programs[-1])
        return StepResult(f"{self._open}{said}{self._close}", tool_error=failed)

    async def _run(self, program: str) -> tuple[str, bool]:
        ran = await self._sandbox.run(("-c", program), kept=4 * self._output)
        if ran.limit is not None:
            return f"error: {ran.limit}", True
        if ran.status != 0:
            lines = ran.tail.decode("utf-8", "replace").strip().splitlines()
            return f"error: {lines[-1][: self._output] if lines else f'it ended with {ran.status}'}", True
        text = ran.head.decode("utf-8", "replace").strip()
        shown = text if len(text) <= self._output else f"{text[: self._output]} ..."
        return shown or "(it printed nothing)", not shown
