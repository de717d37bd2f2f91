"""Figures of one run, and statistics over seeds."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tepo_megatron.tools.bench.evidence.record import Evidence, EvidenceRow, Key
from tepo_megatron.tools.sweep.table import Spread, area

LAST_STEPS = 10

LAST_EVALUATIONS = 3
"""With 200 problems, one evaluation alone varies by two points."""

Points = list[tuple[int, float]]


def points(rows: Sequence[EvidenceRow], name: str) -> Points:
    return [(int(row["step"]), row[name]) for row in rows if name in row]


def _mean(name: str, *, last: int | None = None) -> Callable[[Sequence[EvidenceRow]], float | None]:
    def figure(rows: Sequence[EvidenceRow]) -> float | None:
        values = [value for _, value in points(rows, name)]
        return statistics.fmean(values[-last:] if last else values) if values else None

    return figure


def _last(name: str) -> Callable[[Sequence[EvidenceRow]], float | None]:
    def figure(rows: Sequence[EvidenceRow]) -> float | None:
        found = points(rows, name)
        return found[-1][1] if found else None

    return figure


def _steps_to(at: float) -> Callable[[Sequence[EvidenceRow]], float | None]:
    def figure(rows: Sequence[EvidenceRow]) -> float | None:
        return next((float(step) for step, value in points(rows, "accuracy/greedy") if value >= at), None)

    return figure


def _entropy_at(accuracy: float) -> Callable[[Sequence[EvidenceRow]], float | None]:
    def figure(rows: Sequence[EvidenceRow]) -> float | None:
        step = _steps_to(accuracy)(rows)
        near = [] if step is None else [value for at, value in points(rows, "entropy/mean") if abs(at - step) <= 2]
        return statistics.fmean(near) if near else None

    return figure


def jitter(values: Sequence[float]) -> float | None:
    """Noise around the trend: the standard deviation of step differences over √2, which for independent values is their own."""
    differences = [after - before for before, after in itertools.pairwise(values)]
    return statistics.stdev(differences) / math.sqrt(2) if len(differences) > 1 else None


def largest_fall(values: Sequence[float], window: int = 3) -> float | None:
    """Largest fall of a mean of ``window`` values below the best earlier one; 0 for a rising curve."""
    means = [statistics.fmean(values[at : at + window]) for at in range(len(values) - window + 1)]
    best = itertools.accumulate(means, max)
    return max((high - mean for high, mean in zip(best, means, strict=True)), default=None)


def _largest_gradient(rows: Sequence[EvidenceRow]) -> float | None:
    norms = [value for _, value in points(rows, "grad_norm")]
    return max(norms) / statistics.median(norms) if norms else None


def _clipped(rows: Sequence[EvidenceRow]) -> float | None:
    found = [row["clip/low"] + row["clip/high"] for row in rows if "clip/low" in row and "clip/high" in row]
    return statistics.fmean(found) if found else None


def seconds(name: str) -> Callable[[Sequence[EvidenceRow]], float | None]:
    """Median over the steps from the second (the first warms caches), without evaluation."""

    def figure(rows: Sequence[EvidenceRow]) -> float | None:
        of_step = name == "time/step"
        found = [row[name] - (row.get("time/eval", 0.0) if of_step else 0.0) for row in rows if row["step"] > 1 and name in row]
        return statistics.median(found) if found else None

    return figure


@dataclass(frozen=True)
class Figure:
    """A number of one run; ``digits`` are decimals after ``scale``. ``ratio``: compare by logarithms, else by difference.
    ``reached``: a number of steps to a value that may never be reached."""

    name: str
    of: Callable[[Sequence[EvidenceRow]], float | None]
    digits: int = 3
    scale: float = 1.0
    ratio: bool = False
    reached: bool = False


def _steps(at: float) -> Figure:
    return Figure(f"steps to {at:.0%}".replace("%", " %"), _steps_to(at), digits=1, ratio=True, reached=True)


def _percent(name: str, of: Callable[[Sequence[EvidenceRow]], float | None], digits: int = 1) -> Figure:
    return Figure(f"{name}, %", of, digits, scale=100.0)


FIGURES: Mapping[str, Figure] = {
    "70": _steps(0.7),
    "80": _steps(0.8),
    "90": _steps(0.9),
    "area": _percent("area under greedy", lambda rows: area(points(rows, "accuracy/greedy"))),
    "greedy": _percent("last greedy", _mean("accuracy/greedy", last=LAST_EVALUATIONS)),
    "avg": _percent("avg@16", _last("eval/sampled/avg@16")),
    "pass4": _percent("pass@4", _last("eval/sampled/pass@4")),
    "pass16": _percent("pass@16", _last("eval/sampled/pass@16")),
    "entropy": Figure("last entropy", _mean("entropy/mean", last=LAST_STEPS), digits=3),
    "entropy90": Figure("entropy at 90 %", _entropy_at(0.9), digits=3),
    "masked": Figure("ΔH chosen, 10⁻³", _mean("entropy/delta_masked"), digits=2, scale=1e3),
    "unmasked": Figure("ΔH others, 10⁻³", _mean("entropy/delta_unmasked"), digits=2, scale=1e3),
    "gradient": Figure("gradient norm", _mean("grad_norm"), digits=2, ratio=True),
    "spike": Figure("largest / median norm", _largest_gradient, digits=2, ratio=True),
    "mask": _percent("chosen tokens", _mean("mask/fraction")),
    "kl": Figure("KL, 10⁻³", _mean("kl/mean"), digits=2, scale=1e3, ratio=True),
    "clipped": _percent("clipped tokens", _clipped),
    "jitter": Figure(
        "reward's jitter", lambda rows: jitter([value for _, value in points(rows, "reward/mean")]), 4, ratio=True
    ),
    "fall": _percent(
        "largest fall of greedy", lambda rows: largest_fall([v for _, v in points(rows, "accuracy/greedy")]), digits=2
    ),
    "step": Figure("s a step", seconds("time/step"), 2, ratio=True),
    "rollout": Figure("rollout, s", seconds("time/rollout"), 2, ratio=True),
    "score": Figure("score, s", seconds("time/score"), 3, ratio=True),
    "update": Figure("update, s", seconds("time/update"), 3, ratio=True),
    "drawn": Figure("groups drawn a step", _mean("groups/drawn"), 1),
}


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, paired differences or ratios, with its 95 % Student's t interval; NaN for fewer than two."""

    mean: float
    low: float
    high: float
    seeds: int
    at_most: int = 0
    """Pairs whose other run never reached the value: the budget replaces it, so the ratio is at most this."""

    at_least: int = 0
    """Pairs in which TEPO never reached it."""

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
    """Mean and Student's t interval, for normal values."""
    spread = Spread(tuple(values))
    if not values:
        return Estimate(math.nan, math.nan, math.nan, 0)
    return Estimate(spread.mean, spread.mean - spread.half_width, spread.mean + spread.half_width, len(values))


def paired(figure: Figure, one: Mapping[int, float | None], other: Mapping[int, float | None], budget: float) -> Estimate:
    """Over common seeds: mean of one − other, or geometric mean of one / other, with its interval.

    ``budget`` replaces the steps of a run that never reached the value, and the pair counts as a bound; without both it is
    left out.
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
        """Mean and interval over the seeds with the figure, and their number unless all have it."""
        values = self.of(name, key)
        known = [value for value in values.values() if value is not None]
        text = interval(known).text(FIGURES[name])
        if len(known) == len(values):
            return text
        return f"{text} [{len(known)} of {len(values)}]" if known else "never" if FIGURES[name].reached else "–"

    def against(self, name: str, one: Key, other: Key) -> Estimate:
        return paired(FIGURES[name], self.of(name, one), self.of(name, other), self.budget)
