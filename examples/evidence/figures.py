from __future__ import annotations

import csv
import datetime
import itertools
import json
import math
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from typing import Any

from tepo_megatron.config.load import load_run
from tepo_megatron.run.metrics import read_metrics
from tepo_megatron.runtime.files import write_atomically
from tepo_megatron.tasks.evaluate.estimators import t_975
from tepo_megatron.tools.results import Report
from tepo_megatron.tools.sweep import Spread, SweepFile, SweepRun, area, points, read_sweep, runs_of

COLUMNS = (
    *("accuracy/greedy", "eval/validation/greedy", "eval/sampled/avg@16", "eval/sampled/pass@1", "eval/sampled/pass@4"),
    *("eval/sampled/pass@16", "clip/share", "ratio/sigma"),
    *("reward/mean", "reward/std", "response_len/mean", "response_len/truncated", "groups/zero_variance"),
    *("groups/drawn", "groups/kept", "loss", "grad_norm", "lr", "update/skipped", "entropy/mean", "entropy/delta"),
    *("entropy/delta_masked", "entropy/delta_unmasked", "mask/fraction", "kl/mean", "kl/masked", "ratio/mean", "ratio/min"),
    *("distill/divergence", "distill/agreement"),
    *("ratio/max", "clip/low", "clip/high", "mismatch/kl", "canary/rollouts_max_gap", "time/step", "time/rollout"),
    *("time/score", "time/update", "time/sync", "time/eval", "tokens/s"),
)  # of metrics.jsonl (docs/reference/metrics.md); kept with six digits

_Rows = Sequence[Mapping[str, float]]
Key = tuple[str, ...]  # choices in the order of the sweep's axes


@dataclass(frozen=True)
class Evidence:
    """``runs``: combination → seed → rows."""

    sweep: SweepFile
    runs: Mapping[Key, Mapping[int, _Rows]]
    dates: Mapping[str, str] = field(default_factory=dict)
    machines: Mapping[str, str] = field(default_factory=dict)  # run's name → machine and versions

    @classmethod
    def read(cls, file: Path, results: Path) -> Evidence:
        sweep, head = read_sweep(file), _read_head(results)
        if head is None:
            return cls(sweep, {})
        paths = {key: results / f"{'-'.join(key)}.csv" for key in map(_key_of, runs_of(sweep))}
        runs = {key: _read_csv(path) for key, path in paths.items() if path.is_file()}
        machines = {name: machine for machine, names in head["machines"].items() for name in names}
        return cls(sweep, runs, head["dates"], machines)

    @classmethod
    def collect(cls, file: Path, folder: Path, results: Path) -> int:
        """Adds finished runs to ``results`` and counts them. Raises ValueError for other settings, or missing steps."""
        evidence, head = cls.read(file, results), _read_head(results)
        sweep, runs, dates, machines = evidence.sweep, dict(evidence.runs), dict(evidence.dates), dict(evidence.machines)
        volatile = ("seed=", "output=")  # all other settings must be equal for the seeds of one combination
        settings = {
            "-".join(_key_of(run)): [item for item in run.overrides if not item.startswith(volatile)] for run in runs_of(sweep)
        }
        if head and _resolved(sweep, head["settings"]) != _resolved(sweep, settings):
            raise ValueError(f"{results} holds runs of other settings than {file} has; remove that folder to start again")
        versions = {name: version(name) for name in ("torch", "megatron-core", "tepo-megatron")}
        versions["python"] = platform.python_version()
        here = ", ".join([Report.machine().partition(", load")[0], *(f"{name} {value}" for name, value in versions.items())])
        done = [run for run in runs_of(sweep, folder) if run.is_done]
        for run in done:
            source = run.folder / "metrics.jsonl"
            rows = [
                {"step": int(row["step"]), **{name: float(row[name]) for name in COLUMNS if row.get(name) is not None}}
                for row in read_metrics(source)
            ]
            if [row["step"] for row in rows] != list(range(len(rows))) or len(rows) < 2:
                raise ValueError(f"{source}: its rows are not those of the steps from 0 on; remove the run and repeat it")
            runs[_key_of(run)] = {**runs.get(_key_of(run), {}), run.seed: rows}
            date = f"{datetime.datetime.fromtimestamp(source.stat().st_mtime, datetime.UTC):%Y-%m-%dT%H:%MZ}"
            if dates.get(run.name) != date:  # else it was collected earlier, on the machine where it ran
                dates[run.name], machines[run.name] = date, here
        named: dict[str, list[str]] = {}
        for name, machine in sorted(machines.items()):
            named.setdefault(machine, []).append(name)
        head = {"machines": named, "seeds": list(sweep.seeds), "settings": settings, "dates": dict(sorted(dates.items()))}
        write_atomically(results / "sweep.json", json.dumps(head, indent=1) + "\n")  # first: each row needs its date
        for key, of_key in runs.items():
            _write_csv(results / f"{'-'.join(key)}.csv", of_key)
        return len(done)

    @property
    def keys(self) -> list[Key]:
        return list(dict.fromkeys(map(_key_of, runs_of(self.sweep))))

    @property
    def rates(self) -> list[str]:
        return list(self.sweep.axes["lr"])

    @property
    def objectives(self) -> list[str]:
        return list(self.sweep.axes["objective"])

    def seeds(self, key: Key) -> list[int]:
        return [seed for seed in self.sweep.seeds if seed in self.runs.get(key, {})]

    def curves(self, key: Key, name: str) -> list[list[tuple[int, float]]]:
        """(step, value) of each seed that has any."""
        curves = (points(self.runs[key][seed], name) for seed in self.seeds(key))
        return [curve for curve in curves if curve]

    def rate(self, name: str) -> str:
        settings = self.sweep.axes["lr"][name]
        return settings[0].partition("=")[2] if settings else name

    def values(self, name: str, key: Key) -> dict[int, float | None]:
        return {seed: FIGURES[name].of(self.runs[key][seed]) for seed in self.seeds(key)}

    def cell(self, name: str, key: Key) -> str:
        values = self.values(name, key)
        known = [value for value in values.values() if value is not None]
        text = Estimate.of(known).text(FIGURES[name])
        if len(known) == len(values):
            return text
        return f"{text} [{len(known)} of {len(values)}]" if known else "never" if FIGURES[name].reached else "–"

    def against(self, name: str, one: Key, other: Key, sweep: Evidence | None = None) -> Estimate:
        """``sweep`` holds the runs of ``other``; by default this one does."""
        mine, theirs = self.values(name, one), (sweep or self).values(name, other)
        budget = float(max((rows[-1]["step"] for runs in self.runs.values() for rows in runs.values()), default=0))
        return Estimate.paired(FIGURES[name], [(mine[seed], theirs[seed]) for seed in mine if seed in theirs], budget)


def _resolved(sweep: SweepFile, settings: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """By combination, so that settings may be written in another way."""
    return {name: load_run(sweep.run, overrides).model_dump(mode="json") for name, overrides in settings.items()}


def _key_of(run: SweepRun) -> Key:
    return tuple(run.choices.values())


def _read_head(results: Path) -> dict[str, Any] | None:
    path = results / "sweep.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _read_csv(path: Path) -> Mapping[int, _Rows]:
    runs: dict[int, list[Mapping[str, float]]] = {}
    for line in csv.DictReader(StringIO(path.read_text(encoding="utf-8"))):
        row = {name: int(value) if name == "step" else float(value) for name, value in line.items() if value}
        runs.setdefault(int(row.pop("seed")), []).append(row)
    return dict(runs)


def _write_csv(path: Path, runs: Mapping[int, _Rows]) -> None:
    used = [name for name in COLUMNS if any(name in row for rows in runs.values() for row in rows)]
    with path.open("w", encoding="utf-8", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(["seed", "step", *used])
        for seed, rows in sorted(runs.items()):
            out.writerows([seed, row["step"], *(f"{row[name]:.6g}" if name in row else "" for name in used)] for row in rows)


def _column(rows: _Rows, name: str) -> list[float]:
    return [row[name] for row in rows if name in row]


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _steps_to(rows: _Rows, level: float) -> float | None:
    return next((float(step) for step, value in points(rows, "accuracy/greedy") if value >= level), None)


def _entropy_at(rows: _Rows, accuracy: float) -> float | None:
    step = _steps_to(rows, accuracy)
    return None if step is None else _mean([value for other, value in points(rows, "entropy/mean") if abs(other - step) <= 2])


def _jitter(values: Sequence[float]) -> float | None:
    """Standard deviation of step differences over √2, which is that of independent values."""
    differences = [after - before for before, after in itertools.pairwise(values)]
    return statistics.stdev(differences) / math.sqrt(2) if len(differences) > 1 else None


def _largest_fall(values: Sequence[float], window: int = 3) -> float | None:
    means = [statistics.fmean(values[index : index + window]) for index in range(len(values) - window + 1)]
    best = itertools.accumulate(means, max)
    return max((high - mean for high, mean in zip(best, means, strict=True)), default=None)


def _largest_gradient(rows: _Rows) -> float | None:
    norms = _column(rows, "grad_norm")
    return max(norms) / statistics.median(norms) if norms else None


def _clipped(rows: _Rows) -> float | None:
    return _mean([row["clip/low"] + row["clip/high"] for row in rows if "clip/low" in row and "clip/high" in row])


@dataclass(frozen=True)
class _Figure:
    """``digits``: decimals after ``scale``. ``ratio``: compared by logarithms. ``reached``: steps to a value."""

    name: str
    of: Callable[[_Rows], float | None]
    digits: int = 3
    scale: float = 1.0
    ratio: bool = False
    reached: bool = False

    @property
    def compared(self) -> str:
        return f"{self.name}, {'ratio' if self.ratio else 'difference'}"

    @property
    def no_effect(self) -> float:
        return 1.0 if self.ratio else 0.0


def _steps(level: float) -> _Figure:
    return _Figure(f"steps to {level * 100:.0f} %", lambda rows: _steps_to(rows, level), digits=1, ratio=True, reached=True)


def _percent(name: str, of: Callable[[_Rows], float | None], digits: int = 1) -> _Figure:
    return _Figure(f"{name}, %", of, digits, scale=100.0)


def _mean_of(column: str, last: int = 0) -> Callable[[_Rows], float | None]:
    return lambda rows: _mean(_column(rows, column)[-last:])


def _seconds(name: str, column: str, digits: int) -> _Figure:
    """Takes the median, without evaluation and the first step."""

    def figure(rows: _Rows) -> float | None:
        other = "time/eval" if column == "time/step" else ""
        values = [row[column] - row.get(other, 0.0) for row in rows if row["step"] > 1 and column in row]
        return statistics.median(values) if values else None

    return _Figure(name, figure, digits, ratio=True)


FIGURES: Mapping[str, _Figure] = {
    "70": _steps(0.7),
    "80": _steps(0.8),
    "90": _steps(0.9),
    "area": _percent("area under greedy", lambda rows: area(points(rows, "accuracy/greedy"))),
    "greedy": _percent("last greedy", _mean_of("accuracy/greedy", 3)),  # of 200 problems: one alone varies by two points
    "avg": _percent("avg@16", _mean_of("eval/sampled/avg@16", 1)),
    "pass4": _percent("pass@4", _mean_of("eval/sampled/pass@4", 1)),
    "pass16": _percent("pass@16", _mean_of("eval/sampled/pass@16", 1)),
    "entropy": _Figure("last entropy", _mean_of("entropy/mean", 10)),
    "entropy90": _Figure("entropy at 90 %", lambda rows: _entropy_at(rows, 0.9)),
    "masked": _Figure("ΔH chosen, 10⁻³", _mean_of("entropy/delta_masked"), digits=2, scale=1e3),
    "unmasked": _Figure("ΔH others, 10⁻³", _mean_of("entropy/delta_unmasked"), digits=2, scale=1e3),
    "gradient": _Figure("gradient norm", _mean_of("grad_norm"), digits=2, ratio=True),
    "spike": _Figure("largest / median norm", _largest_gradient, digits=2, ratio=True),
    "mask": _percent("chosen tokens", _mean_of("mask/fraction")),
    "kl": _Figure("KL, 10⁻³", _mean_of("kl/mean"), digits=2, scale=1e3, ratio=True),
    "clipped": _percent("clipped tokens", _clipped),
    "jitter": _Figure("reward's jitter", lambda rows: _jitter(_column(rows, "reward/mean")), digits=4, ratio=True),
    "fall": _percent("largest fall of greedy", lambda rows: _largest_fall(_column(rows, "accuracy/greedy")), digits=2),
    "divergence": _Figure("divergence, nats", _mean_of("distill/divergence", 5), digits=4),
    "agreement": _percent("same most likely token", _mean_of("distill/agreement", 5)),
    "step": _seconds("s a step", "time/step", 2),
    "rollout": _seconds("rollout, s", "time/rollout", 2),
    "score": _seconds("score, s", "time/score", 3),
    "update": _seconds("update, s", "time/update", 3),
    "drawn": _Figure("groups drawn a step", _mean_of("groups/drawn"), digits=1),
}


@dataclass(frozen=True)
class Estimate:
    """With a 95 % Student's t interval over seeds, NaN for fewer than two."""

    mean: float
    low: float
    high: float
    seeds: int
    at_most: int = 0  # pairs whose other run never reached the value; the ratio is a bound
    at_least: int = 0

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        spread = Spread(tuple(values))
        return cls(spread.mean, spread.mean - spread.half_width, spread.mean + spread.half_width, len(values))

    @classmethod
    def paired(cls, figure: _Figure, pairs: Sequence[tuple[float | None, float | None]], budget: float) -> Estimate:
        """Of the differences, or ratios. ``budget`` replaces missing values; the pair counts as a bound."""
        known = [pair for pair in pairs if pair != (None, None) and (figure.reached or None not in pair)]
        filled = [(budget if a is None else a, budget if b is None else b) for a, b in known]
        if not figure.ratio:
            return cls.of([a - b for a, b in filled])
        logs = cls.of([math.log(a / b) for a, b in filled if a > 0 and b > 0])
        at_most, at_least = sum(b is None for _, b in known), sum(a is None for a, _ in known)
        return cls(math.exp(logs.mean), math.exp(logs.low), math.exp(logs.high), logs.seeds, at_most, at_least)

    def text(self, figure: _Figure, *, ratio: bool = False) -> str:
        if not self.seeds:
            return "–"
        scale, digits = (1.0, 2) if ratio else (figure.scale, figure.digits)
        mean, low, high = (_signless(value * scale, digits) for value in (self.mean, self.low, self.high))
        until = " to " if "−" in low + high else "–"
        shown = mean if math.isnan(self.low) else f"{mean} ({low}{until}{high})"
        notes = [f"≤ in {self.at_most}"] * bool(self.at_most) + [f"≥ in {self.at_least}"] * bool(self.at_least)
        return shown + (f" [{', '.join(notes)}]" if notes else "")

    def p_value(self, edge: float, *, ratio: bool) -> float:
        """It needs two or more seeds."""
        values = (self.mean, self.low, self.high, edge)
        mean, low, high, null = map(math.log, values) if ratio else values
        error = (high - low) / 2 / t_975(self.seeds - 1)
        return _student((mean - null) / error, self.seeds - 1) if error else float(mean == null)


def _signless(value: float, digits: int) -> str:
    text = f"{value:.{digits}f}"
    return text.lstrip("-") if text.strip("-0.") == "" else text.replace("-", "−")


def _student(t: float, freedom: int) -> float:
    """Two-sided p-value of Student's t for whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(abs(t) / math.sqrt(freedom))
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for index in range(freedom // 2):
        total += term
        term *= math.cos(angle) ** 2 * (2 * index + 1 + odd) / (2 * index + 2 + odd)
    inside = math.sin(angle) * total
    return max(0.0, 1 - (2 / math.pi * (angle + inside) if odd else inside))
