"""Which problems of a source are used, and in which order: built-in functions, and the user's, by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tepo_megatron.config.data import FILTERS, ORDERS
from tepo_megatron.core.types import Problem
from tepo_megatron.runtime.user_code import load_user_code

Keeps = Callable[[Problem], Any]


def load_filters(names: Sequence[str]) -> dict[str, Keeps]:
    """The filters of one source by name, as messages say it; each says of a problem whether it is kept.

    Raises ValueError for a function of the user's that cannot be imported.
    """
    return {name.rpartition(":")[2]: _load_filter(name) for name in names}


def refused_by(filters: Mapping[str, Keeps], problem: Problem) -> str | None:
    """The first filter that leaves a problem out; None where it is kept.

    Raises ValueError where a filter raises, or returns something else than a boolean.
    """
    for name, keeps in filters.items():
        try:
            kept = keeps(problem)
        except Exception as error:
            raise ValueError(
                f"the filter {name} (data.filter) raised {type(error).__name__} on problem {problem.id!r}: {error}"
            ) from error
        if not isinstance(kept, bool):
            raise ValueError(
                f"the filter {name} (data.filter) returned {kept!r} for problem {problem.id!r}; return True to keep it, or "
                "False"
            )
        if not kept:
            return name
    return None


def order_keys(name: str, problems: Sequence[Problem]) -> list[float] | None:
    """A number for each problem of a source, the smallest drawn first; None where they are shuffled.

    Raises ValueError where the user's function cannot be imported, raises, or returns no finite number.
    """
    if name == "shuffled":
        return None
    if name == "as_given":
        return [float(at) for at in range(len(problems))]
    if name == "shortest_first":
        return [float(len(problem.prompt)) for problem in problems]
    function = load_user_code(name, f"data.order: {name}")
    assert name not in ORDERS
    return [_key(function, name, problem) for problem in problems]


def _key(function: Callable[[Problem], Any], name: str, problem: Problem) -> float:
    try:
        key = float(function(problem))
    except Exception as error:
        raise ValueError(f"data.order = {name} raised {type(error).__name__} on problem {problem.id!r}: {error}") from error
    if not math.isfinite(key):
        raise ValueError(f"data.order = {name} returned {key} for problem {problem.id!r}; return a finite number")
    return key


def _load_filter(name: str) -> Keeps:
    if name not in FILTERS:
        found: Keeps = load_user_code(name, f"data.filter: {name}")
        return found
    return _Unique() if name == "unique" else _has_number


class _Unique:
    """Keeps the first problem with a prompt."""

    def __init__(self) -> None:
        self._seen: set[object] = set()

    def __call__(self, problem: Problem) -> bool:
        key = problem.messages or problem.prompt
        first = key not in self._seen
        self._seen.add(key)
        return first


def _has_number(problem: Problem) -> bool:
    return any(character.isdigit() for character in problem.answer)
