"""Built-in verifiers (docs/guides/rewards.md). Imports only light modules: workers start quickly."""

import re
from collections.abc import Iterable, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from tepo_megatron.core.problem import Problem
from tepo_megatron.runtime.user_code import load_user_code, locate_user_code, unknown

_HERE = "tepo_megatron.tasks.reward"

_VERIFIERS: Mapping[str, str] = {
    **{name: f"{_HERE}.verifiers:{name}" for name in ("exact", "last_number", "last_word")},
    "math": f"{_HERE}.math_verifier:math",
    "judge": f"{_HERE}.judge:Judge",
    "python_tests": f"{_HERE}.programs:PythonTests",
    "stack_machine": f"{_HERE}.programs:StackMachine",
}

GIVEN = "(python):"  # prefix of an object that cannot be imported

# A sign counts only if no operand precedes it: the last number of "7-5" is 5.
_NUMBER = re.compile(r"(?:(?<![\w)])[-+])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")


def last_word(problem: Problem, response: str) -> float:
    """1 if the text after the last white space is the answer, else 0."""
    words = response.split()
    return float(bool(words) and words[-1] == problem.answer.strip())


def exact(problem: Problem, response: str) -> float:
    return float(response.strip() == problem.answer.strip())


def last_number(problem: Problem, response: str) -> float:
    """1 if the last numbers are equal (``1,234.50`` and ``1234.5``), else 0. Raises ValueError if the answer has none."""
    expected = last_number_in(problem.answer)
    if expected is None:
        raise ValueError(f"the answer {problem.answer!r} has no number in it; use another verifier, or correct the data")
    return float(last_number_in(response) == expected)


def check_reachable(name: str, problems: Iterable[Problem]) -> int:
    """Counts the answers that a built-in verifier refuses. Raises ValueError if it refuses all."""
    verifier = {"exact": exact, "last_number": last_number, "last_word": last_word}.get(name)
    if verifier is None:
        return 0

    def solves_itself(problem: Problem) -> bool:
        try:
            return verifier(problem, problem.answer) == 1
        except ValueError:
            return False

    listed = list(problems)
    unsolvable = [problem for problem in listed if not solves_itself(problem)]
    if listed and len(unsolvable) == len(listed):
        raise ValueError(
            f"the verifier {name} can give no response a reward: the expected answers themselves do not pass, such as "
            f"{unsolvable[0].answer[:60]!r} of problem {unsolvable[0].id!r}; choose another one, such as exact"
        )
    return len(unsolvable)


def resolve_verifier(name: str) -> str:
    """``module:name`` or ``/path/of/file.py:name``, not imported. Raises ValueError for an unknown one."""
    if name.startswith(GIVEN):
        function = name.removeprefix(GIVEN)
        raise ValueError(
            f"reward.verifier = {name!r} is a function that a Python program gave to its run, and no other process has it; "
            f"give it again, tepo_megatron.train(…, reward={function}) or evaluate_model(…, reward={function}), or put it into "
            f"a file and name it path/file.py:{function}"
        )
    if ":" in name:
        return locate_user_code(name, f"the verifier {name!r}")
    if name not in _VERIFIERS:
        raise unknown("verifier", name, _VERIFIERS, form="function")
    return _VERIFIERS[name]


def load_verifier(name: str) -> Any:
    what = f"the verifier {name!r}"
    verifier = load_user_code(resolve_verifier(name), what)
    if not (callable(verifier) or hasattr(verifier, "score") or hasattr(verifier, "score_group")):
        raise ValueError(f"{what} cannot be loaded: it is {type(verifier).__name__}, no function")
    return verifier


def last_number_in(text: str) -> Decimal | None:
    numbers = _NUMBER.findall(text.replace("−", "-").replace("{,}", ","))
    try:
        return Decimal(numbers[-1].replace(",", "")) if numbers else None
    except InvalidOperation:  # an exponent of nineteen digits
        return None
