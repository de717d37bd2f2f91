"""Two models on the same problems: the difference of each figure, with its interval."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tepo_megatron.tasks.evaluate.intervals import Interval, bootstrap
from tepo_megatron.tasks.evaluate.results import StoredSet, interval, read_results


@dataclass(frozen=True)
class FigureDifference:
    """A figure of two results on their common problems, and the difference of the second from the first, problem by problem."""

    first: Interval
    second: Interval
    difference: Interval


@dataclass(frozen=True)
class SetComparison:
    """``left_out`` counts problems that only one of the two has, or that are not the same; ``settings`` are those that differ,
    but for the model.
    """

    name: str
    problems: int
    left_out: int
    settings: Mapping[str, tuple[Any, Any]]
    figures: Mapping[str, FigureDifference]


def compare_results(first: Path, second: Path) -> list[SetComparison]:
    """Compares the results of two models, on the sets that both have.

    The differences are paired: of each problem the second's figure minus the first's, and a bootstrap over the problems. What
    makes a problem hard for both cancels, so that the interval is narrower than those of the two.

    Raises ValueError where a folder has no results, or they have no set with common problems.
    """
    one, other = read_results(first), read_results(second)
    found = [_compare_sets(one[name], other[name]) for name in one if name in other]
    if not any(each.problems for each in found):
        raise ValueError(
            f"{first} has {', '.join(one)} and {second} has {', '.join(other)}: no set with a problem that is in both; "
            "evaluate both models on the same files"
        )
    return [each for each in found if each.problems]


def _compare_sets(one: StoredSet, other: StoredSet) -> SetComparison:
    common = [problem for problem, (digest, _) in one.problems.items() if other.problems.get(problem, (None,))[0] == digest]
    figures: dict[str, FigureDifference] = {}
    if common:
        names = dict.fromkeys(name for problem in common for name in one.problems[problem][1])
        for name in names:
            pairs = [
                (one.problems[problem][1][name], other.problems[problem][1][name])
                for problem in common
                if name in one.problems[problem][1] and name in other.problems[problem][1]
            ]
            if pairs:
                figures[name] = FigureDifference(
                    interval(name, [a for a, _ in pairs]),
                    interval(name, [b for _, b in pairs]),
                    bootstrap([b - a for a, b in pairs]),
                )
    keys = dict.fromkeys([*one.settings, *other.settings])
    differing = {
        key: (one.settings.get(key), other.settings.get(key))
        for key in keys
        if key != "model" and one.settings.get(key) != other.settings.get(key)
    }
    left_out = len(set(one.problems) | set(other.problems)) - len(common)
    return SetComparison(one.name, len(common), left_out, differing, figures)
