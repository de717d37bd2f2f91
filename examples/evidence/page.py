"""Collects the runs of the evidence's sweeps, and makes tables and pictures of docs/results/evidence.md.

    tepo sweep examples/evidence/tiny.yaml                 # resumes if interrupted
    tepo sweep examples/evidence/stack_machine.yaml
    tepo sweep examples/evidence/overhead.yaml
    python -m examples.evidence.page --tiny out/evidence-tiny --stack-machine out/evidence-stack-machine \\
        --overhead out/evidence-overhead

Folders may be unfinished or omitted: earlier data stays in docs/results/data/evidence.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from examples.evidence.figures import FIGURES, Evidence
from examples.evidence.shared import COLOURS, INK, STYLE, filled, plot_curve, plot_frontier
from examples.evidence.tables import BASELINE, make_tables

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SWEEPS = ("tiny", "stack_machine", "overhead")
_MOST_BYTES = 5_000_000  # all data kept of the runs


def make(root: Path, folders: Mapping[str, Path]) -> list[str]:
    """Returns lines of progress. Raises ValueError for unsuitable data or page."""
    from matplotlib import rc_context

    said = []
    data = root / "docs/results/data/evidence"
    for name, folder in folders.items():
        if not folder.is_dir():
            raise ValueError(f"{folder} is no folder; give the output of examples/evidence/{name}.yaml")
        done = Evidence.collect(root / f"examples/evidence/{name}.yaml", folder, data / name)
        said.append(f"{folder}: {done} runs are done")
    written = [root / "docs/results/evidence.md"]
    written[0].write_text(page_text(root), encoding="utf-8")
    (root / "docs/images").mkdir(parents=True, exist_ok=True)
    sweeps = _read_all(root)
    for picture in (picture for picture in _PICTURES if any(sweeps[picture.sweep].runs.values())):
        written.append(root / f"docs/images/{picture.stem}.png")
        with rc_context(STYLE):
            picture.draw(sweeps[picture.sweep], picture).savefig(written[-1], format="png", metadata={"Software": None})
    size = sum(path.stat().st_size for path in data.rglob("*") if path.is_file())
    if size > _MOST_BYTES:
        raise ValueError(f"{data} has {size} bytes, more than {_MOST_BYTES}; keep fewer columns")
    return [*said, *(f"wrote {path}" for path in written), f"{data}: {size} bytes"]


def _read_all(root: Path) -> dict[str, Evidence]:
    data = root / "docs/results/data/evidence"
    return {name: Evidence.read(root / f"examples/evidence/{name}.yaml", data / name) for name in SWEEPS}


def page_text(root: Path) -> str:
    """Fills what is between ``<!-- NAME -->`` and ``<!-- end -->``. Raises ValueError unless each name has one place."""
    sweeps = _read_all(root)
    parts = make_tables(*sweeps.values())
    for picture in _PICTURES:
        drawn = any(sweeps[picture.sweep].runs.values())
        image = f"![{picture.said}](../images/{picture.stem}.png)\n"
        parts[picture.stem.replace("evidence", "picture")] = image if drawn else "Not run yet.\n"
    text = (root / "docs/results/evidence.md").read_text(encoding="utf-8")
    return filled(text, parts, "docs/results/evidence.md")


_COLUMNS = {
    "what it is compared with": ("tepo", "grpo", "dapo", "gspo", "luspo", "cispo"),
    "its parts": (
        *("tepo", "no-mask", "no-likelihood", "neither", "tepo-covariance", "tepo-first-order", "sequence-mean", "constant"),
    ),
}


def _grid(evidence: Evidence, label: str, below: str, draw: Callable[[Axes, str, str, str], None]) -> Figure:
    """``draw`` has arguments axes, objective, rate, colour."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.0, 3.9 * len(evidence.rates)))
    grid = figure.subplots(len(evidence.rates), len(_COLUMNS), squeeze=False)
    for row, rate in zip(grid, evidence.rates, strict=True):
        for axes, (title, objectives) in zip(row, _COLUMNS.items(), strict=True):
            axes.set(title=f"TEPO and {title}, lr {evidence.rate(rate)}", ylabel=label, xlabel=below)
            for name, colour in zip(objectives, COLOURS, strict=False):
                draw(axes, name, rate, colour)
            if axes.get_legend_handles_labels()[0]:
                axes.legend(ncols=2)
    return figure


def _curves(evidence: Evidence, picture: _Picture) -> Figure:
    def curve(axes: Axes, name: str, rate: str, colour: str) -> None:
        plot_curve(
            axes, name, evidence.curves((name, rate), picture.column), colour, smooth=picture.smooth, scale=picture.scale
        )

    figure = _grid(evidence, picture.label, "step", curve)
    limits = [axes.get_ylim() for axes in figure.axes]
    low, high = min(low for low, _ in limits), max(high for _, high in limits)
    for axes in figure.axes:
        axes.set_ylim(min(low, 0.0) if low < 0.2 * high else low, high)
    return figure


def _frontiers(evidence: Evidence, picture: _Picture) -> Figure:
    def path(axes: Axes, name: str, rate: str, colour: str) -> None:
        plot_frontier(axes, name, evidence, (name, rate), colour)

    return _grid(evidence, picture.label, "entropy, nats a token (a run moves from right to left)", path)


def _times(evidence: Evidence, picture: _Picture) -> Figure:
    from matplotlib.figure import Figure

    objectives = [item for item in evidence.objectives if item != BASELINE and evidence.seeds((item,))]
    figure = Figure(figsize=(8.0, 1.2 + 0.6 * max(1, len(objectives))))
    axes = figure.subplots()
    axes.axvline(1.0, color=INK, linewidth=1)
    for index, name in enumerate(objectives):
        other = evidence.values("step", (BASELINE,))
        ratios = [value / other[s] for s, value in evidence.values("step", (name,)).items() if value and other.get(s)]  # type: ignore[operator]
        result = evidence.against("step", (name,), (BASELINE,))
        axes.plot(ratios, [index + 0.14] * len(ratios), "o", color=COLOURS[1], markersize=5, alpha=0.6)
        if not math.isnan(result.low):
            axes.plot([result.low, result.high], [index - 0.1] * 2, color=COLOURS[0], linewidth=2)
        axes.plot([result.mean], [index - 0.1], "s", color=COLOURS[0], markersize=7)
    axes.set_yticks(range(len(objectives)), objectives)
    axes.set(title="Time of a step, as a ratio to GRPO's with the same seed", ylim=(len(objectives) - 0.5, -0.5))
    axes.set_xlabel(f"{FIGURES['step'].name}, ratio: seeds (round), mean and its 95 % interval (square)")
    return figure


@dataclass(frozen=True)
class _Picture:
    stem: str
    said: str
    column: str
    label: str
    smooth: bool = True
    scale: float = 1.0
    sweep: str = "tiny"
    draw: Callable[[Evidence, _Picture], Figure] = _curves


_GREEDY = ("accuracy/greedy", "held-out greedy, %")
_ENTROPY = ("entropy/mean", "entropy, nats a token")
_PICTURES = (
    _Picture("evidence-learning", "Held-out greedy accuracy by step", *_GREEDY, smooth=False, scale=100.0),
    _Picture("evidence-entropy", "Entropy by step", *_ENTROPY),
    _Picture("evidence-chosen", "ΔH of chosen tokens", "entropy/delta_masked", "ΔH of chosen tokens, 10⁻³ nats", scale=1e3),
    _Picture("evidence-others", "ΔH of other tokens", "entropy/delta_unmasked", "ΔH of other tokens, 10⁻³ nats", scale=1e3),
    _Picture("evidence-gradient", "Gradient norm by step", "grad_norm", "gradient norm before clipping"),
    _Picture("evidence-mask", "Share of chosen tokens by step", "mask/fraction", "chosen tokens, %", scale=100.0),
    _Picture("evidence-kl", "KL from the old policy by step", "kl/mean", "KL from the old policy, 10⁻³ nats", scale=1e3),
    _Picture("evidence-frontier", "Held-out greedy against entropy", *_GREEDY, draw=_frontiers),
    _Picture("evidence-second-learning", "Held-out greedy by step", *_GREEDY, False, 100.0, "stack_machine"),
    _Picture("evidence-second-entropy", "Entropy by step", *_ENTROPY, sweep="stack_machine"),
    _Picture("evidence-second-frontier", "Held-out greedy against entropy", *_GREEDY, sweep="stack_machine", draw=_frontiers),
    _Picture("evidence-time", "Time of a step beside GRPO's", "time/step", "", sweep="overhead", draw=_times),
)


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.evidence.page", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    for name in SWEEPS:
        text = f"output of examples/evidence/{name}.yaml"
        parser.add_argument(f"--{name.replace('_', '-')}", type=Path, metavar="FOLDER", help=text)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[2], help="repository whose page is made")
    args = parser.parse_args()
    folders = {name: folder for name in SWEEPS if (folder := getattr(args, name)) is not None}
    try:
        for line in make(args.root, folders):
            print(line)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    _main()
