"""Makes tables and pictures of docs/results/evidence-second.md from the runs that keep.py has kept.

    python -m examples.evidence.second.keep updates out/evidence-second/updates    # of each sweep, after its last run
    python -m examples.evidence.second.page

Comparisons and rules are those of docs/results/evidence-plan.md. There is no verdict before the last run.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from examples.evidence.figures import FIGURES, Estimate, Evidence, Key
from examples.evidence.shared import COLOURS, STYLE, filled, plot_curve, plot_frontier
from examples.evidence.tables import DIFFERENCE, HALF, LESS, MORE, Claim, by_setting, corrected
from tepo_megatron.tools.results import markdown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROOT = Path(__file__).parents[3]
TASKS = {"compare-tiny": "sums", "compare-stack_machine": "programs", "compare-long_arithmetic": "long arithmetic"}
REGIMES = {"updates": ("u8", "u16"), "overlap": ("k1", "k4")}
NAMES = (*TASKS, *REGIMES, "parts", "coefficient")
TUNED = ("tepo", "tuned")
_LEARNING = ("80", "90", "area", "greedy", "avg", "pass16")
_DYNAMICS = ("entropy", "entropy90", "mask", "gradient", "clipped", "jitter", "fall")
_NOT_DONE = "Some runs are missing, so nothing is judged yet.\n"

CLAIMS = (
    Claim("convergence in half the time (P2)", "90", ("grpo", "dapo"), HALF),
    Claim("higher accuracy", "avg", ("grpo", "dapo", "gspo", "luspo", "cispo"), MORE),
    Claim("steadier rewards (P2)", "jitter", ("grpo", "dapo"), LESS),
    Claim("higher gradient norms (P2)", "gradient", ("grpo", "dapo"), MORE),
    Claim("no collapse of the entropy (P2)", "entropy", ("grpo", "dapo"), MORE),
    Claim("no collapse of the entropy (P2)", "entropy90", ("grpo", "dapo"), MORE),
)
REGIME = Claim("the regime that the method is for", "area", ("grpo", "dapo"), DIFFERENCE)


_HEADS = {
    "methods": ("question", "figure", "TEPO beside"),
    "regimes": ("question", "figure", "TEPO beside"),
    "parts": ("TEPO beside",),
}


class Comparison(NamedTuple):
    """TEPO beside another setting. ``table`` is a name in _HEADS, ``row`` has a text for each of its columns."""

    claim: Claim
    table: str
    row: tuple[str, ...]
    column: str
    result: Estimate


Sweeps = Mapping[str, Evidence]


def read_all(root: Path) -> Sweeps:
    folder, data = root / "examples/evidence/second", root / "docs/results/data/evidence-second"
    return {name: Evidence.read(folder / f"{name}.yaml", data / name) for name in NAMES}


def missing(evidence: Evidence) -> int:
    return sum(len(evidence.sweep.seeds) - len(evidence.seeds(key)) for key in evidence.keys)


def comparisons(sweeps: Sweeps) -> Iterator[Comparison]:
    for claim, (name, task) in itertools.product(CLAIMS, TASKS.items()):
        for other in claim.others:
            result = sweeps[name].against(claim.figure, TUNED, (other, "tuned"))
            yield Comparison(claim, "methods", (claim.said, FIGURES[claim.figure].compared, other), task, result)
    for name, choices in REGIMES.items():
        for choice, other in itertools.product(choices, REGIME.others):
            result = sweeps[name].against(REGIME.figure, ("tepo", choice), (other, choice))
            yield Comparison(REGIME, "regimes", (REGIME.said, FIGURES[REGIME.figure].compared, other), choice, result)
    for name in ("parts", "coefficient"):
        for key, figure in itertools.product(sweeps[name].keys, ("area", "entropy")):
            result = sweeps["compare-tiny"].against(figure, TUNED, key, sweeps[name])
            claim = Claim(name, figure, key, DIFFERENCE)
            yield Comparison(claim, "parts", (key[0],), FIGURES[figure].compared, result)


def verdicts(sweeps: Sweeps) -> str:
    """A cell has the verdict after Holm's correction, and the one without if it differs."""
    if any(map(missing, sweeps.values())):
        return _NOT_DONE
    everything = list(comparisons(sweeps))
    items = [item for item in everything if item.result.seeds]  # the others: neither method ever reaches the level
    judged = corrected([(item.claim, item.result) for item in items])
    tables: dict[str, dict[tuple[str, ...], dict[str, str]]] = {}
    for item, verdict in zip(items, judged, strict=True):
        figure, alone = FIGURES[item.claim.figure], item.claim.judge(item.result)
        text = f"{item.result.text(figure, ratio=figure.ratio)}: **{verdict}**"
        row = tables.setdefault(item.table, {}).setdefault(item.row, {})
        row[item.column] = text if alone == verdict else f"{text} (alone: {alone})"
    parts = []
    for name, rows in tables.items():
        columns = list(dict.fromkeys(column for row in rows.values() for column in row))
        lines = [[*row, *(cells.get(column, "–") for column in columns)] for row, cells in rows.items()]
        parts.append(markdown([*_HEADS[name], *columns], lines))
    dropped = [f"{', '.join(item.row[1:])}, {item.column}" for item in everything if not item.result.seeds]
    return "\n".join(parts) + (f"\nDropped, as no run got there: {'; '.join(dropped)}.\n" if dropped else "")


def state(sweeps: Sweeps) -> str:
    rows, runs_on = [], Counter[str]()
    for name, evidence in sweeps.items():
        total = len(evidence.keys) * len(evidence.sweep.seeds)
        when = f"{min(evidence.dates.values())} to {max(evidence.dates.values())}" if evidence.dates else "–"
        rows.append([f"`{name}.yaml`", f"{total - missing(evidence)} of {total}", when])
        runs_on.update(evidence.machines.values())
    machines = "; ".join(f"{machine} ({runs} runs)" for machine, runs in runs_on.most_common())
    return markdown(["sweep", "runs", "ended"], rows) + f"\n{machines}\n"


def page_text(root: Path) -> str:
    sweeps = read_all(root)
    parts = {"state": state(sweeps), "verdicts": verdicts(sweeps)}
    for name in TASKS:
        parts[f"{name}-learning"], parts[f"{name}-dynamics"] = (
            by_setting(sweeps[name], kind) for kind in (_LEARNING, _DYNAMICS)
        )
    parts |= {
        name: by_setting(sweeps[name], ("90", "area", "avg", "entropy", "clipped")) for name in NAMES if name not in TASKS
    }
    page = root / "docs/results/evidence-second.md"
    return filled(page.read_text(encoding="utf-8"), parts, str(page))


def _curves(axes: Axes, evidence: Evidence, keys: Sequence[Key]) -> None:
    axes.set(xlabel="step", ylabel="held-out greedy, %")
    for key, colour in zip(keys, COLOURS, strict=False):
        plot_curve(axes, key[0], evidence.curves(key, "accuracy/greedy"), colour, scale=100.0)


def _frontier(axes: Axes, evidence: Evidence, keys: Sequence[Key]) -> None:
    axes.set(xlabel="entropy, nats a token (a run moves from right to left)", ylabel="held-out greedy, %")
    for key, colour in zip(keys, COLOURS, strict=False):
        plot_frontier(axes, key[0], evidence, key, colour)


def draw(root: Path) -> list[Path]:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    sweeps = read_all(root)
    tasks = [(task, sweeps[name], sweeps[name].keys) for name, task in TASKS.items()]
    regimes = [
        (choice, sweeps[name], [key for key in sweeps[name].keys if key[1] == choice])
        for name, choices in REGIMES.items()
        for choice in choices
    ]
    written = []
    for stem, plot, panels in (("learning", _curves, tasks), ("frontier", _frontier, tasks), ("regimes", _curves, regimes)):
        with rc_context(STYLE):
            figure: Figure = Figure(figsize=(5.0 * len(panels), 4.2))
            for axes, (title, evidence, keys) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
                plot(axes, evidence, keys)
                axes.set_title(title if evidence.runs else f"{title}: not run yet")
                if axes.get_legend_handles_labels()[0]:
                    axes.legend(ncols=2)
            written.append(root / f"docs/images/evidence-tuned-{stem}.png")
            figure.savefig(written[-1], format="png", metadata={"Software": None})
    return written


def main(root: Path = ROOT) -> None:
    page = root / "docs/results/evidence-second.md"
    page.write_text(page_text(root), encoding="utf-8")
    for path in (page, *draw(root)):
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
