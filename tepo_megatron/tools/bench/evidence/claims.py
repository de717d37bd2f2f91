"""The papers' claims, the figure that tests each, and whether the runs agree.

Figures, comparisons and rules were fixed before the sweep's first run ended; :data:`FEWEST_PAIRS` after two seeds,
:data:`NOT_HALF` after three.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tepo_megatron.tools.bench.evidence.figures import FIGURES, Estimate, Figures
from tepo_megatron.tools.results import markdown

BEST = "best of each"
"""Each objective's learning rate with the largest area under the greedy curve."""

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


def more(result: Estimate, nothing: float) -> str:
    return "holds" if result.low > nothing else "the opposite" if result.high < nothing else "undecided"


def less(result: Estimate, nothing: float) -> str:
    return "holds" if result.high < nothing else "the opposite" if result.low > nothing else "undecided"


def difference(result: Estimate, nothing: float) -> str:
    return "more" if result.low > nothing else "less" if result.high < nothing else "no difference seen"


@dataclass(frozen=True)
class _Claim:
    """``said``: the claim and its source. ``figure``: a name in FIGURES. ``others``: objectives compared with TEPO."""

    said: str
    figure: str
    others: tuple[str, ...]
    verdict: Verdict


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


FEWEST_PAIRS = 3
"""Two differences of a discrete figure are often equal; their interval is then a point."""


VERDICTS = ("holds", "faster", NOT_HALF, "undecided", "the opposite", "too few")


def summary(figures: Figures, rates: Sequence[str]) -> str:
    """One row per claim: how often, each learning rate separately, it got each verdict."""
    counts: dict[str, Counter[str]] = {}
    for claim in CLAIMS:
        if claim.verdict is difference:
            continue
        for other, rate in itertools.product(claim.others, rates):
            result = figures.against(claim.figure, ("tepo", rate), (other, rate))
            if result.seeds:
                verdict = judged(claim, result)
                counts.setdefault(claim.said, Counter())[next(item for item in VERDICTS if verdict.startswith(item))] += 1
    if not counts:
        return "Not run yet.\n"
    used = [verdict for verdict in VERDICTS if any(count[verdict] for count in counts.values())]
    rows = [[said, str(count.total()), *(str(count[verdict]) for verdict in used)] for said, count in counts.items()]
    return markdown(["claim", "comparisons", *used], rows)


def claims(figures: Figures, rates: Sequence[str]) -> str:
    """One row per claim and comparison, one column per learning rate and for the best: TEPO's difference or ratio, interval,
    pairs, verdict."""
    rows = []
    for claim in CLAIMS:
        figure = FIGURES[claim.figure]
        for other in claim.others:
            cells = [_cell(figures, claim, other, rate, rates) for rate in (*rates, BEST)]
            if any(cell != "–" for cell in cells):
                rows.append([claim.said, f"{figure.name}, {'ratio' if figure.ratio else 'difference'}", other, *cells])
    if not rows:
        return "Not run yet.\n"
    heads = [f"lr {figures.evidence.rate(rate)}" for rate in rates]
    return markdown(["claim", "figure", "beside", *heads, BEST], rows)


def _cell(figures: Figures, claim: _Claim, other: str, rate: str, rates: Sequence[str]) -> str:
    mine, theirs = (_rate_of(figures, item, rate, rates) for item in ("tepo", other))
    if mine is None or theirs is None:
        return "–"
    result = figures.against(claim.figure, ("tepo", mine), (other, theirs))
    if not result.seeds:
        return "–"
    figure = FIGURES[claim.figure]
    index = f"{figures.evidence.rate(mine)} beside {figures.evidence.rate(theirs)}: " if rate == BEST else ""
    pairs = f"{result.seeds} {'pair' if result.seeds == 1 else 'pairs'}"
    return f"{index}{result.text(figure, ratio=figure.ratio)}, {pairs}: **{judged(claim, result)}**"


def judged(claim: _Claim, result: Estimate) -> str:
    """The verdict, given enough pairs; none if a run never reached the value (its ratio is a bound) and the true ratio could
    change it."""
    if result.seeds < FEWEST_PAIRS or math.isnan(result.low):
        return "too few for a verdict"
    verdict = claim.verdict(result, 1.0 if FIGURES[claim.figure].ratio else 0.0)
    if result.at_least and verdict not in ("undecided", "the opposite", NOT_HALF):
        return f"undecided: TEPO never got there in {result.at_least}"
    if result.at_most and verdict in ("the opposite", NOT_HALF):
        return f"undecided: the other never got there in {result.at_most}"
    return verdict


def _rate_of(figures: Figures, objective: str, rate: str, rates: Sequence[str]) -> str | None:
    if rate != BEST:
        return rate
    areas = {item: [area for area in figures.of("area", (objective, item)).values() if area is not None] for item in rates}
    if len({len(item) for item in areas.values()}) != 1 or not all(areas.values()):
        return None
    return max(rates, key=lambda item: statistics.fmean(areas[item]))
