"""Results of a sweep: one row for each combination of choices, with means and intervals over seeds."""

from __future__ import annotations

import csv
import itertools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from tepo_megatron.run.metrics.metrics import read_metrics
from tepo_megatron.tasks.evaluate.estimators import T_975
from tepo_megatron.tools.results import markdown
from tepo_megatron.tools.sweep.file import SweepFile, SweepRun
from tepo_megatron.tools.sweep.runner import is_done

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Spread:
    """Values of one combination's seeds; None means no value (never reached)."""

    values: tuple[float | None, ...]

    @property
    def known(self) -> list[float]:
        return [value for value in self.values if value is not None]

    @property
    def mean(self) -> float:
        """NaN without values."""
        return statistics.fmean(self.known) if self.known else math.nan

    @property
    def half_width(self) -> float:
        """Half the 95 % interval of the mean, t · s / √n, for normal values. NaN for fewer than two."""
        n = len(self.known)
        if n < 2:
            return math.nan
        quantile = T_975[n - 2] if n - 2 < len(T_975) else 1.96
        return quantile * statistics.stdev(self.known) / math.sqrt(n)

    def __str__(self) -> str:
        if not self.known:
            return "–"
        digits = _digits(self.mean)
        text = f"{self.mean:.{digits}f}"
        if not math.isnan(self.half_width):
            text += f" ± {self.half_width:.{digits}f}"
        return text if len(self.known) == len(self.values) else f"{text} ({len(self.known)} of {len(self.values)})"


def _digits(value: float) -> int:
    return 1 if abs(value) >= 10 else 3


@dataclass(frozen=True)
class _SweepFigures:
    choices: Mapping[str, str]
    seeds: tuple[int, ...]
    figures: Mapping[str, Spread]


def find(sweep: SweepFile, runs: Sequence[SweepRun]) -> list[_SweepFigures]:
    """Combinations with at least one finished run, in the file's order."""
    cells: dict[tuple[tuple[str, str], ...], list[SweepRun]] = {}
    for run in runs:
        if is_done(run):
            cells.setdefault(tuple(run.choices.items()), []).append(run)
    order = list(dict.fromkeys(tuple(run.choices.items()) for run in runs))
    return [_found(sweep, cells[cell]) for cell in order if cell in cells]


def _found(sweep: SweepFile, runs: Sequence[SweepRun]) -> _SweepFigures:
    measured = [figures_of_run(sweep, read_metrics(run.folder / "metrics.jsonl")) for run in runs]
    columns = measured[0].keys()
    figures = {column: Spread(tuple(one[column] for one in measured)) for column in columns}
    return _SweepFigures(runs[0].choices, tuple(run.seed for run in runs), figures)


def figures_of_run(sweep: SweepFile, rows: Sequence[Row]) -> dict[str, float | None]:
    """Columns of one run: last values, areas, steps until a value is reached; None if missing."""
    result: dict[str, float | None] = {}
    for name in sweep.figures:
        points = _points(rows, name)
        if name.startswith("time/"):
            result[f"{name}, median"] = statistics.median(value for step, value in points if step > 0) if points else None
        else:
            result[name] = points[-1][1] if points else None
    for name in sweep.area:
        result[f"{name}, area"] = area(_points(rows, name))
    for reach in sweep.reach:
        for index in reach.at:
            arrived = [step for step, value in _points(rows, reach.figure) if value >= index]
            result[f"steps to {reach.figure} {index:g}"] = float(arrived[0]) if arrived else None
    return result


def _points(rows: Sequence[Row], name: str) -> list[tuple[int, float]]:
    return [(row["step"], float(row[name])) for row in rows if row.get(name) is not None]


def area(points: Sequence[tuple[int, float]]) -> float | None:
    """Area under the piecewise linear curve over its length in steps: a mean value."""
    if len(points) < 2:
        return None
    pairs = itertools.pairwise(points)
    whole = sum((after[0] - before[0]) * (after[1] + before[1]) / 2 for before, after in pairs)
    return whole / (points[-1][0] - points[0][0])


def table(sweep: SweepFile, result: Sequence[_SweepFigures]) -> tuple[list[str], list[list[str]]]:
    if not result:
        return [*sweep.axes, "seeds"], []
    columns = [*sweep.axes, "seeds", *result[0].figures]
    rows = [[*one.choices.values(), str(len(one.seeds)), *map(str, one.figures.values())] for one in result]
    return columns, rows


def write_tables(sweep: SweepFile, result: Sequence[_SweepFigures], folder: Path) -> list[Path]:
    """Write ``sweep.md`` (means with intervals), ``sweep.csv`` (one line per run) and ``sweep.json``."""
    columns, rows = table(sweep, result)
    text = StringIO(newline="")
    out = csv.writer(text)
    figures = list(result[0].figures) if result else []
    out.writerow([*sweep.axes, "seed", *figures])
    records: list[dict[str, Any]] = []
    for one in result:
        for index, seed in enumerate(one.seeds):
            values = [one.figures[name].values[index] for name in figures]
            out.writerow([*one.choices.values(), seed, *("" if value is None else repr(value) for value in values)])
            records.append({**one.choices, "seed": seed, **dict(zip(figures, values, strict=True))})
    written = {
        "sweep.md": markdown(columns, rows),
        "sweep.csv": text.getvalue(),
        "sweep.json": json.dumps(records, indent=1) + "\n",
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in written.items():
        (folder / name).write_text(content, encoding="utf-8")
    return [folder / name for name in written]
