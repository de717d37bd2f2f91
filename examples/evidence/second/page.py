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


class Comparison(NamedTuple):
    """TEPO beside ``other``; ``where`` is a task, a regime, or TEPO's part that ``other`` has changed."""

    claim: Claim
    where: str
    other: str
    result: Estimate


Sweeps = Mapping[str, Evidence]


def read_all(root: Path) -> Sweeps:
    folder, data = root / "examples/evidence/second", root / "docs/results/data/evidence-second"
    return {name: Evidence.read(folder / f"{name}.yaml", data / name) for name in NAMES}


def missing(evidence: Evidence) -> int:
    return sum(len(evidence.sweep.seeds) - len(evidence.seeds(key)) for key in evidence.keys)


def comparisons(sweeps: Sweeps) -> Iterator[Comparison]:
    of_methods = [(claim, other) for claim in CLAIMS for other in claim.others]
    for (name, task), (claim, other) in itertools.product(TASKS.items(), of_methods):
        yield Comparison(claim, task, other, sweeps[name].against(claim.figure, TUNED, (other, "tuned")))
    for name, choices in REGIMES.items():
        for choice, other in itertools.product(choices, REGIME.others):
            yield Comparison(REGIME, choice, other, sweeps[name].against("area", ("tepo", choice), (other, choice)))
    for said, name in (("what each part does", "parts"), ("what the coefficient does", "coefficient")):
        for key, figure in itertools.product(sweeps[name].keys, ("area", "entropy")):
            result = sweeps["compare-tiny"].against(figure, TUNED, key, sweeps[name])
            yield Comparison(Claim(said, figure, key, DIFFERENCE), "sums", key[0], result)


def verdicts(sweeps: Sweeps) -> str:
    if any(map(missing, sweeps.values())):
        return _NOT_DONE
    everything = list(comparisons(sweeps))
    items = [item for item in everything if item.result.seeds]  # the others: neither method ever reaches the level
    judged = corrected([(item.claim, item.result) for item in items])
    rows = []
    for item, verdict in zip(items, judged, strict=True):
        figure = FIGURES[item.claim.figure]
        text = item.result.text(figure, ratio=figure.ratio)
        alone = item.claim.judge(item.result)
        rows.append([item.claim.said, item.where, item.other, figure.compared, text, alone, f"**{verdict}**"])
    columns = ["question", "where", "TEPO beside", "figure", "of TEPO to the other", "alone", "after Holm's correction"]
    dropped = [
        f"{item.where} beside {item.other}: {FIGURES[item.claim.figure].name}" for item in everything if not item.result.seeds
    ]
    return markdown(columns, rows) + (f"\nDropped, as no run got there: {'; '.join(dropped)}.\n" if dropped else "")


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
