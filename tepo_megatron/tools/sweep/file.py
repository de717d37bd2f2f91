"""The file of a sweep and its runs. Imports no torch."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError, field_validator, model_validator

from tepo_megatron.config.base import Section

MOST_RUNS = 10_000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
Settings = tuple[str, ...]
"""Dotted overrides, such as ``optimizer.lr=5e-5``."""


class _Reach(Section):
    """Count the steps until a figure first reaches a value."""

    figure: str = "accuracy/greedy"
    """A metric that evaluations write."""

    at: Annotated[tuple[float, ...], Field(min_length=1)] = (0.9,)
    """The values; a run that never reaches one has no number for it."""


class SweepFile(Section):
    """A grid: all combinations of the axes' choices, each with every seed."""

    run: Path
    """The file of all runs, relative to this one."""

    output: Path = Path("out/sweep")
    """Folder with a folder for each run, and the tables."""

    overrides: Settings = ()
    """Settings of all runs."""

    axes: Mapping[str, Mapping[str, Settings]] = Field(default_factory=dict)
    """Axis → choice → its settings, one or a list. Later axes override earlier ones."""

    seeds: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)] = (0,)
    """Seeds of every choice. Tables show mean and interval over them."""

    leave_out: tuple[Mapping[str, str], ...] = ()
    """Combinations to skip, such as ``{objective: gspo, lr: high}``."""

    figures: tuple[str, ...] = ("accuracy/greedy", "reward/mean", "time/step")
    """Metrics of the table: a run's last value, and for ``time/…`` the median of its steps."""

    area: tuple[str, ...] = ("accuracy/greedy",)
    """Metrics whose mean over the run's steps is in the table: the area under the curve over its length."""

    reach: tuple[_Reach, ...] = ()
    """Values whose first step is in the table."""

    attempts: PositiveInt = 2
    """Number of starts of a failing run; each resumes from the newest checkpoint."""

    @field_validator("axes", mode="before")
    @classmethod
    def _one_setting_is_a_list(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        return {
            axis: {name: (value,) if isinstance(value, str) else value for name, value in choices.items()}
            if isinstance(choices, Mapping)
            else choices
            for axis, choices in given.items()
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


@dataclass(frozen=True)
class SweepRun:
    """``choices``: axis → choice. ``overrides``: all overrides, with output and seed."""

    choices: Mapping[str, str]
    seed: int
    folder: Path
    overrides: Settings

    @property
    def name(self) -> str:
        return self.folder.name


def read_sweep(path: Path) -> SweepFile:
    """Raises ValueError with a sentence for each mistake in the file."""
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(given, Mapping):
        raise ValueError(f"{path}: a sweep has keys such as run, axes and seeds (docs/reference/sweeps.md)")
    try:
        sweep = SweepFile.model_validate(given)
    except ValidationError as error:
        lines = [f"  {'.'.join(map(str, each['loc'])) or 'sweep'}: {_told(each['msg'])}" for each in error.errors()]
        raise ValueError("\n".join([f"{path}: not a sweep", *lines])) from error
    return sweep.model_copy(update={"run": path.parent / sweep.run})


def _told(message: str) -> str:
    known = ", ".join(SweepFile.model_fields)
    return f"unknown key; there are {known}" if message.startswith("Extra inputs") else message.removeprefix("Value error, ")


def runs_of(sweep: SweepFile, output: Path | None = None) -> list[SweepRun]:
    """All runs, seed by seed, so that an interrupted sweep has each choice equally often. Raises ValueError for too many."""
    root = output or sweep.output
    cells = list(_cells(sweep))
    if not 0 < len(cells) * len(sweep.seeds) <= MOST_RUNS:
        raise ValueError(f"the sweep has {len(cells) * len(sweep.seeds)} runs; it may have 1 to {MOST_RUNS}")
    found = []
    for seed, choices in itertools.product(sweep.seeds, cells):
        folder = root / "-".join([*choices.values(), f"seed{seed}"])
        settings = [setting for axis, name in choices.items() for setting in sweep.axes[axis][name]]
        found.append(SweepRun(choices, seed, folder, (*sweep.overrides, *settings, f"seed={seed}", f"output={folder}")))
    names = [run.name for run in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two runs would be in the folder {twice[0]}; name the choices of the axes differently")
    return found


def _cells(sweep: SweepFile) -> Iterator[dict[str, str]]:
    for names in itertools.product(*sweep.axes.values()):
        choices = dict(zip(sweep.axes, names, strict=True))
        if not any(left_out.items() <= choices.items() for left_out in map(dict, sweep.leave_out)):
            yield choices


def shard(runs: Sequence[SweepRun], part: str | None) -> list[SweepRun]:
    """The runs of one of several jobs: ``2/8`` is every eighth from the second. Raises ValueError for another form."""
    if part is None:
        return list(runs)
    found = re.fullmatch(r"(\d+)/(\d+)", part)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise ValueError(f"--part {part}: write K/N, the K-th of N jobs, K from 1 to N")
    return list(runs[int(found[1]) - 1 :: int(found[2])])
