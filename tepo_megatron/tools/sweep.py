"""The file of a sweep, its runs, and the table of their results."""

from __future__ import annotations

import csv
import itertools
import json
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError, field_validator, model_validator

from tepo_megatron.config.base import Section
from tepo_megatron.run.metrics import read_metrics
from tepo_megatron.tasks.evaluate.estimators import t_975
from tepo_megatron.tools.results import markdown

_MOST_RUNS = 10_000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
Settings = tuple[str, ...]  # dotted overrides, such as optimizer.lr=5e-5


class _Reach(Section):
    """Counts the steps until a figure first reaches a value."""

    figure: str = "accuracy/greedy"  # a metric of evaluations

    at: Annotated[tuple[float, ...], Field(min_length=1)] = (0.9,)  # a run that never reaches a value has no number for it


class SweepFile(Section):
    """A grid: all combinations of the axes' choices, each with every seed."""

    run: Path  # relative to this file

    output: Path = Path("out/sweep")  # a folder for each run, and the tables

    overrides: Settings = ()  # of all runs

    axes: Mapping[str, Mapping[str, Settings]] = Field(default_factory=dict)
    """Axis → choice → its settings, one or a list. Later axes override earlier ones."""

    seeds: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)] = (0,)  # tables show mean and interval over them

    leave_out: tuple[Mapping[str, str], ...] = ()  # combinations, such as {objective: gspo, lr: high}

    figures: tuple[str, ...] = ("accuracy/greedy", "reward/mean", "time/step")
    """In the table: last values, for time/… the median of steps."""

    area: tuple[str, ...] = ("accuracy/greedy",)  # metrics whose mean over the run's steps is in the table

    reach: tuple[_Reach, ...] = ()  # values whose first step is in the table

    attempts: PositiveInt = 2  # starts of a failing run; each resumes from the newest checkpoint

    @field_validator("axes", mode="before")
    @classmethod
    def _one_setting_is_a_list(cls, document: Any) -> Any:
        if not isinstance(document, Mapping):
            return document
        return {
            axis: {name: (value,) if isinstance(value, str) else value for name, value in choices.items()}
            if isinstance(choices, Mapping)
            else choices
            for axis, choices in document.items()
        }

    @model_validator(mode="after")
    def _names_are_parts_of_paths(self) -> SweepFile:
        for axis, choices in self.axes.items():
            for name in (axis, *choices):
                if not _NAME.fullmatch(name):
                    raise ValueError(f"axes: {name!r} becomes part of a folder's name; use letters, digits and . _ + -")
            if not choices:
                raise ValueError(f"axes.{axis} has no choices")
        for number, left_out in enumerate(self.leave_out):
            for axis, name in left_out.items():
                if name not in self.axes.get(axis, {}):
                    raise ValueError(f"leave_out[{number}]: axes.{axis}.{name} is not there")
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds: {list(self.seeds)} has one of them twice")
        return self

    def figures_of(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
        result: dict[str, float | None] = {}
        for name in self.figures:
            values = points(rows, name)
            if name.startswith("time/"):
                result[f"{name}, median"] = statistics.median(value for step, value in values if step > 0) if values else None
            else:
                result[name] = values[-1][1] if values else None
        for name in self.area:
            result[f"{name}, area"] = area(points(rows, name))
        for reach in self.reach:
            for level in reach.at:
                arrived = (float(step) for step, value in points(rows, reach.figure) if value >= level)
                result[f"steps to {reach.figure} {level:g}"] = next(arrived, None)
        return result


@dataclass(frozen=True)
class SweepRun:
    choices: Mapping[str, str]
    seed: int
    folder: Path
    overrides: Settings

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def is_done(self) -> bool:
        """The export is a run's last action."""
        return (self.folder / "model").is_dir()


def read_sweep(path: Path) -> SweepFile:
    """Raises ValueError with a sentence for each mistake."""
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(document, Mapping):
        raise ValueError(f"{path}: a sweep has keys such as run, axes and seeds (docs/reference/sweeps.md)")
    try:
        sweep = SweepFile.model_validate(document)
    except ValidationError as error:
        lines = [f"  {'.'.join(map(str, item['loc'])) or 'sweep'}: {_sentence(item['msg'])}" for item in error.errors()]
        raise ValueError("\n".join([f"{path}: not a sweep", *lines])) from error
    return sweep.model_copy(update={"run": path.parent / sweep.run})


def _sentence(message: str) -> str:
    known = ", ".join(SweepFile.model_fields)
    return f"unknown key; there are {known}" if message.startswith("Extra inputs") else message.removeprefix("Value error, ")


def runs_of(sweep: SweepFile, output: Path | None = None) -> list[SweepRun]:
    """Seed by seed, so that an interrupted sweep has each choice equally often. Raises ValueError for too many."""
    root = output or sweep.output
    cells = list(_cells(sweep))
    if not 0 < len(cells) * len(sweep.seeds) <= _MOST_RUNS:
        raise ValueError(f"the sweep has {len(cells) * len(sweep.seeds)} runs; it may have 1 to {_MOST_RUNS}")
    result = []
    for seed, choices in itertools.product(sweep.seeds, cells):
        folder = root / "-".join([*choices.values(), f"seed{seed}"])
        settings = [setting for axis, name in choices.items() for setting in sweep.axes[axis][name]]
        result.append(SweepRun(choices, seed, folder, (*sweep.overrides, *settings, f"seed={seed}", f"output={folder}")))
    names = [run.name for run in result]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two runs would be in the folder {twice[0]}; name the choices of the axes differently")
    return result


def _cells(sweep: SweepFile) -> Iterator[dict[str, str]]:
    for names in itertools.product(*sweep.axes.values()):
        choices = dict(zip(sweep.axes, names, strict=True))
        if not any(left_out.items() <= choices.items() for left_out in map(dict, sweep.leave_out)):
            yield choices


def shard(runs: Sequence[SweepRun], part: str | None) -> list[SweepRun]:
    """``2/8`` is every eighth from the second. Raises ValueError for another form."""
    if part is None:
        return list(runs)
    match = re.fullmatch(r"(\d+)/(\d+)", part)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError(f"--part {part}: write K/N, the K-th of N jobs, K from 1 to N")
    return list(runs[int(match[1]) - 1 :: int(match[2])])


@dataclass(frozen=True)
class Spread:
    """One value per seed; None: never reached."""

    values: tuple[float | None, ...]

    @property
    def known(self) -> list[float]:
        return [value for value in self.values if value is not None]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.known) if self.known else math.nan

    @property
    def half_width(self) -> float:
        """Half the 95 % interval, t · s / √n, is NaN for fewer than two."""
        n = len(self.known)
        if n < 2:
            return math.nan
        return t_975(n - 1) * statistics.stdev(self.known) / math.sqrt(n)

    def __str__(self) -> str:
        if not self.known:
            return "–"
        digits = 1 if abs(self.mean) >= 10 else 3
        text = f"{self.mean:.{digits}f}"
        if not math.isnan(self.half_width):
            text += f" ± {self.half_width:.{digits}f}"
        return text if len(self.known) == len(self.values) else f"{text} ({len(self.known)} of {len(self.values)})"


def points(rows: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    return [(row["step"], float(row[name])) for row in rows if row.get(name) is not None]


def area(points: Sequence[tuple[int, float]]) -> float | None:
    """Area under the piecewise linear curve over its length in steps."""
    if len(points) < 2:
        return None
    pairs = itertools.pairwise(points)
    whole = sum((after[0] - before[0]) * (after[1] + before[1]) / 2 for before, after in pairs)
    return whole / (points[-1][0] - points[0][0])


class SweepResults:
    def __init__(self, sweep: SweepFile, runs: Sequence[SweepRun]) -> None:
        self._axes = list(sweep.axes)
        self._seeds: dict[tuple[str, ...], dict[int, dict[str, float | None]]] = {
            tuple(run.choices.values()): {} for run in runs
        }
        for run in (run for run in runs if run.is_done):
            rows = read_metrics(run.folder / "metrics.jsonl")
            self._seeds[tuple(run.choices.values())][run.seed] = sweep.figures_of(rows)
        self._seeds = {choices: seeds for choices, seeds in self._seeds.items() if seeds}
        self._figures = next((list(figures) for seeds in self._seeds.values() for figures in seeds.values()), [])

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Means over the seeds."""
        rows = []
        for choices, seeds in self._seeds.items():
            spreads = [Spread(tuple(figures[name] for figures in seeds.values())) for name in self._figures]
            rows.append([*choices, str(len(seeds)), *map(str, spreads)])
        return [*self._axes, "seeds", *self._figures], rows

    def write(self, folder: Path) -> list[Path]:
        text = StringIO(newline="")
        out = csv.writer(text)
        out.writerow([*self._axes, "seed", *self._figures])
        records: list[dict[str, Any]] = []
        for choices, seeds in self._seeds.items():
            for seed, figures in seeds.items():
                out.writerow([*choices, seed, *("" if value is None else repr(value) for value in figures.values())])
                records.append({**dict(zip(self._axes, choices, strict=True)), "seed": seed, **figures})
        written = {
            "sweep.md": markdown(*self.table()),
            "sweep.csv": text.getvalue(),
            "sweep.json": json.dumps(records, indent=1) + "\n",
        }
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in written.items():
            (folder / name).write_text(content, encoding="utf-8")
        return [folder / name for name in written]
