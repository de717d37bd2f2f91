"""Tables of docs/results/evidence.md, and the papers' claims with the figure that tests each.

Figures and rules were fixed before the sweep's first run ended; :data:`_FEWEST_PAIRS` after two seeds, :data:`NOT_HALF` after
three.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tepo_megatron.tools.bench.evidence_figures import FIGURES, Estimate, Evidence, Figures, holm, interval, p_value
from tepo_megatron.tools.results import markdown

BEST = "best of each"  # each objective's learning rate with the largest area under the greedy curve

NOT_HALF = "not half; undecided whether faster"

Verdict = Callable[[Estimate, float], str]


def half_the_time(result: Estimate, nothing: float) -> str:
    if result.high < nothing and result.low > 0.5:
        return "faster, by less than half" + _bound(result)
    if result.high < nothing:
        return "holds" if result.high <= 0.5 else "faster; half is within the interval" + _bound(result)
    if result.low > nothing:
        return "the opposite"
    return NOT_HALF if result.low > 0.5 else "undecided"


def _bound(result: Estimate) -> str:
    return f" (at least: the other never got there in {result.at_most})" if result.at_most else ""


def _sides(above: str, below: str, neither: str = "undecided") -> Verdict:
    return lambda result, nothing: above if result.low > nothing else below if result.high < nothing else neither


more, less = _sides("holds", "the opposite"), _sides("the opposite", "holds")
difference = _sides("more", "less", "no difference seen")


@dataclass(frozen=True)
class _Claim:
    """``figure`` is a name in FIGURES; ``others`` are compared with TEPO."""

    said: str
    figure: str
    others: tuple[str, ...]
    verdict: Verdict

    @property
    def edges(self) -> tuple[float, ...]:
        """Values that a verdict compares the interval with."""
        return (0.5, 1.0) if self.verdict is half_the_time else (1.0,) if FIGURES[self.figure].ratio else (0.0,)


CLAIMS = (
    _Claim("convergence in half the time of GRPO and DAPO (P2)", "80", ("grpo", "dapo"), half_the_time),
    _Claim("convergence in half the time of GRPO and DAPO (P2)", "90", ("grpo", "dapo"), half_the_time),
    _Claim("higher accuracy than GRPO (P1: +1.74 points)", "avg", ("grpo", "dapo", "gspo"), more),
    _Claim("steadier rewards (P2)", "jitter", ("grpo", "neither"), less),
    _Claim("steadier rewards (P2)", "fall", ("grpo", "dapo"), less),
    _Claim("higher gradient norms (P2)", "gradient", ("grpo", "dapo"), more),
    _Claim("no collapse of the entropy (P2)", "entropy", ("grpo", "dapo"), more),
    _Claim("no collapse of the entropy (P2)", "entropy90", ("grpo", "dapo"), more),
    _Claim("asked by reviewers: what the mask alone does", "area", ("no-mask",), difference),
    _Claim("asked by reviewers: what the mask alone does", "entropy", ("no-mask",), difference),
    _Claim("asked by reviewers: what the likelihood alone does", "area", ("no-likelihood",), difference),
    _Claim("asked by reviewers: beside GSPO, whose ratio it has", "area", ("gspo",), difference),
)


_FEWEST_PAIRS = 3  # two differences of a discrete figure are often equal: a point as interval

_VERDICTS = ("holds", "faster", NOT_HALF, "undecided", "the opposite", "too few")


def _summary(figures: Figures, rates: Sequence[str]) -> str:
    counts: dict[str, Counter[str]] = {}
    for claim in CLAIMS:
        if claim.verdict is difference:
            continue
        for other, rate in itertools.product(claim.others, rates):
            result = figures.against(claim.figure, ("tepo", rate), (other, rate))
            if result.seeds:
                verdict = judged(claim, result)
                counts.setdefault(claim.said, Counter())[next(item for item in _VERDICTS if verdict.startswith(item))] += 1
    if not counts:
        return "Not run yet.\n"
    used = [verdict for verdict in _VERDICTS if any(count[verdict] for count in counts.values())]
    rows = [[said, str(count.total()), *(str(count[verdict]) for verdict in used)] for said, count in counts.items()]
    return markdown(["claim", "comparisons", *used], rows)


def _claims(figures: Figures, rates: Sequence[str]) -> str:
    rows, best = [], []
    for claim in CLAIMS:
        figure = FIGURES[claim.figure]
        for other in claim.others:
            cells = [_cell(figures, claim, other, rate, rates) for rate in (*rates, BEST)]
            if any(cell != "–" for cell in cells):
                rows.append([claim.said, f"{figure.name}, {'ratio' if figure.ratio else 'difference'}", other, *cells])
                best.append((claim, _compared(figures, claim, other, BEST, rates)))
    if not rows:
        return "Not run yet.\n"
    verdicts = iter(corrected([(claim, result) for claim, result in best if result]))
    rows = [[*row, f"**{next(verdicts)}**" if result else "–"] for row, (_, result) in zip(rows, best, strict=True)]
    heads = [f"lr {figures.evidence.rate(rate)}" for rate in rates]
    return markdown(["claim", "figure", "beside", *heads, BEST, f"{BEST}, after Holm's correction"], rows)


def _compared(figures: Figures, claim: _Claim, other: str, rate: str, rates: Sequence[str]) -> Estimate | None:
    mine, theirs = (_rate_of(figures, item, rate, rates) for item in ("tepo", other))
    if mine is None or theirs is None:
        return None
    result = figures.against(claim.figure, ("tepo", mine), (other, theirs))
    return result if result.seeds else None


def _cell(figures: Figures, claim: _Claim, other: str, rate: str, rates: Sequence[str]) -> str:
    result = _compared(figures, claim, other, rate, rates)
    if result is None:
        return "–"
    figure = FIGURES[claim.figure]
    mine, theirs = (_rate_of(figures, item, rate, rates) or "" for item in ("tepo", other))
    index = f"{figures.evidence.rate(mine)} beside {figures.evidence.rate(theirs)}: " if rate == BEST else ""
    pairs = f"{result.seeds} {'pair' if result.seeds == 1 else 'pairs'}"
    return f"{index}{result.text(figure, ratio=figure.ratio)}, {pairs}: **{judged(claim, result)}**"


def judged(claim: _Claim, result: Estimate) -> str:
    """None if a ratio that is a bound could change the verdict."""
    if result.seeds < _FEWEST_PAIRS or math.isnan(result.low):
        return "too few for a verdict"
    verdict = claim.verdict(result, 1.0 if FIGURES[claim.figure].ratio else 0.0)
    if result.at_least and verdict not in ("undecided", "the opposite", NOT_HALF):
        return f"undecided: TEPO never got there in {result.at_least}"
    if result.at_most and verdict in ("the opposite", NOT_HALF):
        return f"undecided: the other never got there in {result.at_most}"
    return verdict


_LEVEL = 0.05


def corrected(comparisons: Sequence[tuple[_Claim, Estimate]]) -> list[str]:
    """Verdicts as :func:`judged`, with Holm's correction over all edges of all comparisons that have pairs enough."""
    tests = [
        (number, edge)
        for number, (claim, result) in enumerate(comparisons)
        if not judged(claim, result).startswith("too few")
        for edge in claim.edges
    ]
    values = [
        p_value(comparisons[number][1], edge, ratio=FIGURES[comparisons[number][0].figure].ratio) for number, edge in tests
    ]
    rejected = {test for test, value in zip(tests, holm(values), strict=True) if value <= _LEVEL}
    verdicts = []
    for number, (claim, result) in enumerate(comparisons):
        edges = [edge for edge in claim.edges if (number, edge) in rejected]
        if any((number, edge) in tests for edge in claim.edges):
            below, above = ([edge for edge in edges if (edge < result.mean) == side] for side in (True, False))
            low = math.nextafter(max(below), math.inf) if below else -math.inf
            high = math.nextafter(min(above), -math.inf) if above else math.inf
            result = replace(result, low=low, high=high)
        verdicts.append(judged(claim, result))
    return verdicts


def _rate_of(figures: Figures, objective: str, rate: str, rates: Sequence[str]) -> str | None:
    if rate != BEST:
        return rate
    areas = {item: [area for area in figures.of("area", (objective, item)).values() if area is not None] for item in rates}
    if len({len(item) for item in areas.values()}) != 1 or not all(areas.values()):
        return None
    return max(rates, key=lambda item: statistics.fmean(areas[item]))


_LEARNING = ("70", "80", "90", "area", "greedy", "avg", "pass4", "pass16")
_DYNAMICS = ("entropy", "entropy90", "masked", "unmasked", "mask", "kl", "gradient", "spike", "clipped", "jitter", "fall")
_COMPARED = ("80", "90", "area", "greedy", "avg", "entropy", "gradient")
_TIMES = ("rollout", "score", "update", "step", "drawn")
_OVERHEAD = ("score", "update", "rollout", "step")
BASELINE = "grpo"


def make_tables(tiny: Evidence, second: Evidence, overhead: Evidence) -> dict[str, str]:
    rates = list(tiny.sweep.axes["lr"])
    result = {"state": _state({"tiny": tiny, "stack_machine": second, "overhead": overhead})}
    figures = Figures(tiny)
    result |= comparison(figures)
    for rate in rates:
        result[f"against-{rate}"] = _against(figures, rate)
        result[f"dynamics-{rate}"] = _by_objective(figures, rate, _DYNAMICS)
    result["overhead"] = _overhead(Figures(overhead))
    result["time"] = _by_objective(figures, rates[0], _TIMES)
    return result | {f"second-{name}": table for name, table in comparison(Figures(second)).items()}


def comparison(figures: Figures) -> dict[str, str]:
    rates = list(figures.evidence.sweep.axes["lr"])
    learning = {f"learning-{rate}": _by_objective(figures, rate, _LEARNING) for rate in rates}
    return {"summary": _summary(figures, rates), "claims": _claims(figures, rates), **learning, "parts": _parts(figures, rates)}


def _state(sweeps: Mapping[str, Evidence]) -> str:
    parts, counts = [], []
    for name, evidence in sweeps.items():
        keys, seeds = evidence.keys, len(evidence.sweep.seeds)
        done, of = sum(len(evidence.seeds(key)) for key in keys), len(keys) * seeds
        missing = "all are done" if done == of else f"**{of - done} are missing**, and the same commands go on with them"
        when = f" Ended from {min(evidence.dates.values())} to {max(evidence.dates.values())}." if evidence.dates else ""
        machines = Counter(evidence.machines.values())
        counted = (f"{machine} ({count} runs)" if len(machines) > 1 else machine for machine, count in machines.most_common())
        where = f" Collected on {'; '.join(counted)}." if machines else ""
        listed = ", ".join(map(str, evidence.sweep.seeds))
        parts.append(f"`examples/evidence/{name}.yaml`: {done} of {of} runs, seeds {listed}; {missing}.{when}{where}\n")
        if done < of:
            counts += [[name, objective, _done(evidence, objective)] for objective in dict.fromkeys(key[0] for key in keys)]
    if counts:
        parts.append(markdown(["sweep", "objective", "seeds done"], counts))
    return "\n".join(parts)


def _done(evidence: Evidence, objective: str) -> str:
    seeds = len(evidence.sweep.seeds)
    done = {key: f"{len(evidence.seeds(key))} of {seeds}" for key in evidence.keys if key[0] == objective}
    return ", ".join(f"lr {evidence.rate(key[1])}: {text}" if key[1:] else text for key, text in done.items())


def _by_objective(figures: Figures, rate: str, names: Sequence[str]) -> str:
    keys = ((objective, rate) for objective in figures.evidence.sweep.axes["objective"])
    known = [(key, len(seeds)) for key in keys if (seeds := figures.evidence.seeds(key))]
    rows = [[key[0], str(count), *(figures.cell(name, key) for name in names)] for key, count in known]
    return _table(["objective", "seeds", *(FIGURES[name].name for name in names)], rows)


def _against(figures: Figures, rate: str) -> str:
    rows = []
    for objective in figures.evidence.sweep.axes["objective"]:
        result = [figures.against(name, (objective, rate), (BASELINE, rate)) for name in _COMPARED]
        if objective != BASELINE and any(item.seeds for item in result):
            cells = [item.text(FIGURES[name], ratio=FIGURES[name].ratio) for name, item in zip(_COMPARED, result, strict=True)]
            rows.append([objective, str(max(item.seeds for item in result)), *cells])
    heads = [f"{FIGURES[name].name}{', ratio' if FIGURES[name].ratio else ', difference'}" for name in _COMPARED]
    return _table(["beside GRPO", "pairs", *heads], rows)


def _parts(figures: Figures, rates: Sequence[str]) -> str:
    corners = {(True, True): "tepo", (True, False): "no-mask", (False, True): "no-likelihood", (False, False): "neither"}
    rows = []
    for rate in rates:
        for name in ("area", "greedy", "avg", "entropy"):
            values = {corner: figures.of(name, (objective, rate)) for corner, objective in corners.items()}
            seeds = [
                seed for seed in figures.evidence.sweep.seeds if all(item.get(seed) is not None for item in values.values())
            ]
            effects = _effects([{corner: float(item[seed] or 0.0) for corner, item in values.items()} for seed in seeds])
            if seeds:
                cells = [effect.text(FIGURES[name]) for effect in effects]
                rows.append([figures.evidence.rate(rate), FIGURES[name].name, str(len(seeds)), *cells])
    return _table(["lr", "figure", "seeds", "of the likelihood", "of the mask", "together, beyond their sum"], rows)


def _effects(values: Sequence[Mapping[tuple[bool, bool], float]]) -> tuple[Estimate, Estimate, Estimate]:
    """Returns each factor's mean effect, and the interaction."""
    first = [(v[True, True] + v[True, False] - v[False, True] - v[False, False]) / 2 for v in values]
    second = [(v[True, True] + v[False, True] - v[True, False] - v[False, False]) / 2 for v in values]
    both = [v[True, True] - v[True, False] - v[False, True] + v[False, False] for v in values]
    return interval(first), interval(second), interval(both)


def _overhead(figures: Figures) -> str:
    rows = []
    for objective in figures.evidence.sweep.axes["objective"]:
        key = (objective,)
        if not figures.evidence.seeds(key):
            continue
        cells = [figures.cell(name, key) for name in _OVERHEAD]
        ratio = figures.against("step", key, (BASELINE,))
        beside = "1" if objective == BASELINE else ratio.text(FIGURES["step"], ratio=True)
        rows.append([objective, str(len(figures.evidence.seeds(key))), *cells, beside])
    return _table(["objective", "seeds", *(FIGURES[name].name for name in _OVERHEAD), "step, ratio to GRPO's"], rows)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return "Not run yet.\n"
    used = [index for index in range(len(columns)) if any(row[index] != "–" for row in rows)]
    return markdown([columns[index] for index in used], [[row[index] for index in used] for row in rows])
