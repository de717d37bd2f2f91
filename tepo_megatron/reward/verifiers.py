"""Verifiers are functions ``(problem, response_text) -> float`` that rate a response; 1 is a correct answer.

The built-in ones return 0 or 1. This module imports nothing heavy, so that a worker with a simple verifier starts at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from difflib import get_close_matches
from importlib import import_module

from tepo_megatron.types import Problem

Verifier = Callable[[Problem, str], float]

VERIFIERS: Mapping[str, str] = {
    "exact": "tepo_megatron.reward.verifiers:exact",
    "last_number": "tepo_megatron.reward.verifiers:last_number",
    "last_word": "tepo_megatron.reward.verifiers:last_word",
    "math": "tepo_megatron.reward.math_verifier:math",
}
"""The built-in verifiers by name, as ``module:function``."""

# A sign counts only where no operand stands before it: the last number of "7-5" is 5.
_NUMBER = re.compile(r"(?:(?<![\w)])[-+])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")


def last_word(problem: Problem, response: str) -> float:
    """Returns 1 if the text after the last whitespace is the answer, else 0."""
    words = response.split()
    return float(bool(words) and words[-1] == problem.answer.strip())


def exact(problem: Problem, response: str) -> float:
    """Returns 1 if the response is the answer, apart from whitespace around it, else 0."""
    return float(response.strip() == problem.answer.strip())


def last_number(problem: Problem, response: str) -> float:
    """Returns 1 if the last number in the response has the value of the last number in the answer, else 0.

    ``1,234.50`` and ``1234.5`` are the same number.

    Raises:
        ValueError: the answer has no number in it.
    """
    expected = _last_number(problem.answer)
    if expected is None:
        raise ValueError(f"the answer {problem.answer!r} has no number in it; use another verifier, or correct the data")
    return float(_last_number(response) == expected)


def resolve_verifier(name: str) -> str:
    """Returns the ``module:function`` of a verifier's name, without importing it.

    Raises:
        ValueError: neither a built-in verifier nor of the form ``package.module:function``.
    """
    if ":" in name:
        module, _, function = name.partition(":")
        if not all(part.isidentifier() for part in [*module.split("."), function]):
            raise ValueError(f"the verifier {name!r} is not of the form package.module:function")
        return name
    if name not in VERIFIERS:
        nearest = get_close_matches(name, VERIFIERS, n=1)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        raise ValueError(
            f"unknown verifier {name!r}; known: {', '.join(sorted(VERIFIERS))}, or your own as package.module:function{hint}"
        )
    return VERIFIERS[name]


def load_verifier(name: str) -> Verifier:
    """Imports a verifier: a built-in one by its name, or the user's as ``package.module:function``.

    Raises:
        ValueError: an unknown name, a module that cannot be imported, or no such function in it.
    """
    module_name, _, function_name = resolve_verifier(name).partition(":")
    try:
        module = import_module(module_name)
    except Exception as error:
        raise ValueError(
            f"the verifier {name!r} cannot be loaded: importing {module_name} raised {type(error).__name__}: {error}"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"the verifier {name!r} cannot be loaded: {module_name} has no function {function_name}")
    verifier: Verifier = function
    return verifier


def _last_number(text: str) -> Decimal | None:
    numbers = _NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None
