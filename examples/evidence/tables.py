"""Tables of docs/results/evidence.md, and the papers' claims with the figure that tests each.

Figures and rules were fixed before the sweep's first run ended; :data:`_FEWEST_PAIRS` after two seeds, :data:`NOT_HALF`
after three.
"""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from examples.evidence.figures import FIGURES, Estimate, Evidence
from tepo_megatron.tools.results import markdown

_BEST = "best of each"  # each objective's learning rate with the largest area under the greedy curve
BASELINE = "grpo"
NOT_HALF = "not half; undecided whether faster"
_Words = tuple[str, str, str]  # of an interval above no effect, below it, and around it
HALF: _Words = ("the opposite", "faster", "undecided")
MORE: _Words = ("holds", "the opposite", "undecided")
LESS: _Words = ("the opposite", "holds", "undecided")
DIFFERENCE: _Words = ("more", "less", "no difference seen")
_FEWEST_PAIRS = 3  # two differences of a discrete figure are often equal: a point as interval


@dataclass(frozen=True)
class Claim:
    """``figure`` is a name in FIGURES; ``others`` are compared with TEPO."""

    said: str
    figure: str
    others: tuple[str, ...]
    words: _Words

    @property
    def edges(self) -> tuple[float, ...]:
        return (0.5, 1.0) if self.words is HALF else (FIGURES[self.figure].no_effect,)

    def judge(self, result: Estimate) -> str:
        """Undecided if a ratio that is a bound could change the verdict."""
        if result.seeds < _FEWEST_PAIRS or math.isnan(result.low):
            return "too few for a verdict"
        nothing = self.edges[-1]
        verdict = self.words[0 if result.low > nothing else 1 if result.high < nothing else 2]
        if self.words is HALF:
            verdict = self._of_half(verdict, result)
        if result.at_least and verdict not in ("undecided", "the opposite", NOT_HALF):
            return f"undecided: TEPO never got there in {result.at_least}"
        if result.at_most and verdict in ("the opposite", NOT_HALF):
            return f"undecided: the other never got there in {result.at_most}"
        return verdict

    def _of_half(self, verdict: str, result: Estimate) -> str:
        bound = f" (at least: the other never got there in {result.at_most})" if result.at_most else ""
        if verdict == "faster" and result.high <= 0.5:
            return "holds"
        if verdict == "faster":
            return ("faster, by less than half" if result.low > 0.5 else "faster; half is within the interval") + bound
        return NOT_HALF if verdict == "undecided" and result.low > 0.5 else verdict


CLAIMS = (
    Claim("convergence in half the time of GRPO and DAPO (P2)", "80", ("grpo", "dapo"), HALF),
    Claim("convergence in half the time of GRPO and DAPO (P2)", "90", ("grpo", "dapo"), HALF),
    Claim("higher accuracy than GRPO (P1: +1.74 points)", "avg", ("grpo", "dapo", "gspo"), MORE),
    Claim("steadier rewards (P2)", "jitter", ("grpo", "neither"), LESS),
    Claim("steadier rewards (P2)", "fall", ("grpo", "dapo"), LESS),
    Claim("higher gradient norms (P2)", "gradient", ("grpo", "dapo"), MORE),
    Claim("no collapse of the entropy (P2)", "entropy", ("grpo", "dapo"), MORE),
    Claim("no collapse of the entropy (P2)", "entropy90", ("grpo", "dapo"), MORE),
    Claim("asked by reviewers: what the mask alone does", "area", ("no-mask",), DIFFERENCE),
    Claim("asked by reviewers: what the mask alone does", "entropy", ("no-mask",), DIFFERENCE),
    Claim("asked by reviewers: what the likelihood alone does", "area", ("no-likelihood",), DIFFERENCE),
    Claim("asked by reviewers: beside GSPO, whose ratio it has", "area", ("gspo",), DIFFERENCE),
)
_VERDICTS = ("holds", "faster", NOT_HALF, "undecided", "the opposite", "too few")
_LEVEL = 0.05


def holm(values: Sequence[float]) -> list[float]:
    """Corrects p-values for their number (Holm 1979)."""
    result = [1.0] * len(values)
    highest = 0.0
    for rank, index in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        highest = max(highest, min(1.0, values[index] * (len(values) - rank)))
        result[index] = highest
    return result


def corrected(comparisons: Sequence[tuple[Claim, Estimate]]) -> list[str]:
    """Verdicts with Holm's correction over all edges of all comparisons."""
    tests = {
        (number, edge): result.p_value(edge, ratio=FIGURES[claim.figure].ratio)
        for number, (claim, result) in enumerate(comparisons)
        if not claim.judge(result).startswith("too few")
        for edge in claim.edges
    }
    rejected = {test for test, value in zip(tests, holm([*tests.values()]), strict=True) if value <= _LEVEL}
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
    result = {"state": _state({"tiny": tiny, "stack_machine": second, "overhead": overhead}), **comparison(tiny)}
    for rate in tiny.rates:
        result[f"against-{rate}"] = _against(tiny, rate)
        result[f"dynamics-{rate}"] = _by_objective(tiny, _DYNAMICS, rate)
    result["overhead"] = _by_objective(overhead, ("score", "update", "rollout", "step"), ratio=True)
    result["time"] = _by_objective(tiny, ("rollout", "score", "update", "step", "drawn"), tiny.rates[0])
    return result | {f"second-{name}": table for name, table in comparison(second).items()}


_LEARNING = ("70", "80", "90", "area", "greedy", "avg", "pass4", "pass16")
_DYNAMICS = ("entropy", "entropy90", "masked", "unmasked", "mask", "kl", "gradient", "spike", "clipped", "jitter", "fall")
_COMPARED = ("80", "90", "area", "greedy", "avg", "entropy", "gradient")


def comparison(evidence: Evidence) -> dict[str, str]:
    learning = {f"learning-{rate}": _by_objective(evidence, _LEARNING, rate) for rate in evidence.rates}
    return {"summary": _summary(evidence), "claims": _claims(evidence), **learning, "parts": _parts(evidence)}


def _summary(evidence: Evidence) -> str:
    counts: dict[str, Counter[str]] = {}
    for claim in [item for item in CLAIMS if item.words is not DIFFERENCE]:
        for other, rate in itertools.product(claim.others, evidence.rates):
            result = evidence.against(claim.figure, ("tepo", rate), (other, rate))
            if result.seeds:
                verdict = claim.judge(result)
                counts.setdefault(claim.said, Counter())[next(item for item in _VERDICTS if verdict.startswith(item))] += 1
    used = [verdict for verdict in _VERDICTS if any(count[verdict] for count in counts.values())]
    rows = [[said, str(count.total()), *(str(count[verdict]) for verdict in used)] for said, count in counts.items()]
    return _table(["claim", "comparisons", *used], rows)


def _claims(evidence: Evidence) -> str:
    rows, best = [], []
    for claim, other in ((item, other) for item in CLAIMS for other in item.others):
        cells, result = ["–"] * (len(evidence.rates) + 1), None
        figure = FIGURES[claim.figure]
        for index, rate in enumerate([*evidence.rates, None]):
            mine, theirs = (rate or _best_rate(evidence, item) for item in ("tepo", other))
            if mine is None or theirs is None:
                continue
            compared = evidence.against(claim.figure, ("tepo", mine), (other, theirs))
            if compared.seeds:
                place = "" if rate else f"{evidence.rate(mine)} beside {evidence.rate(theirs)}: "
                pairs = f"{compared.seeds} {'pair' if compared.seeds == 1 else 'pairs'}"
                cells[index] = f"{place}{compared.text(figure, ratio=figure.ratio)}, {pairs}: **{claim.judge(compared)}**"
                result = compared if rate is None else None
        if set(cells) != {"–"}:
            rows.append([claim.said, figure.compared, other, *cells])
            best.append((claim, result))
    verdicts = iter(corrected([(claim, result) for claim, result in best if result]))
    rows = [[*row, f"**{next(verdicts)}**" if result else "–"] for row, (_, result) in zip(rows, best, strict=True)]
    heads = [f"lr {evidence.rate(rate)}" for rate in evidence.rates]
    columns = ["claim", "figure", "beside", *heads, _BEST, f"{_BEST}, after Holm's correction"]
    return markdown(columns, rows) if rows else _NOT_RUN


def _best_rate(evidence: Evidence, objective: str) -> str | None:
    """None for unequal numbers of runs."""
    rates = evidence.rates
    areas = {rate: [area for area in evidence.values("area", (objective, rate)).values() if area is not None] for rate in rates}
    if len({len(item) for item in areas.values()}) != 1 or not all(areas.values()):
        return None
    return max(rates, key=lambda item: statistics.fmean(areas[item]))


def _state(sweeps: Mapping[str, Evidence]) -> str:
    parts, counts = [], []
    for name, evidence in sweeps.items():
        keys, seeds = evidence.keys, len(evidence.sweep.seeds)
        count = {key: len(evidence.seeds(key)) for key in keys}
        done, of = sum(count.values()), len(keys) * seeds
        missing = "all are done" if done == of else f"**{of - done} are missing**, and the same commands go on with them"
        when = f" Ended from {min(evidence.dates.values())} to {max(evidence.dates.values())}." if evidence.dates else ""
        machines = Counter(evidence.machines.values())
        counted = (f"{machine} ({runs} runs)" if len(machines) > 1 else machine for machine, runs in machines.most_common())
        where = f" Collected on {'; '.join(counted)}." if machines else ""
        listed = ", ".join(map(str, evidence.sweep.seeds))
        parts.append(f"`examples/evidence/{name}.yaml`: {done} of {of} runs, seeds {listed}; {missing}.{when}{where}\n")
        for objective in dict.fromkeys(key[0] for key in keys) if done < of else ():
            of_rates = [
                "".join([*(f"lr {evidence.rate(rate)}: " for rate in key[1:]), f"{count[key]} of {seeds}"])
                for key in keys
                if key[0] == objective
            ]
            counts.append([name, objective, ", ".join(of_rates)])
    if counts:
        parts.append(markdown(["sweep", "objective", "seeds done"], counts))
    return "\n".join(parts)


def _by_objective(evidence: Evidence, names: Sequence[str], *rate: str, ratio: bool = False) -> str:
    rows = []
    for key in ((objective, *rate) for objective in evidence.objectives if evidence.seeds((objective, *rate))):
        cells = [evidence.cell(name, key) for name in names]
        if ratio:
            compared = evidence.against("step", key, (BASELINE, *rate)).text(FIGURES["step"], ratio=True)
            cells.append("1" if key[0] == BASELINE else compared)
        rows.append([key[0], str(len(evidence.seeds(key))), *cells])
    return _table(["objective", "seeds", *(FIGURES[name].name for name in names), *["step, ratio to GRPO's"] * ratio], rows)


def _against(evidence: Evidence, rate: str) -> str:
    rows = []
    figures = [FIGURES[name] for name in _COMPARED]
    for objective in (item for item in evidence.objectives if item != BASELINE):
        result = [evidence.against(name, (objective, rate), (BASELINE, rate)) for name in _COMPARED]
        if most := max(item.seeds for item in result):
            cells = (item.text(figure, ratio=figure.ratio) for figure, item in zip(figures, result, strict=True))
            rows.append([objective, str(most), *cells])
    heads = [figure.compared for figure in figures]
    return _table(["beside GRPO", "pairs", *heads], rows)


def _parts(evidence: Evidence) -> str:
    rows = []
    for rate, name in itertools.product(evidence.rates, ("area", "greedy", "avg", "entropy")):
        values = [evidence.values(name, (objective, rate)) for objective in ("tepo", "no-mask", "no-likelihood", "neither")]
        known = [[item.get(seed) for item in values] for seed in evidence.sweep.seeds]
        complete = [[value for value in item if value is not None] for item in known if None not in item]
        if complete:
            cells = [effect.text(FIGURES[name]) for effect in effects(complete)]
            rows.append([evidence.rate(rate), FIGURES[name].name, str(len(complete)), *cells])
    return _table(["lr", "figure", "seeds", "of the likelihood", "of the mask", "together, beyond their sum"], rows)


def effects(values: Sequence[Sequence[float]]) -> list[Estimate]:
    """Effects of likelihood and mask, and their interaction. ``values``: with both, likelihood, mask, neither."""
    parts = [
        ((both + likelihood - mask - neither) / 2, (both + mask - likelihood - neither) / 2, both - likelihood - mask + neither)
        for both, likelihood, mask, neither in values
    ]
    return [Estimate.of(part) for part in zip(*parts, strict=True)]


def by_setting(evidence: Evidence, names: Sequence[str], head: str = "") -> str:
    """Has a row for each combination of settings."""
    rows = [
        [", ".join(part for part in key if part != "tuned"), str(len(seeds)), *(evidence.cell(name, key) for name in names)]
        for key in evidence.keys
        if (seeds := evidence.seeds(key))
    ]
    return markdown([head, "seeds", *(FIGURES[name].name for name in names)], rows) if rows else _NOT_RUN


_NOT_RUN = "Not run yet.\n"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    used = [index for index in range(len(columns)) if any(row[index] != "–" for row in rows)]
    return markdown([columns[index] for index in used], [[row[index] for index in used] for row in rows]) if rows else _NOT_RUN
