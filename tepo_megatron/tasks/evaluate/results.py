import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from tepo_megatron.core.problem import reward_fault
from tepo_megatron.runtime.files import write_atomically
from tepo_megatron.runtime.text import parse_json
from tepo_megatron.tasks.evaluate.estimators import Interval, bootstrap
from tepo_megatron.tasks.evaluate.evaluation import SetResult

RESULTS = "results"  # folder in the output of tepo eval
NUMERICS = {"dtype", "head_dtype", "quantization", "speculative", "extra_args"}  # of the servers


@dataclass(frozen=True)
class StoredSet:
    name: str
    settings: Mapping[str, Any]
    problems: Mapping[str, tuple[str, Mapping[str, float]]]


def interval(figure: str, values: Sequence[float]) -> Interval:
    return bootstrap(values, share=figure in ("greedy", "truncated") or "@" in figure)


def model_state(folder: Path) -> str:
    """Digest of the files' names, sizes and times: weights are not read."""
    files = [(file.name, file.stat()) for file in sorted(folder.iterdir()) if file.is_file()]
    stats = [(name, status.st_size, status.st_mtime_ns) for name, status in files]
    return sha256(repr(stats).encode()).hexdigest()[:16]


def write_results(
    folder: Path, result: SetResult, *, model: Path | str, state: str, seed: int, served: Mapping[str, Any]
) -> dict[str, Interval]:
    """``NAME.json`` has settings, figures and intervals, ``NAME.jsonl`` problems with responses. ``state``: ``model_state``.
    ``served``: ``NUMERICS``.
    """
    of, lines, name = result.of, [], result.of.name or "data.heldout"  # no set's name has a dot
    for problem in result.problems:
        about = repr((problem.problem.prompt, problem.problem.answer)).encode("utf-8", "backslashreplace")
        row = {**problem.row(), "digest": sha256(about).hexdigest()[:16], "figures": problem.figures}
        lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    (folder / f"{name}.json").unlink(missing_ok=True)  # otherwise a death from here on would leave old settings beside new rows
    write_atomically(folder / f"{name}.jsonl", "".join(lines))
    intervals = {name: interval(name, values) for name, values in result.figures.items()}
    settings = {
        "model": str(model),
        "model_state": state,
        "problems": len(of.problems),
        "prompts": sha256(repr(of.prompts).encode()).hexdigest()[:16],
        "verifier": of.verifier,
        "correct_at": of.correct_at,
        **({} if of.correct is None else {"correct": of.correct}),
        "greedy": of.greedy,
        "samples": of.samples,
        "majority": of.notion,
        "temperature": of.temperature,
        "max_new_tokens": of.max_new_tokens,
        **of.truncation,
        "seed": seed,
        **served,
    }
    figures = {name: asdict(value) for name, value in intervals.items()}
    summary = {"set": name, "settings": settings, "figures": figures, "failed": len(result.errors)}
    write_atomically(folder / f"{name}.json", json.dumps(summary, indent=2) + "\n")
    return intervals


def read_results(folder: Path) -> dict[str, StoredSet]:
    """Raises ValueError for missing or damaged results."""
    for place in (folder / "eval" / RESULTS, folder / RESULTS, folder):
        if paths := sorted(place.glob("*.jsonl")):
            break
    sets = {path.stem: _read_set(path) for path in paths if path.with_suffix(".json").is_file()}
    if not sets:
        raise ValueError(f"{folder} has no results of an evaluation; give the output folder of tepo eval")
    models = {str(item.settings.get("model")): name for name, item in sets.items()}
    if len(models) > 1:
        shown = ", ".join(f"{name} of {model}" for model, name in models.items())
        raise ValueError(f"{folder} has results of several models ({shown}); evaluate each into an output folder of its own")
    states = {item.settings["model_state"]: name for name, item in sets.items() if "model_state" in item.settings}
    if len(states) > 1:
        raise ValueError(
            f"the files of {next(iter(models))} changed between the results in {folder} ({', '.join(states.values())}); "
            "evaluate all sets again, or into an output folder of its own"
        )
    return sets


def _read_set(path: Path) -> StoredSet:
    summary = path.with_suffix(".json")
    try:
        settings = parse_json(summary.read_bytes(), "it", dict)["settings"]
        if not isinstance(settings, dict):
            raise TypeError("settings is no object")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{summary} is damaged: {error!r}; evaluate again") from error
    problems: dict[str, tuple[str, Mapping[str, float]]] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            row = parse_json(line, "it", dict)
            figures = {name: float(value) for name, value in row["figures"].items()}
            if any(map(reward_fault, figures.values())):
                raise ValueError("a figure is not a finite number")
            problems["/".join([*([row["source"]] if "source" in row else []), row["problem"]])] = (row["digest"], figures)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"{path}:{number}: not a result: {error!r}; evaluate again") from error
    return StoredSet(path.stem, settings, problems)


@dataclass(frozen=True)
class _FigureDifference:
    first: Interval
    second: Interval
    difference: Interval


@dataclass(frozen=True)
class _SetComparison:
    """``left_out``: problems that differ or are in one result."""

    name: str
    problems: int
    left_out: int
    settings: Mapping[str, tuple[Any, Any]]
    figures: Mapping[str, _FigureDifference]


def compare_results(first: Path, second: Path) -> list[_SetComparison]:
    """Pairs by problem. Raises ValueError without common problems."""
    one, other = read_results(first), read_results(second)
    comparisons = [_compare_sets(one[name], other[name]) for name in one if name in other]
    if not any(comparison.problems for comparison in comparisons):
        raise ValueError(
            f"{first} has {', '.join(one)} and {second} has {', '.join(other)}: no set with a problem that is in both; "
            "evaluate both models on the same files"
        )
    return [comparison for comparison in comparisons if comparison.problems]


def _compare_sets(one: StoredSet, other: StoredSet) -> _SetComparison:
    common = [problem for problem, (digest, _) in one.problems.items() if other.problems.get(problem, (None,))[0] == digest]
    pairs: dict[str, list[tuple[float, float]]] = {}
    for problem in common:
        seconds = other.problems[problem][1]
        for name, value in one.problems[problem][1].items():
            if name in seconds:
                pairs.setdefault(name, []).append((value, seconds[name]))
    figures = {
        name: _FigureDifference(
            interval(name, [a for a, _ in values]),
            interval(name, [b for _, b in values]),
            bootstrap([b - a for a, b in values]),
        )
        for name, values in pairs.items()
    }
    known = {**one.settings, **other.settings}
    unknown = NUMERICS - (one.settings.keys() & other.settings.keys())  # to a result of an earlier version
    settings = {key: (one.settings.get(key), other.settings.get(key)) for key in known if key not in unknown}
    differing = {
        key: values for key, values in settings.items() if key not in ("model", "model_state") and values[0] != values[1]
    }
    left_out = len(set(one.problems) | set(other.problems)) - len(common)
    return _SetComparison(one.name, len(common), left_out, differing, figures)
