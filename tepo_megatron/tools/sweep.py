"""A sweep: its file, runs, table of results, and the runner."""

from __future__ import annotations

import csv
import heapq
import itertools
import json
import math
import os
import queue
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import yaml
from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt, ValidationError

from tepo_megatron.config import RunConfig
from tepo_megatron.config.base import Section, read_yaml
from tepo_megatron.config.load import ConfigError, as_yaml, escape_references, load_run, setting_of_file
from tepo_megatron.config.paths import absolute
from tepo_megatron.config.schema import describe
from tepo_megatron.run.display.figures import duration
from tepo_megatron.run.metrics import read_metrics, value_in
from tepo_megatron.runtime.job_control import stopped_together
from tepo_megatron.runtime.machine import available_cores
from tepo_megatron.runtime.preemption import handled_by, not_ignored
from tepo_megatron.runtime.proc import ENDS_WITH, visible_gpus
from tepo_megatron.runtime.run_lock import RunLock
from tepo_megatron.tasks.evaluate.estimators import t_975
from tepo_megatron.tools.report.runs import is_beside_training, settings_of
from tepo_megatron.tools.results import markdown
from tepo_megatron.trainer.checkpoint_folder import checkpoints

_MOST_RUNS = 10_000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
_LAST_LINES = 30
_Settings = tuple[str, ...]  # dotted overrides, such as optimizer.lr=5e-5
_Choice = Annotated[
    _Settings, BeforeValidator(lambda raw: (raw,) if isinstance(raw, str) else raw, json_schema_input_type=str | _Settings)
]
_Row = Mapping[str, Any]


class _Reach(Section):
    figure: str = "accuracy/greedy"  # a metric of evaluations

    at: Annotated[tuple[float, ...], Field(min_length=1)] = (0.9,)  # a run that never reaches a value has no number for it


class SweepFile(Section):
    """A grid: all combinations of the axes' choices, each with every seed."""

    run: Path  # relative to this file

    output: Path = Path("out/sweep")  # a folder for each run, and the tables; if given, relative to this file

    overrides: _Settings = ()  # of all runs

    axes: Mapping[str, Mapping[str, _Choice]] = Field(default_factory=dict)
    """Axis → choice → its settings, one or a list. Later axes override earlier ones."""

    seeds: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)] = (0,)  # tables show mean and interval over them

    leave_out: tuple[Mapping[str, str], ...] = ()  # combinations, such as {objective: gspo, lr: high}

    figures: tuple[str, ...] = ("accuracy/greedy", "reward/mean", "time/step")
    """Last values in the table, or medians for time/…."""

    area: tuple[str, ...] = ("accuracy/greedy",)  # metrics whose mean over the run's steps is in the table

    reach: tuple[_Reach, ...] = ()  # values whose first step is in the table

    attempts: PositiveInt = 2  # starts of a failing run; each resumes from the newest checkpoint

    def _faults(self) -> Iterator[str]:
        for axis, choices in self.axes.items():
            for name in itertools.filterfalse(_NAME.fullmatch, (axis, *choices)):
                yield f"axes: {name!r} becomes part of a folder's name; use letters, digits and . _ + -"
            if not choices:
                yield f"axes.{axis} has no choices"
            if axis in ("seed", "seeds"):
                yield f"axes.{axis}: the tables have a column of this name; write seeds: of the sweep, or use another name"
        for setting in itertools.chain(self.overrides, *(itertools.chain(*axis.values()) for axis in self.axes.values())):
            if setting.partition("=")[0] in ("seed", "output"):
                yield f"{setting}: every run has its own seed and output; write seeds: / output: of the sweep"
        for number, left_out in enumerate(self.leave_out):
            for axis, name in left_out.items():
                if name not in self.axes.get(axis, {}):
                    yield f"leave_out[{number}]: axes.{axis}.{name} is not there"
        if len(set(self.seeds)) < len(self.seeds):
            yield f"seeds: {list(self.seeds)} has one of them twice"

    def check(self, runs: Sequence[SweepRun], gpus: int | None = None, share: Sequence[SweepRun] | None = None) -> None:
        """Raises ValueError. ``gpus``: of this machine, where runs (all, or ``share``) begin."""
        here = {run.name for run in (runs if share is None else share)}
        configs = []
        automatic: dict[tuple[str, ...], dict[str, str]] = {}  # by what the settings make of auto: dtypes with a run each
        for run in runs:
            try:
                configs.append(load_run(self.run, run.overrides))
                expected = _compared(configs[-1])
            except ConfigError as error:
                raise ValueError(f"the run {run.name} cannot begin:\n{error}") from error
            dtype = configs[-1].dtype(gpus) if gpus is not None and run.name in here else None
            if (resolved := run.folder / "resolved.yaml").is_file():
                there = _compared(saved := load_run(resolved))
                if configs[-1].model.dtype == "auto":
                    expected["model.dtype"] = there["model.dtype"]
                    if run.is_done or checkpoints(run.folder / "checkpoints"):  # otherwise it begins anew
                        dtype = saved.model.dtype
                if other := sorted(path for path in expected.keys() | there.keys() if expected.get(path) != there.get(path)):
                    fields = ", ".join(other[:5])
                    raise ValueError(
                        f"{run.folder} holds a run of other settings ({fields}); give another --output, or remove it"
                    )
            if configs[-1].model.dtype == "auto" and dtype not in (None, "auto"):
                alike = automatic.setdefault(tuple(map(configs[-1].dtype, (0, 1))), {})
                alike.setdefault(str(dtype), run.name)
        for alike in automatic.values():
            if len(alike) > 1:
                of_runs = " and ".join(f"{dtype} for {name}" for dtype, name in alike.items())
                raise ValueError(
                    f"model.dtype = auto is {of_runs}, as it is the dtype of the machine on which a run begins, and one table "
                    "would mix both; write model.dtype in overrides and remove the runs of the other, or give another --output"
                )
        self._check_figures(configs)

    def _check_figures(self, configs: Sequence[RunConfig]) -> None:
        written = self.model_dump(include={"figures", "area"}, exclude_unset=True)
        named = [(field, name) for field, names in written.items() for name in names]
        for field, metric in [*named, *(("reach", reach.figure) for reach in self.reach)]:
            faults = [next(config.metric_faults(field, metric), "") for config in configs]
            if faults and all(faults):
                others = (load_run(self.run, run.overrides) for run in runs_of(self))  # those of other jobs may have it
                if all(any(config.metric_faults(field, metric)) for config in others):
                    raise ValueError(f"no run of the sweep has this figure: {faults[0]}")

    def figures_of(self, rows: Sequence[_Row]) -> dict[str, float | None]:
        result: dict[str, float | None] = {}
        for name in self.figures:
            values = points(rows, name)
            if name.startswith("time/"):
                later = [value for step, value in values if step > 0]
                result[f"{name}, median"] = statistics.median(later) if later else None
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
    overrides: _Settings

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def is_done(self) -> bool:
        """The model is the last that a run writes but for its curves."""
        return (self.folder / "model").is_dir()


def read_sweep(path: Path) -> SweepFile:
    """Raises ValueError with a sentence for each mistake."""
    document = read_yaml(path)
    if not isinstance(document, Mapping):
        raise ValueError(f"{path}: a sweep has keys such as run, axes and seeds (docs/reference/sweeps.md)")
    try:
        sweep = SweepFile.model_validate(document)
    except ValidationError as error:
        raise ValueError("\n  ".join([f"{path}: not a sweep", *describe(error, root=SweepFile)])) from error

    def settings(choice: Iterable[str]) -> tuple[str, ...]:
        return tuple(setting_of_file(setting, path) for setting in choice)

    output = {"output": path.parent / sweep.output} if "output" in document else {}
    axes = {axis: {name: settings(choice) for name, choice in choices.items()} for axis, choices in sweep.axes.items()}
    return sweep.model_copy(
        update={"run": path.parent / sweep.run, "overrides": settings(sweep.overrides), "axes": axes, **output}
    )


def runs_of(sweep: SweepFile, output: Path | None = None) -> list[SweepRun]:
    """Seed by seed: an interrupted sweep has each choice equally often. Raises ValueError for too many."""
    root = output or sweep.output
    cells = [dict(zip(sweep.axes, names, strict=True)) for names in itertools.product(*sweep.axes.values())]
    cells = [cell for cell in cells if not any(dict(left_out).items() <= cell.items() for left_out in sweep.leave_out)]
    if not 0 < len(cells) * len(sweep.seeds) <= _MOST_RUNS:
        raise ValueError(f"the sweep has {len(cells) * len(sweep.seeds)} runs; it may have 1 to {_MOST_RUNS}")
    result: dict[str, SweepRun] = {}
    for seed, choices in itertools.product(sweep.seeds, cells):
        folder = root / "-".join([*choices.values(), f"seed{seed}"])
        if folder.name in result:
            raise ValueError(f"two runs would be in the folder {folder.name}; name the choices of the axes differently")
        settings = [setting for axis, name in choices.items() for setting in sweep.axes[axis][name]]
        overrides = (*sweep.overrides, *settings, f"seed={seed}", f"output={_quoted(str(folder))}")
        result[folder.name] = SweepRun(choices, seed, folder, overrides)
    return list(result.values())


def _quoted(text: str) -> str:
    with suppress(yaml.YAMLError):
        if "${" not in text and yaml.safe_load(text) == text:
            return text
    return as_yaml(escape_references(text))


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


def points(rows: Sequence[_Row], name: str) -> list[tuple[int, float]]:
    return [(row["step"], float(value)) for row in rows if (value := value_in(row, name)) is not None]


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
        by_choices: dict[tuple[str, ...], list[dict[str, Any]]] = {tuple(run.choices.values()): [] for run in runs}
        self._figures: list[str] = []
        for run in (run for run in runs if run.is_done):
            figures = sweep.figures_of(read_metrics(run.folder / "metrics.jsonl"))
            self._figures = list(figures)
            by_choices[tuple(run.choices.values())].append({**run.choices, "seed": run.seed, **figures})
        self._records = {choices: records for choices, records in by_choices.items() if records}

    def table(self) -> tuple[list[str], list[list[str]]]:
        rows = []
        for choices, records in self._records.items():
            spreads = [Spread(tuple(record[name] for record in records)) for name in self._figures]
            rows.append([*choices, str(len(records)), *map(str, spreads)])
        return [*self._axes, "seeds", *self._figures], rows

    def write(self, folder: Path) -> list[Path]:
        records = list(itertools.chain.from_iterable(self._records.values()))
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as made:  # the jobs of an array write the same files
            page, table, record = (Path(made) / f"sweep.{kind}" for kind in ("md", "csv", "json"))
            page.write_text(markdown(*self.table()), encoding="utf-8")
            with table.open("w", encoding="utf-8", newline="") as file:
                out = csv.DictWriter(file, [*self._axes, "seed", *self._figures])
                out.writeheader()
                out.writerows(records)
            record.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
            return [path.replace(folder / path.name) for path in (page, table, record)]


@dataclass(frozen=True)
class _RunEnd:
    """``outcome``: ``done``, ``failed`` or ``stopped``; ``seconds`` only if this sweep ran it."""

    run: SweepRun
    outcome: str
    said: str = ""
    seconds: float = 0.0


def _compared(config: RunConfig) -> dict[str, str]:
    settings = settings_of(absolute(config).model_dump(mode="json"))
    return {path: value for path, value in settings.items() if not is_beside_training(path)}


def _shares(numbers: Sequence[int], jobs: int) -> list[list[int]]:
    if jobs >= len(numbers):
        return [[numbers[job % len(numbers)]] for job in range(jobs)]
    return [list(numbers[job * len(numbers) // jobs : (job + 1) * len(numbers) // jobs]) for job in range(jobs)]


def _gpu_shares(jobs: int) -> list[dict[str, str]]:
    """Variables of the environment; equally many GPUs each. Raises ValueError for too few."""
    if jobs == 1:
        return [{}]
    import torch

    gpus = torch.cuda.device_count()
    if gpus == 0:
        return [{}] * jobs
    if gpus < jobs:
        raise ValueError(
            f"--jobs {jobs}: runs at a time have their own GPUs, and this machine shows {gpus}; give fewer jobs, or hide the "
            "GPUs (CUDA_VISIBLE_DEVICES=)"
        )
    shares = _shares(range(gpus - gpus % jobs), jobs)
    return [{"CUDA_VISIBLE_DEVICES": visible_gpus(share, "a run of the sweep")} for share in shares]


def seconds_left(took: Sequence[float], running: Sequence[float], waiting: int, jobs: int) -> float:
    """``running``: elapsed seconds."""
    item = statistics.fmean(took)
    places = [max(item - since, 0.0) for since in running] + [0.0] * (jobs - len(running))
    heapq.heapify(places)
    for _ in range(waiting):
        heapq.heappush(places, heapq.heappop(places) + item)
    return max(places)


class Sweep:
    """Servers of two runs would otherwise bind the same cores and GPUs."""

    def __init__(self, sweep: SweepFile, runs: Sequence[SweepRun], *, say: Callable[[str], None], jobs: int = 1) -> None:
        self._sweep, self._runs, self._say, self._jobs = sweep, list(runs), say, jobs
        self._living: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
        self._lock = threading.Lock()
        self._share = threading.local()
        self.stopped_by: int | None = None

    def run(self) -> list[_RunEnd]:
        """Main thread only."""
        ends = {run.name: _RunEnd(run, "done") for run in self._runs if run.is_done}
        waiting = [run for run in self._runs if run.name not in ends]
        self._say(f"{len(self._runs)} runs: {len(ends)} done, {len(waiting)} to do, {self._jobs} at a time")
        shares: queue.SimpleQueue[tuple[list[int], dict[str, str]]] = queue.SimpleQueue()
        for share in zip(_shares(available_cores(), self._jobs), _gpu_shares(self._jobs), strict=True):
            shares.put(share)

        def take_share() -> None:
            cores, self._share.variables = shares.get()
            if hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(0, cores)

        took: list[float] = []
        with self._signals(), ThreadPoolExecutor(self._jobs, "sweep", take_share) as pool:
            for number, future in enumerate(as_completed([pool.submit(self._one, run) for run in waiting]), start=1):
                one = ends[future.result().run.name] = future.result()
                took += [one.seconds] if one.outcome == "done" else []
                if one.outcome != "stopped":
                    line = f"{one.outcome}: {one.said}" if one.said else one.outcome
                    line += _last_figures(one.run) + self._left(took, len(waiting) - number)
                    self._say(f"[{number}/{len(waiting)}] {one.run.name} {line}")
        return [ends[run.name] for run in self._runs]

    def _left(self, took: Sequence[float], missing: int) -> str:
        with self._lock:
            running = [time.monotonic() - start for _, start in self._living.values()]
        if not took or not missing:
            return ""
        return f"; about {duration(seconds_left(took, running, missing - len(running), self._jobs))} left"

    def _one(self, run: SweepRun) -> _RunEnd:
        try:
            return self._attempt(run, run.folder.parent / "logs" / f"{run.name}.log")
        except OSError as error:
            return _RunEnd(run, "failed", str(error))

    def _attempt(self, run: SweepRun, log: Path) -> _RunEnd:
        log.parent.mkdir(parents=True, exist_ok=True)
        start, printed = time.monotonic(), 0
        for _ in range(self._sweep.attempts):
            if self.stopped_by is not None:
                return _RunEnd(run, "stopped")
            try:
                RunLock.check_free(run.folder)
            except ValueError as error:
                return _RunEnd(run, "failed", str(error))
            printed = log.stat().st_size if log.exists() else 0
            if self._start(run, log) == 0 and run.is_done:
                return _RunEnd(run, "done", seconds=time.monotonic() - start)
            if self.stopped_by is not None:
                return _RunEnd(run, "stopped")
            if run.is_done:  # train would refuse to resume it, and that error would hide this one
                break
        return _RunEnd(run, "failed", f"{_error(log, printed)} ({log})")

    def _start(self, run: SweepRun, log: Path) -> int:
        command = [sys.executable, "-m", "tepo_megatron", "train", str(self._sweep.run), *run.overrides, "train.resume=auto"]
        # Linux looks at the thread that starts the run: this one waits for it.
        environment = {**os.environ, **self._share.variables, ENDS_WITH: str(os.getpid())}
        with log.open("ab") as file:
            with self._lock:
                if self.stopped_by is not None:
                    return self.stopped_by
                # Its own session: Ctrl-C reaches it only once, from here.
                process = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                self._living[run.name] = process, time.monotonic()
                if self.stopped_by is not None:  # it came while the process started
                    process.send_signal(self.stopped_by)
            try:
                return process.wait()
            finally:
                with self._lock:
                    del self._living[run.name]

    @contextmanager
    def _signals(self) -> Iterator[None]:
        def ask(number: int, frame: FrameType | None) -> None:
            del frame
            if self.stopped_by is None:
                self._say("stopping: each run saves what it trained; the same command continues them")
            self.stopped_by = number
            for process, _ in list(self._living.values()):
                process.send_signal(number)

        with handled_by(ask, not_ignored()), stopped_together():
            yield


def _last_figures(run: SweepRun) -> str:
    path = run.folder / "metrics.jsonl"
    try:
        rows = read_metrics(path) if path.is_file() else []
    except ValueError:
        return ""  # the table names the damaged file
    evaluated = [row for row in rows if row.get("accuracy/greedy") is not None]
    if not evaluated:
        return ""
    return f", accuracy/greedy {evaluated[-1]['accuracy/greedy']:.3f} at step {evaluated[-1]['step']}"


def _error(log: Path, start: int) -> str:
    """``start``: the byte at which the last attempt's output begins."""
    lines = log.read_bytes()[start:].decode(errors="replace").splitlines()[-_LAST_LINES:]
    return next((line for line in lines if line.startswith("error:")), lines[-1] if lines else "it said nothing")
