"""What the papers claim, the figure that stands for it here, and whether the runs agree.

Figures, comparisons and rules were fixed before the first run of the sweep had ended; :data:`FEWEST_PAIRS` after two seeds,
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
"""The learning rate with the largest area under the greedy curve, for each objective by itself."""

NOT_HALF = "not half; undecided whether faster"

Verdict = Callable[[Estimate, float], str]


def half_the_time(result: Estimate, nothing: float) -> str:
    """Of a ratio of steps, for which half is claimed."""
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
    """Claimed to be larger."""
    return "holds" if result.low > nothing else "the opposite" if result.high < nothing else "undecided"


def less(result: Estimate, nothing: float) -> str:
    """Claimed to be smaller."""
    return "holds" if result.high < nothing else "the opposite" if result.low > nothing else "undecided"


def difference(result: Estimate, nothing: float) -> str:
    """Nothing is claimed; whether it differs."""
    return "more" if result.low > nothing else "less" if result.high < nothing else "no difference seen"


@dataclass(frozen=True)
class _Claim:
    """``said``: the claim, and who makes it. ``figure``: its name in FIGURES. ``others``: what TEPO stands beside."""

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
"""Two differences of a figure that moves in steps are often equal, and their interval is then a point."""


VERDICTS = ("holds", "faster", NOT_HALF, "undecided", "the opposite", "too few")
"""How a verdict on something claimed begins; in this order they are counted."""


def summary(figures: Figures, rates: Sequence[str]) -> str:
    """A row for each claim of a paper: at how many comparisons, each learning rate by itself, it got which verdict."""
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
    """A row for each claim and comparison, a column for each learning rate and for the best of each: TEPO's difference or
    ratio with its interval, the pairs, and the verdict.
    """
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
    """The verdict, if there are pairs enough. A ratio with a run that never got there is a bound only, and a verdict that the
    true ratio could change is none.
    """
    if result.seeds < FEWEST_PAIRS or math.isnan(result.low):
        return "too few for a verdict"
    verdict = claim.verdict(result, 1.0 if FIGURES[claim.figure].ratio else 0.0)
    if result.at_least and verdict not in ("undecided", "the opposite", NOT_HALF):
        return f"undecided: TEPO never got there in {result.at_least}"
    if result.at_most and verdict in ("the opposite", NOT_HALF):
        return f"undecided: the other never got there in {result.at_most}"
    return verdict


def _rate_of(figures: Figures, objective: str, rate: str, rates: Sequence[str]) -> str | None:
    """The learning rate itself; for the best of each that with the largest mean area, of those with as many seeds done."""
    if rate != BEST:
        return rate
    areas = {item: [area for area in figures.of("area", (objective, item)).values() if area is not None] for item in rates}
    if len({len(item) for item in areas.values()}) != 1 or not all(areas.values()):
        return None
    return max(rates, key=lambda item: statistics.fmean(areas[item]))
