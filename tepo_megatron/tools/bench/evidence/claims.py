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


def half_the_time(found: Estimate, nothing: float) -> str:
    """Of a ratio of steps, for which half is claimed."""
    if found.high < nothing and found.low > 0.5:
        return "faster, by less than half" + _bound(found)
    if found.high < nothing:
        return "holds" if found.high <= 0.5 else "faster; half is within the interval" + _bound(found)
    if found.low > nothing:
        return "the opposite"
    return NOT_HALF if found.low > 0.5 else "undecided"


def _bound(found: Estimate) -> str:
    return f" (at least: the other never got there in {found.at_most})" if found.at_most else ""


def more(found: Estimate, nothing: float) -> str:
    """Claimed to be larger."""
    return "holds" if found.low > nothing else "the opposite" if found.high < nothing else "undecided"


def less(found: Estimate, nothing: float) -> str:
    """Claimed to be smaller."""
    return "holds" if found.high < nothing else "the opposite" if found.low > nothing else "undecided"


def difference(found: Estimate, nothing: float) -> str:
    """Nothing is claimed; whether it differs."""
    return "more" if found.low > nothing else "less" if found.high < nothing else "no difference seen"


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
            found = figures.against(claim.figure, ("tepo", rate), (other, rate))
            if found.seeds:
                verdict = judged(claim, found)
                counts.setdefault(claim.said, Counter())[next(each for each in VERDICTS if verdict.startswith(each))] += 1
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
    mine, theirs = (_rate_of(figures, each, rate, rates) for each in ("tepo", other))
    if mine is None or theirs is None:
        return "–"
    found = figures.against(claim.figure, ("tepo", mine), (other, theirs))
    if not found.seeds:
        return "–"
    figure = FIGURES[claim.figure]
    at = f"{figures.evidence.rate(mine)} beside {figures.evidence.rate(theirs)}: " if rate == BEST else ""
    pairs = f"{found.seeds} {'pair' if found.seeds == 1 else 'pairs'}"
    return f"{at}{found.text(figure, ratio=figure.ratio)}, {pairs}: **{judged(claim, found)}**"


def judged(claim: _Claim, found: Estimate) -> str:
    """The verdict, if there are pairs enough. A ratio with a run that never got there is a bound only, and a verdict that the
    true ratio could change is none.
    """
    if found.seeds < FEWEST_PAIRS or math.isnan(found.low):
        return "too few for a verdict"
    verdict = claim.verdict(found, 1.0 if FIGURES[claim.figure].ratio else 0.0)
    if found.at_least and verdict not in ("undecided", "the opposite", NOT_HALF):
        return f"undecided: TEPO never got there in {found.at_least}"
    if found.at_most and verdict in ("the opposite", NOT_HALF):
        return f"undecided: the other never got there in {found.at_most}"
    return verdict


def _rate_of(figures: Figures, objective: str, rate: str, rates: Sequence[str]) -> str | None:
    """The learning rate itself; for the best of each that with the largest mean area, of those with as many seeds done."""
    if rate != BEST:
        return rate
    areas = {each: [area for area in figures.of("area", (objective, each)).values() if area is not None] for each in rates}
    if len({len(each) for each in areas.values()}) != 1 or not all(areas.values()):
        return None
    return max(rates, key=lambda each: statistics.fmean(areas[each]))
