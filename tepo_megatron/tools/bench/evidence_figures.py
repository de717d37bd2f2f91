"""Figures of a sweep's runs, and statistics over seeds."""

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

from tepo_megatron.run.metrics import read_metrics
from tepo_megatron.tasks.evaluate.estimators import T_975
from tepo_megatron.tools.results import describe_machine
from tepo_megatron.tools.sweep import Spread, SweepFile, SweepRun, area, read_sweep, runs_of

COLUMNS = (
    *("accuracy/greedy", "eval/sampled/avg@16", "eval/sampled/pass@1", "eval/sampled/pass@4", "eval/sampled/pass@16"),
    *("reward/mean", "reward/std", "response_len/mean", "response_len/truncated", "groups/zero_variance"),
    *("groups/drawn", "groups/kept", "loss", "grad_norm", "lr", "update/skipped", "entropy/mean", "entropy/delta"),
    *("entropy/delta_masked", "entropy/delta_unmasked", "mask/fraction", "kl/mean", "kl/masked", "ratio/mean", "ratio/min"),
    *("ratio/max", "clip/low", "clip/high", "mismatch/kl", "canary/rollouts_max_gap", "time/step", "time/rollout"),
    *("time/score", "time/update", "time/sync", "time/eval", "tokens/s"),
)  # of metrics.jsonl (docs/reference/metrics.md); kept with six digits

EvidenceRow = Mapping[str, float]
_Rows = Sequence[EvidenceRow]
Key = tuple[str, ...]  # choices in the order of the sweep's axes


@dataclass(frozen=True)
class Evidence:
    """``runs``: combination → seed → rows."""

    sweep: SweepFile
    runs: Mapping[Key, Mapping[int, _Rows]]
    dates: Mapping[str, str] = field(default_factory=dict)
    machines: Mapping[str, str] = field(default_factory=dict)  # run's name → machine and versions

    @property
    def keys(self) -> list[Key]:
        return list(dict.fromkeys(_key_of(run) for run in runs_of(self.sweep)))

    def seeds(self, key: Key) -> list[int]:
        return [seed for seed in self.sweep.seeds if seed in self.runs.get(key, {})]

    def rate(self, name: str) -> str:
        settings = self.sweep.axes["lr"][name]
        return settings[0].partition("=")[2] if settings else name


def _key_of(run: SweepRun) -> Key:
    return tuple(run.choices.values())


def collect(file: Path, folder: Path, results: Path) -> list[str]:
    """Copies metrics of finished runs into ``results`` and returns the runs' names. Raises ValueError if ``results`` holds
    other settings, or rows lack steps.
    """
    sweep = read_sweep(file)
    volatile = ("seed=", "output=")  # all other settings must be equal for the seeds of one combination
    settings = {
        "-".join(_key_of(run)): [item for item in run.overrides if not item.startswith(volatile)] for run in runs_of(sweep)
    }
    head = _read_head(results)
    if head and head["settings"] != settings:
        raise ValueError(f"{results} holds runs of other settings than {file} has; remove that folder to start again")
    evidence = read(file, results)
    runs, dates, machines = dict(evidence.runs), dict(evidence.dates), dict(evidence.machines)
    versions = {name: version(name) for name in ("torch", "megatron-core", "tepo-megatron")}
    versions["python"] = platform.python_version()
    here = ", ".join([describe_machine().partition(", load")[0], *(f"{name} {value}" for name, value in versions.items())])
    done = [run for run in runs_of(sweep, folder) if run.is_done]
    for run in done:
        source = run.folder / "metrics.jsonl"
        rows = [_selected(row) for row in read_metrics(source)]
        if [row["step"] for row in rows] != list(range(len(rows))) or len(rows) < 2:
            raise ValueError(f"{source}: its rows are not those of the steps from 0 on; remove the run and repeat it")
        runs[_key_of(run)] = {**runs.get(_key_of(run), {}), run.seed: rows}
        finished = datetime.datetime.fromtimestamp(source.stat().st_mtime, datetime.UTC)
        date = finished.isoformat(timespec="minutes").removesuffix("+00:00") + "Z"
        if dates.get(run.name) != date:  # else it was collected earlier, on the machine where it ran
            dates[run.name], machines[run.name] = date, here
    results.mkdir(parents=True, exist_ok=True)
    for key, of_key in runs.items():
        (results / f"{'-'.join(key)}.csv").write_text(_as_csv(of_key), encoding="utf-8")
    named: dict[str, list[str]] = {}
    for name, machine in sorted(machines.items()):
        named.setdefault(machine, []).append(name)
    head = {"machines": named, "seeds": list(sweep.seeds), "settings": settings, "dates": dict(sorted(dates.items()))}
    (results / "sweep.json").write_text(json.dumps(head, indent=1) + "\n", encoding="utf-8")
    return [run.name for run in done]


def read(file: Path, results: Path) -> Evidence:
    sweep = read_sweep(file)
    head = _read_head(results)
    if head is None:
        return Evidence(sweep, {})
    paths = {_key_of(run): results / f"{'-'.join(_key_of(run))}.csv" for run in runs_of(sweep)}
    runs = {key: _from_csv(path.read_text(encoding="utf-8")) for key, path in paths.items() if path.is_file()}
    machines = {name: machine for machine, names in head["machines"].items() for name in names}
    return Evidence(sweep, runs, head["dates"], machines)


def _read_head(results: Path) -> dict[str, Any] | None:
    path = results / "sweep.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _selected(row: Mapping[str, Any]) -> EvidenceRow:
    return {"step": int(row["step"]), **{name: float(row[name]) for name in COLUMNS if row.get(name) is not None}}


def _as_csv(runs: Mapping[int, _Rows]) -> str:
    used = [name for name in COLUMNS if any(name in row for rows in runs.values() for row in rows)]
    text = StringIO(newline="")
    out = csv.writer(text, lineterminator="\n")
    out.writerow(["seed", "step", *used])
    for seed in sorted(runs):
        for row in runs[seed]:
            out.writerow([seed, row["step"], *(f"{row[name]:.6g}" if name in row else "" for name in used)])
    return text.getvalue()


def _from_csv(text: str) -> dict[int, list[EvidenceRow]]:
    result: dict[int, list[EvidenceRow]] = {}
    for line in csv.DictReader(StringIO(text)):
        seed = int(line.pop("seed"))
        row = {name: int(value) if name == "step" else float(value) for name, value in line.items() if value}
        result.setdefault(seed, []).append(row)
    return result


def points(rows: _Rows, name: str) -> list[tuple[int, float]]:
    return [(int(row["step"]), row[name]) for row in rows if name in row]


def _values(rows: _Rows, name: str) -> list[float]:
    return [row[name] for row in rows if name in row]


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _steps_to(rows: _Rows, level: float) -> float | None:
    return next((float(step) for step, value in points(rows, "accuracy/greedy") if value >= level), None)


def _entropy_at(rows: _Rows, accuracy: float) -> float | None:
    step = _steps_to(rows, accuracy)
    return (
        None if step is None else _mean([value for at_step, value in points(rows, "entropy/mean") if abs(at_step - step) <= 2])
    )


def jitter(values: Sequence[float]) -> float | None:
    """Standard deviation of step differences over √2: that of the values if they are independent."""
    differences = [after - before for before, after in itertools.pairwise(values)]
    return statistics.stdev(differences) / math.sqrt(2) if len(differences) > 1 else None


def largest_fall(values: Sequence[float], window: int = 3) -> float | None:
    """Compares means of ``window`` values with the best earlier one; 0 for a rising curve."""
    means = [statistics.fmean(values[index : index + window]) for index in range(len(values) - window + 1)]
    best = itertools.accumulate(means, max)
    return max((high - mean for high, mean in zip(best, means, strict=True)), default=None)


def _largest_gradient(rows: _Rows) -> float | None:
    norms = _values(rows, "grad_norm")
    return max(norms) / statistics.median(norms) if norms else None


def _clipped(rows: _Rows) -> float | None:
    return _mean([row["clip/low"] + row["clip/high"] for row in rows if "clip/low" in row and "clip/high" in row])


@dataclass(frozen=True)
class Figure:
    """``digits``: decimals after ``scale``. ``ratio``: compared by logarithms. ``reached``: steps to a value."""

    name: str
    of: Callable[[_Rows], float | None]
    digits: int = 3
    scale: float = 1.0
    ratio: bool = False
    reached: bool = False


def _steps(level: float) -> Figure:
    return Figure(f"steps to {level * 100:.0f} %", lambda rows: _steps_to(rows, level), digits=1, ratio=True, reached=True)


def _percent(name: str, of: Callable[[_Rows], float | None], digits: int = 1) -> Figure:
    return Figure(f"{name}, %", of, digits, scale=100.0)


def _last(name: str, count: int = 1) -> Callable[[_Rows], float | None]:
    return lambda rows: _mean(_values(rows, name)[-count:])


def _average(name: str) -> Callable[[_Rows], float | None]:
    return lambda rows: _mean(_values(rows, name))


def _seconds(name: str, column: str, digits: int) -> Figure:
    """The median, without evaluation and the first step, which warms caches."""

    def figure(rows: _Rows) -> float | None:
        of_step = column == "time/step"
        values = [
            row[column] - (row.get("time/eval", 0.0) if of_step else 0.0) for row in rows if row["step"] > 1 and column in row
        ]
        return statistics.median(values) if values else None

    return Figure(name, figure, digits, ratio=True)


FIGURES: Mapping[str, Figure] = {
    "70": _steps(0.7),
    "80": _steps(0.8),
    "90": _steps(0.9),
    "area": _percent("area under greedy", lambda rows: area(points(rows, "accuracy/greedy"))),
    "greedy": _percent("last greedy", _last("accuracy/greedy", 3)),  # of 200 problems: one alone varies by two points
    "avg": _percent("avg@16", _last("eval/sampled/avg@16")),
    "pass4": _percent("pass@4", _last("eval/sampled/pass@4")),
    "pass16": _percent("pass@16", _last("eval/sampled/pass@16")),
    "entropy": Figure("last entropy", _last("entropy/mean", 10)),
    "entropy90": Figure("entropy at 90 %", lambda rows: _entropy_at(rows, 0.9)),
    "masked": Figure("ΔH chosen, 10⁻³", _average("entropy/delta_masked"), digits=2, scale=1e3),
    "unmasked": Figure("ΔH others, 10⁻³", _average("entropy/delta_unmasked"), digits=2, scale=1e3),
    "gradient": Figure("gradient norm", _average("grad_norm"), digits=2, ratio=True),
    "spike": Figure("largest / median norm", _largest_gradient, digits=2, ratio=True),
    "mask": _percent("chosen tokens", _average("mask/fraction")),
    "kl": Figure("KL, 10⁻³", _average("kl/mean"), digits=2, scale=1e3, ratio=True),
    "clipped": _percent("clipped tokens", _clipped),
    "jitter": Figure("reward's jitter", lambda rows: jitter(_values(rows, "reward/mean")), digits=4, ratio=True),
    "fall": _percent("largest fall of greedy", lambda rows: largest_fall(_values(rows, "accuracy/greedy")), digits=2),
    "step": _seconds("s a step", "time/step", 2),
    "rollout": _seconds("rollout, s", "time/rollout", 2),
    "score": _seconds("score, s", "time/score", 3),
    "update": _seconds("update, s", "time/update", 3),
    "drawn": Figure("groups drawn a step", _average("groups/drawn"), digits=1),
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

    def text(self, figure: Figure, *, ratio: bool = False) -> str:
        if not self.seeds:
            return "–"
        scale, digits = (1.0, 2) if ratio else (figure.scale, figure.digits)
        found = f"{_signless(self.mean * scale, digits)}"
        if not math.isnan(self.low):
            found += f" ({_signless(self.low * scale, digits)} to {_signless(self.high * scale, digits)})"
        notes = [f"≤ in {self.at_most}"] * bool(self.at_most) + [f"≥ in {self.at_least}"] * bool(self.at_least)
        return found + (f" [{', '.join(notes)}]" if notes else "")


def _signless(value: float, digits: int) -> str:
    text = f"{value:.{digits}f}"
    return text.lstrip("-") if float(text) == 0 else text.replace("-", "−")


def interval(values: Sequence[float]) -> Estimate:
    spread = Spread(tuple(values))
    if not values:
        return Estimate(math.nan, math.nan, math.nan, 0)
    return Estimate(spread.mean, spread.mean - spread.half_width, spread.mean + spread.half_width, len(values))


def student(t: float, freedom: int) -> float:
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


def p_value(result: Estimate, edge: float, *, ratio: bool) -> float:
    """Of the hypothesis that the true value is ``edge``, for two or more seeds."""
    mean, low, high, null = (math.log(item) if ratio else item for item in (result.mean, result.low, result.high, edge))
    quantile = T_975[result.seeds - 2] if result.seeds - 2 < len(T_975) else 1.96
    error = (high - low) / 2 / quantile
    if error == 0:
        return float(mean == null)
    return student((mean - null) / error, result.seeds - 1)


def holm(values: Sequence[float]) -> list[float]:
    """p-values corrected for their number: the chance of one or more false rejections is at most the level (Holm 1979)."""
    result = [1.0] * len(values)
    highest = 0.0
    for rank, index in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        highest = max(highest, min(1.0, values[index] * (len(values) - rank)))
        result[index] = highest
    return result


def paired(figure: Figure, one: Mapping[int, float | None], other: Mapping[int, float | None], budget: float) -> Estimate:
    """Mean of one − other, or geometric mean of one / other, over common seeds. ``budget`` replaces missing values, and the
    pair counts as a bound.
    """
    pairs, at_most, at_least = [], 0, 0
    for seed in (seed for seed in one if seed in other):
        a, b = one[seed], other[seed]
        if a is None and b is None:
            continue
        if a is None or b is None:
            if not figure.reached:
                continue
            at_least, at_most = at_least + (a is None), at_most + (b is None)
        pairs.append((budget if a is None else a, budget if b is None else b))
    if not figure.ratio:
        return interval([a - b for a, b in pairs])
    logs = interval([math.log(a / b) for a, b in pairs if a > 0 and b > 0])
    mean, low, high = map(math.exp, (logs.mean, logs.low, logs.high))
    return Estimate(mean, low, high, logs.seeds, at_most, at_least)


class Figures:
    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.budget = float(max((rows[-1]["step"] for runs in evidence.runs.values() for rows in runs.values()), default=0))
        self._known: dict[tuple[str, Key], dict[int, float | None]] = {}

    def of(self, name: str, key: Key) -> Mapping[int, float | None]:
        if (name, key) not in self._known:
            runs = self.evidence.runs.get(key, {})
            self._known[name, key] = {seed: FIGURES[name].of(runs[seed]) for seed in self.evidence.seeds(key)}
        return self._known[name, key]

    def cell(self, name: str, key: Key) -> str:
        values = self.of(name, key)
        known = [value for value in values.values() if value is not None]
        text = interval(known).text(FIGURES[name])
        if len(known) == len(values):
            return text
        return f"{text} [{len(known)} of {len(values)}]" if known else "never" if FIGURES[name].reached else "–"

    def against(self, name: str, one: Key, other: Key) -> Estimate:
        return paired(FIGURES[name], self.of(name, one), self.of(name, other), self.budget)
