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

from tepo_megatron.tools.bench.evidence_figures import FIGURES, Estimate, Evidence, Figures
from tepo_megatron.tools.results import markdown

BEST = "best of each"  # each objective's learning rate with the largest area under the greedy curve
BASELINE = "grpo"
NOT_HALF = "not half; undecided whether faster"

Verdict = Callable[[Estimate, float], str]


def _half_the_time(result: Estimate, nothing: float) -> str:
    bound = f" (at least: the other never got there in {result.at_most})" if result.at_most else ""
    if result.high < nothing and result.low > 0.5:
        return "faster, by less than half" + bound
    if result.high < nothing:
        return "holds" if result.high <= 0.5 else "faster; half is within the interval" + bound
    if result.low > nothing:
        return "the opposite"
    return NOT_HALF if result.low > 0.5 else "undecided"


def _sides(above: str, below: str, neither: str = "undecided") -> Verdict:
    return lambda result, nothing: above if result.low > nothing else below if result.high < nothing else neither


_more, _less = _sides("holds", "the opposite"), _sides("the opposite", "holds")
_difference = _sides("more", "less", "no difference seen")
_FEWEST_PAIRS = 3  # two differences of a discrete figure are often equal: a point as interval


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
        return (0.5, 1.0) if self.verdict is _half_the_time else (FIGURES[self.figure].no_effect,)

    def judge(self, result: Estimate) -> str:
        """None if a ratio that is a bound could change the verdict."""
        if result.seeds < _FEWEST_PAIRS or math.isnan(result.low):
            return "too few for a verdict"
        verdict = self.verdict(result, FIGURES[self.figure].no_effect)
        if result.at_least and verdict not in ("undecided", "the opposite", NOT_HALF):
            return f"undecided: TEPO never got there in {result.at_least}"
        if result.at_most and verdict in ("the opposite", NOT_HALF):
            return f"undecided: the other never got there in {result.at_most}"
        return verdict


CLAIMS = (
    _Claim("convergence in half the time of GRPO and DAPO (P2)", "80", ("grpo", "dapo"), _half_the_time),
    _Claim("convergence in half the time of GRPO and DAPO (P2)", "90", ("grpo", "dapo"), _half_the_time),
    _Claim("higher accuracy than GRPO (P1: +1.74 points)", "avg", ("grpo", "dapo", "gspo"), _more),
    _Claim("steadier rewards (P2)", "jitter", ("grpo", "neither"), _less),
    _Claim("steadier rewards (P2)", "fall", ("grpo", "dapo"), _less),
    _Claim("higher gradient norms (P2)", "gradient", ("grpo", "dapo"), _more),
    _Claim("no collapse of the entropy (P2)", "entropy", ("grpo", "dapo"), _more),
    _Claim("no collapse of the entropy (P2)", "entropy90", ("grpo", "dapo"), _more),
    _Claim("asked by reviewers: what the mask alone does", "area", ("no-mask",), _difference),
    _Claim("asked by reviewers: what the mask alone does", "entropy", ("no-mask",), _difference),
    _Claim("asked by reviewers: what the likelihood alone does", "area", ("no-likelihood",), _difference),
    _Claim("asked by reviewers: beside GSPO, whose ratio it has", "area", ("gspo",), _difference),
)
_VERDICTS = ("holds", "faster", NOT_HALF, "undecided", "the opposite", "too few")


def holm(values: Sequence[float]) -> list[float]:
    """p-values are corrected for their number (Holm 1979)."""
    result = [1.0] * len(values)
    highest = 0.0
    for rank, index in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        highest = max(highest, min(1.0, values[index] * (len(values) - rank)))
        result[index] = highest
    return result


_LEVEL = 0.05


def corrected(comparisons: Sequence[tuple[_Claim, Estimate]]) -> list[str]:
    """Verdicts with Holm's correction over all edges of all comparisons."""
    tests = [
        (number, edge)
        for number, (claim, result) in enumerate(comparisons)
        if not claim.judge(result).startswith("too few")
        for edge in claim.edges
    ]
    values = [
        comparisons[number][1].p_value(edge, ratio=FIGURES[comparisons[number][0].figure].ratio) for number, edge in tests
    ]
    rejected = {test for test, value in zip(tests, holm(values), strict=True) if value <= _LEVEL}
    verdicts = []
    for number, (claim, result) in enumerate(comparisons):
        if (number, claim.edges[0]) in tests:
            edges = [edge for edge in claim.edges if (number, edge) in rejected]
            low = max((math.nextafter(edge, math.inf) for edge in edges if edge < result.mean), default=-math.inf)
            high = min((math.nextafter(edge, -math.inf) for edge in edges if edge >= result.mean), default=math.inf)
            result = replace(result, low=low, high=high)
        verdicts.append(claim.judge(result))
    return verdicts


def make_tables(tiny: Evidence, second: Evidence, overhead: Evidence) -> dict[str, str]:
    figures = Figures(tiny)
    result = {"state": _state({"tiny": tiny, "stack_machine": second, "overhead": overhead}), **comparison(figures)}
    for rate in tiny.rates:
        result[f"against-{rate}"] = _against(figures, rate)
        result[f"dynamics-{rate}"] = _by_objective(figures, rate, _DYNAMICS)
    result["overhead"] = _overhead(Figures(overhead))
    result["time"] = _by_objective(figures, tiny.rates[0], _TIMES)
    return result | {f"second-{name}": table for name, table in comparison(Figures(second)).items()}


_LEARNING = ("70", "80", "90", "area", "greedy", "avg", "pass4", "pass16")
_DYNAMICS = ("entropy", "entropy90", "masked", "unmasked", "mask", "kl", "gradient", "spike", "clipped", "jitter", "fall")
_COMPARED = ("80", "90", "area", "greedy", "avg", "entropy", "gradient")
_TIMES = ("rollout", "score", "update", "step", "drawn")
_OVERHEAD = ("score", "update", "rollout", "step")


def comparison(figures: Figures) -> dict[str, str]:
    learning = {f"learning-{rate}": _by_objective(figures, rate, _LEARNING) for rate in figures.evidence.rates}
    return {"summary": _summary(figures), "claims": _claims(figures), **learning, "parts": _parts(figures)}


def _summary(figures: Figures) -> str:
    counts: dict[str, Counter[str]] = {}
    for claim in [item for item in CLAIMS if item.verdict is not _difference]:
        for other, rate in itertools.product(claim.others, figures.evidence.rates):
            result = figures.against(claim.figure, ("tepo", rate), (other, rate))
            if result.seeds:
                verdict = claim.judge(result)
                counts.setdefault(claim.said, Counter())[next(item for item in _VERDICTS if verdict.startswith(item))] += 1
    used = [verdict for verdict in _VERDICTS if any(count[verdict] for count in counts.values())]
    rows = [[said, str(count.total()), *(str(count[verdict]) for verdict in used)] for said, count in counts.items()]
    return _table(["claim", "comparisons", *used], rows)


def _claims(figures: Figures) -> str:
    rates = figures.evidence.rates
    rows, best = [], []
    for claim, other in [(item, other) for item in CLAIMS for other in item.others]:
        compared = {rate: _compared(figures, claim, other, rate) for rate in (*rates, BEST)}
        if any(compared.values()):
            figure, cells = FIGURES[claim.figure], (_claim_cell(claim, rate, result) for rate, result in compared.items())
            rows.append([claim.said, f"{figure.name}, {'ratio' if figure.ratio else 'difference'}", other, *cells])
            best.append((claim, compared[BEST]))
    verdicts = iter(corrected([(claim, result[0]) for claim, result in best if result]))
    rows = [[*row, f"**{next(verdicts)}**" if result else "–"] for row, (_, result) in zip(rows, best, strict=True)]
    heads = [f"lr {figures.evidence.rate(rate)}" for rate in rates]
    columns = ["claim", "figure", "beside", *heads, BEST, f"{BEST}, after Holm's correction"]
    return markdown(columns, rows) if rows else _NOT_RUN


def _compared(figures: Figures, claim: _Claim, other: str, rate: str) -> tuple[Estimate, str] | None:
    """With TEPO's and the other's learning rate, as text."""
    mine, theirs = (_best_rate(figures, item) if rate == BEST else rate for item in ("tepo", other))
    if mine is None or theirs is None:
        return None
    result = figures.against(claim.figure, ("tepo", mine), (other, theirs))
    return (result, f"{figures.evidence.rate(mine)} beside {figures.evidence.rate(theirs)}") if result.seeds else None


def _claim_cell(claim: _Claim, rate: str, compared: tuple[Estimate, str] | None) -> str:
    if compared is None:
        return "–"
    result, which = compared
    figure, pairs = FIGURES[claim.figure], f"{result.seeds} {'pair' if result.seeds == 1 else 'pairs'}"
    place = f"{which}: " if rate == BEST else ""
    return f"{place}{result.text(figure, ratio=figure.ratio)}, {pairs}: **{claim.judge(result)}**"


def _best_rate(figures: Figures, objective: str) -> str | None:
    """None if the rates do not have equally many runs."""
    rates = figures.evidence.rates
    areas = {rate: [area for area in figures.of("area", (objective, rate)).values() if area is not None] for rate in rates}
    if len({len(item) for item in areas.values()}) != 1 or not all(areas.values()):
        return None
    return max(rates, key=lambda item: statistics.fmean(areas[item]))


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
    keys = ((objective, rate) for objective in figures.evidence.objectives)
    known = [(key, len(seeds)) for key in keys if (seeds := figures.evidence.seeds(key))]
    rows = [[key[0], str(count), *(figures.cell(name, key) for name in names)] for key, count in known]
    return _table(["objective", "seeds", *(FIGURES[name].name for name in names)], rows)


def _against(figures: Figures, rate: str) -> str:
    rows = []
    for objective in figures.evidence.objectives:
        result = [figures.against(name, (objective, rate), (BASELINE, rate)) for name in _COMPARED]
        if objective != BASELINE and any(item.seeds for item in result):
            cells = [item.text(FIGURES[name], ratio=FIGURES[name].ratio) for name, item in zip(_COMPARED, result, strict=True)]
            rows.append([objective, str(max(item.seeds for item in result)), *cells])
    heads = [f"{FIGURES[name].name}{', ratio' if FIGURES[name].ratio else ', difference'}" for name in _COMPARED]
    return _table(["beside GRPO", "pairs", *heads], rows)


def _parts(figures: Figures) -> str:
    corners = ("tepo", "no-mask", "no-likelihood", "neither")
    rows = []
    for rate, name in itertools.product(figures.evidence.rates, ("area", "greedy", "avg", "entropy")):
        values = [figures.of(name, (objective, rate)) for objective in corners]
        known = [[item.get(seed) for item in values] for seed in figures.evidence.sweep.seeds]
        complete = [[value for value in item if value is not None] for item in known if None not in item]
        if complete:
            cells = [effect.text(FIGURES[name]) for effect in effects(complete)]
            rows.append([figures.evidence.rate(rate), FIGURES[name].name, str(len(complete)), *cells])
    return _table(["lr", "figure", "seeds", "of the likelihood", "of the mask", "together, beyond their sum"], rows)


def effects(values: Sequence[Sequence[float]]) -> tuple[Estimate, Estimate, Estimate]:
    """Of likelihood and mask, and their interaction. Values are with both, likelihood, mask, neither."""
    first = [(both + likelihood - mask - neither) / 2 for both, likelihood, mask, neither in values]
    second = [(both + mask - likelihood - neither) / 2 for both, likelihood, mask, neither in values]
    together = [both - likelihood - mask + neither for both, likelihood, mask, neither in values]
    return Estimate.of(first), Estimate.of(second), Estimate.of(together)


def _overhead(figures: Figures) -> str:
    rows = []
    for key in ((objective,) for objective in figures.evidence.objectives if figures.evidence.seeds((objective,))):
        cells = [figures.cell(name, key) for name in _OVERHEAD]
        ratio = "1" if key == (BASELINE,) else figures.against("step", key, (BASELINE,)).text(FIGURES["step"], ratio=True)
        rows.append([key[0], str(len(figures.evidence.seeds(key))), *cells, ratio])
    return _table(["objective", "seeds", *(FIGURES[name].name for name in _OVERHEAD), "step, ratio to GRPO's"], rows)


_NOT_RUN = "Not run yet.\n"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    used = [index for index in range(len(columns)) if any(row[index] != "–" for row in rows)]
    return markdown([columns[index] for index in used], [[row[index] for index in used] for row in rows]) if rows else _NOT_RUN
