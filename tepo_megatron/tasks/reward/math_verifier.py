"""Compares mathematical answers as expressions with the math-verify library (Apache-2.0)."""

import math as arithmetic
import re
from contextlib import suppress
from decimal import Decimal
from functools import partial
from typing import Any

from math_verify import parse, verify
from math_verify.errors import TimeoutException

from tepo_megatron.core.problem import Problem
from tepo_megatron.runtime.worker_child import running_time

# Of 2e-1 and 2e+1 it is not clear that e is no Euler's number.
_SCIENTIFIC = re.compile(r"(?<![\w.}])(?:\d+\.\d*[eE][-+]?\d{1,2}|\d+[eE](?:\d{1,2}|[-+]\d\d))(?!\w|\.\d)")
_MOST_NUMBERS = 100  # that are rewritten: math-verify's time grows with the square of the digits
_BEFORE_AN_ANSWER = re.compile(r"</?answer>|(?<=##)(?=[-$\d])")  # math-verify reads a plain number only where a line begins
_SOFT_LIMIT_S = 5  # math-verify's own alarm needs the main thread, where workers run verifiers


def math(problem: Problem, response: str) -> float:
    r"""1 if the final answer, as math-verify finds it (``\boxed{...}``, LaTeX, plain) after ``</think>``, equals the problem's,
    else 0. Raises ValueError if the latter is no expression.
    """
    began = running_time()
    try:
        gold = _parse_gold(problem.answer)
        result = _parse_response(response)
        digits = _more_digits(gold)
        compare = partial(
            verify,
            gold,
            float_rounding=6 + digits,
            numeric_precision=15 + digits,
            timeout_seconds=_SOFT_LIMIT_S,
            raise_on_error=True,
        )
        try:
            return float(compare(result))
        except MemoryError:
            raise
        except Exception:  # of another form, such as 0<x<1<y for 0<x<1: the response is wrong
            compare(gold)  # raises if the expected answer is the cause
            return 0.0
    except TimeoutException as error:
        if running_time() - began < _SOFT_LIMIT_S:
            return math(problem, response)  # the job was stopped meanwhile
        raise TimeoutError(f"math-verify needed more than {_SOFT_LIMIT_S} s") from error


def _parse_response(response: str) -> list[Any]:
    try:
        text = _BEFORE_AN_ANSWER.sub("\n", _plain(response.rpartition("</think>")[2]))
        return parse(text, parsing_timeout=_SOFT_LIMIT_S, raise_on_error=True)
    except TimeoutException:
        raise
    except Exception:  # of sympy, such as a number of 5,000 digits: the response is wrong
        return []


def _plain(text: str) -> str:
    text = text.replace("−", "-")
    for match in [*_SCIENTIFIC.finditer(text)][: -_MOST_NUMBERS - 1 : -1]:  # the answer stands last
        text = f"{text[: match.start()]}{Decimal(match[0]):f}{text[match.end() :]}"
    return text


def _more_digits(gold: list[Any]) -> int:
    # math-verify compares 6 digits after the point: of numbers below 0.0001 fewer than 3 would count
    for item in gold:
        if getattr(item, "is_number", False) and item.is_real is not False:
            with suppress(TypeError, OverflowError):  # of expressions without a value, such as a limit
                if 0 < (size := abs(complex(item))) < 0.0001:
                    return -arithmetic.floor(arithmetic.log10(size)) - 4
    return 0


def _parse_gold(answer: str) -> list[object]:
    if "\\begin" in answer:
        answer = " ".join(answer.split())  # math-verify reads $...$ in one line only
    answer = _plain(answer).replace("\\$", "")  # currency signs, not the signs around LaTeX
    text = answer if any(sign in answer for sign in ("$", "\\boxed", "\\]")) else f"${answer}$"
    gold: list[object] = parse(text, parsing_timeout=_SOFT_LIMIT_S, raise_on_error=True)
    if not gold:
        raise ValueError(f"math-verify finds no expression in the answer {answer!r}; use another verifier, or correct the data")
    return gold
