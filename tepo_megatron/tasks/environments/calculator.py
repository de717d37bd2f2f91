"""A calculator as a tool, and the expressions that it takes. Nothing that the model writes is run as a program."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from decimal import Decimal

from tepo_megatron.core.problem import Problem, ResponseText
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
    """What the model writes between ``begin`` and ``end`` is computed, and it reads the result between ``open`` and ``close``;
    a turn without an expression is its answer, which a verifier rates.

    Numbers, ``+ - * / // %`` and brackets. An expression that cannot be computed is answered with ``error`` and the reason, and
    counts as a tool error. ``verifier``: a built-in one, or ``package.module:function``, of one response; it gets what the
    model wrote in its last turn. ``penalty`` is taken off for each tool error.
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
    """The value of an arithmetic expression, as it is written by hand: ``3/4`` gives ``0.75``.

    Raises ValueError: not arithmetic, a division by zero, or too long or too large.
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
        found = _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
        if abs(found) > _LARGEST:
            raise ValueError("too large")
        return found
    raise ValueError("not arithmetic")
