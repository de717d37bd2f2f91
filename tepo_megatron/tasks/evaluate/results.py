"""Stores and compares results of evaluation sets."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from tepo_megatron.core.problem import Problem
from tepo_megatron.tasks.evaluate.answers import answers_row
from tepo_megatron.tasks.evaluate.estimators import Interval, bootstrap
from tepo_megatron.tasks.evaluate.evaluation import EvaluationSet, SetResult

RESULTS = "results"  # folder in the output of tepo eval


@dataclass(frozen=True)
class StoredSet:
    name: str
    settings: Mapping[str, Any]
    problems: Mapping[str, tuple[str, Mapping[str, float]]]


def interval(figure: str, values: Sequence[float]) -> Interval:
    return bootstrap(values, share=figure in ("greedy", "truncated") or "@" in figure)


def set_intervals(result: SetResult) -> dict[str, Interval]:
    names = dict.fromkeys(name for problem in result.problems for name in problem.figures)
    return {
        name: interval(name, [problem.figures[name] for problem in result.problems if name in problem.figures])
        for name in names
    }


def settings_of(of: EvaluationSet, model: Path | str, seed: int) -> dict[str, Any]:
    prompts = sha256(repr(of.prompts).encode()).hexdigest()[:16]
    return {
        "model": str(model),
        "problems": len(of.problems),
        "prompts": prompts,
        "verifier": of.verifier,
        "correct_at": of.correct_at,
        "greedy": of.greedy,
        "samples": of.samples,
        "majority": of.notion,
        "temperature": of.temperature,
        "max_new_tokens": of.max_new_tokens,
        **of.truncation,
        "seed": seed,
    }


def write_results(folder: Path, result: SetResult, settings: Mapping[str, Any]) -> None:
    """``NAME.json``: settings, figures and intervals. ``NAME.jsonl``: problems with responses."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for problem in result.problems:
        row = answers_row(problem.problem, problem.greedy, problem.sampled)
        row |= {"digest": _problem_digest(problem.problem), "figures": problem.figures}
        lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    (folder / f"{result.name}.jsonl").write_text("".join(lines), encoding="utf-8", errors="backslashreplace")
    figures = {
        name: {"mean": problem.mean, "low": problem.low, "high": problem.high, "problems": problem.problems}
        for name, problem in set_intervals(result).items()
    }
    summary = {"set": result.name, "settings": dict(settings), "figures": figures, "failed": result.failures}
    (folder / f"{result.name}.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def read_results(folder: Path) -> dict[str, StoredSet]:
    """Raises ValueError for missing or damaged results."""
    place = next(
        (candidate for candidate in (folder / "eval" / RESULTS, folder / RESULTS, folder) if any(candidate.glob("*.jsonl"))),
        None,
    )
    sets = {} if place is None else {path.stem: _read_set(path) for path in sorted(place.glob("*.jsonl")) if _summary(path)}
    if not sets:
        raise ValueError(f"{folder} has no results of evaluation sets; tepo eval writes them")
    return sets


def _problem_digest(problem: Problem) -> str:
    return sha256(repr((problem.prompt, problem.answer)).encode("utf-8", "backslashreplace")).hexdigest()[:16]


def _summary(path: Path) -> Path | None:
    summary = path.with_suffix(".json")
    return summary if summary.is_file() else None


def _read_set(path: Path) -> StoredSet:
    summary = path.with_suffix(".json")
    try:
        settings = json.loads(summary.read_text(encoding="utf-8"))["settings"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{summary} is damaged: {error!r}; evaluate again") from error
    problems: dict[str, tuple[str, Mapping[str, float]]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            problems[row["problem"]] = (row["digest"], {name: float(value) for name, value in row["figures"].items()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}:{number}: not a result: {error!r}; evaluate again") from error
    return StoredSet(path.stem, settings, problems)


@dataclass(frozen=True)
class _FigureDifference:
    """Second minus first, per problem."""

    first: Interval
    second: Interval
    difference: Interval


@dataclass(frozen=True)
class SetComparison:
    """``left_out``: problems that differ or are in one result."""

    name: str
    problems: int
    left_out: int
    settings: Mapping[str, tuple[Any, Any]]
    figures: Mapping[str, _FigureDifference]


def compare_results(first: Path, second: Path) -> list[SetComparison]:
    """Pairs by problem, so that difficulty cancels. Raises ValueError without common problems."""
    one, other = read_results(first), read_results(second)
    comparisons = [_compare_sets(one[name], other[name]) for name in one if name in other]
    if not any(comparison.problems for comparison in comparisons):
        raise ValueError(
            f"{first} has {', '.join(one)} and {second} has {', '.join(other)}: no set with a problem that is in both; "
            "evaluate both models on the same files"
        )
    return [comparison for comparison in comparisons if comparison.problems]


def _compare_sets(one: StoredSet, other: StoredSet) -> SetComparison:
    common = [problem for problem, (digest, _) in one.problems.items() if other.problems.get(problem, (None,))[0] == digest]
    figures: dict[str, _FigureDifference] = {}
    if common:
        names = dict.fromkeys(name for problem in common for name in one.problems[problem][1])
        for name in names:
            pairs = [
                (one.problems[problem][1][name], other.problems[problem][1][name])
                for problem in common
                if name in one.problems[problem][1] and name in other.problems[problem][1]
            ]
            if pairs:
                figures[name] = _FigureDifference(
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
