"""Compares mathematical answers as expressions with the math-verify library (Apache-2.0)."""

from __future__ import annotations

from math_verify import parse, verify
from math_verify.errors import TimeoutException

from tepo_megatron.core.problem import Problem
from tepo_megatron.runtime.worker_child import running_time

_SOFT_LIMIT_S = 5  # math-verify's own alarm needs the main thread, where workers run verifiers


def math(problem: Problem, response: str) -> float:
    r"""1 if the final answer, as math-verify finds it (``\boxed{...}``, LaTeX, plain), equals the problem's, else 0. Raises
    ValueError if the latter is no expression.
    """
    began = running_time()
    try:
        gold = _parse_gold(problem.answer)
        result = parse(response, parsing_timeout=_SOFT_LIMIT_S, raise_on_error=True)
        return float(verify(gold, result, timeout_seconds=_SOFT_LIMIT_S, raise_on_error=True))
    except TimeoutException as error:
        if running_time() - began < _SOFT_LIMIT_S:
            return math(problem, response)  # the job was stopped meanwhile
        raise TimeoutError(f"math-verify needed more than {_SOFT_LIMIT_S} s") from error


def _parse_gold(answer: str) -> list[object]:
    answer = answer.replace("\\$", "")  # currency signs, not the signs around LaTeX
    text = answer if "$" in answer or "\\boxed" in answer else f"${answer}$"
    gold: list[object] = parse(text, parsing_timeout=_SOFT_LIMIT_S, raise_on_error=True)
    if not gold:
        raise ValueError(f"math-verify finds no expression in the answer {answer!r}; use another verifier, or correct the data")
    return gold
