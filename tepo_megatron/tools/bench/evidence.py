"""Collects the runs of the evidence's sweeps, and makes tables and pictures of docs/results/evidence.md.

    tepo sweep examples/evidence/tiny.yaml                 # resumes if interrupted
    tepo sweep examples/evidence/stack_machine.yaml
    tepo sweep examples/evidence/overhead.yaml
    python -m tepo_megatron.tools.bench.evidence --tiny out/evidence-tiny --stack-machine out/evidence-stack-machine \\
        --overhead out/evidence-overhead

Folders may be unfinished or omitted: earlier data stays in docs/results/data/evidence, and the page lists the finished seeds.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tepo_megatron.tools.bench.evidence_figures import FIGURES, Evidence, Figures, Key, collect, points, read
from tepo_megatron.tools.bench.evidence_tables import BASELINE, make_tables

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SWEEPS = ("tiny", "stack_machine", "overhead")
MOST_BYTES = 5_000_000  # all data kept of the runs


def make(root: Path, folders: Mapping[str, Path]) -> list[str]:
    """``folders`` maps a sweep to its output. Returns lines of progress. Raises ValueError for unsuitable data or page."""
    said = []
    for name, folder in folders.items():
        if not folder.is_dir():
            raise ValueError(f"{folder} is no folder; give the output of examples/evidence/{name}.yaml")
        done = collect(root / f"examples/evidence/{name}.yaml", folder, _results_of(root, name))
        said.append(f"{folder}: {len(done)} runs are done")
    tiny, second, overhead = (evidence_of(root, name) for name in SWEEPS)
    tables = make_tables(tiny, second, overhead)
    pictures = _draw(tiny, second, overhead, root / "docs/images")
    data = root / "docs/results/data/evidence"
    page = root / "docs/results/evidence.md"
    page.write_text(fill(page.read_text(encoding="utf-8"), {**tables, **shown(tiny, second, overhead)}), encoding="utf-8")
    size = sum(path.stat().st_size for path in data.rglob("*") if path.is_file())
    if size > MOST_BYTES:
        raise ValueError(f"{data} has {size} bytes, more than {MOST_BYTES}; keep fewer columns")
    return [*said, *(f"wrote {path}" for path in (page, *pictures)), f"{data}: {size} bytes"]


def _results_of(root: Path, name: str) -> Path:
    return root / "docs/results/data/evidence" / name


def evidence_of(root: Path, name: str) -> Evidence:
    return read(root / f"examples/evidence/{name}.yaml", _results_of(root, name))


def fill(text: str, tables: Mapping[str, str]) -> str:
    """Fills between ``<!-- NAME -->`` and ``<!-- end -->``. Raises ValueError unless each name has one place."""
    names = re.findall(r"<!-- (?!end)([\w-]+) -->", text)
    if sorted(names) != sorted(tables):
        raise ValueError(
            f"docs/results/evidence.md has places for {', '.join(sorted(names))}; the tables are {', '.join(sorted(tables))}"
        )
    return re.sub(
        r"<!-- (?!end)([\w-]+) -->\n.*?<!-- end -->",
        lambda result: f"<!-- {result[1]} -->\n\n{tables[result[1]]}\n<!-- end -->",
        text,
        flags=re.S,
    )


_INK, _FAINT = "#22303c", "#d9dfe5"
_COLOURS = ("#d9480f", "#2b6cb0", "#2f9e44", "#9c6ade", "#b08900", "#0b7285", "#c2255c", "#495057")  # TEPO is always the first
_BASELINES = ("tepo", "grpo", "dapo", "gspo", "luspo", "cispo")
_ABLATIONS = ("tepo", "no-mask", "no-likelihood", "neither", "tepo-covariance", "tepo-first-order", "sequence-mean", "constant")
_SMOOTHED = 5


class _Picture(NamedTuple):
    stem: str
    column: str
    label: str
    said: str
    smooth: bool = True
    scale: float = 1.0


_PICTURES = (
    _Picture("evidence-learning", "accuracy/greedy", "held-out greedy, %", "Held-out greedy accuracy by step", False, 100.0),
    _Picture("evidence-entropy", "entropy/mean", "entropy, nats a token", "Entropy by step"),
    _Picture("evidence-chosen", "entropy/delta_masked", "ΔH of chosen tokens, 10⁻³ nats", "ΔH of chosen tokens", scale=1e3),
    _Picture("evidence-others", "entropy/delta_unmasked", "ΔH of other tokens, 10⁻³ nats", "ΔH of other tokens", scale=1e3),
    _Picture("evidence-gradient", "grad_norm", "gradient norm before clipping", "Gradient norm by step"),
    _Picture("evidence-mask", "mask/fraction", "chosen tokens, %", "Share of chosen tokens by step", scale=100.0),
    _Picture("evidence-kl", "kl/mean", "KL from the old policy, 10⁻³ nats", "KL from the old policy by step", scale=1e3),
)
_OF_SECOND = (
    _Picture("evidence-second-learning", "accuracy/greedy", "held-out greedy, %", "Held-out greedy by step", False, 100.0),
    _Picture("evidence-second-entropy", "entropy/mean", "entropy, nats a token", "Entropy by step"),
)
_FRONTIER = _Picture("evidence-frontier", "accuracy/greedy", "", "Held-out greedy against entropy")
_SECOND_FRONTIER = _FRONTIER._replace(stem="evidence-second-frontier")
_TIME = _Picture("evidence-time", "time/step", "", "Time of a step beside GRPO's")


def _draw(tiny: Evidence, second: Evidence, overhead: Evidence, folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for picture, evidence in _pictures(tiny, second, overhead):
        if any(evidence.runs.values()):
            written.append(folder / f"{picture.stem}.png")
            if picture is _TIME:
                _times(evidence, written[-1])
            elif picture in (_FRONTIER, _SECOND_FRONTIER):
                _frontier(evidence, written[-1])
            else:
                _curves(evidence, picture, written[-1])
    return written


def shown(tiny: Evidence, second: Evidence, overhead: Evidence) -> dict[str, str]:
    result = {}
    for picture, evidence in _pictures(tiny, second, overhead):
        drawn = any(evidence.runs.values())
        place = picture.stem.replace("evidence", "picture")
        result[place] = f"![{picture.said}](../images/{picture.stem}.png)\n" if drawn else "Not run yet.\n"
    return result


def _pictures(tiny: Evidence, second: Evidence, overhead: Evidence) -> list[tuple[_Picture, Evidence]]:
    of_tiny = [(picture, tiny) for picture in (*_PICTURES, _FRONTIER)]
    of_second = [(picture, second) for picture in (*_OF_SECOND, _SECOND_FRONTIER)]
    return [*of_tiny, *of_second, (_TIME, overhead)]


def mean_curve(runs: Sequence[Sequence[tuple[int, float]]], window: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Steps [N], and [3, N] with mean, minimum and maximum, smoothed by a centred mean over ``window`` points."""
    common = sorted(set.intersection(*(({step for step, _ in run}) for run in runs))) if runs else []
    if not common:
        return np.empty(0), np.empty((3, 0))
    values = np.array([[dict(run)[step] for step in common] for run in runs])
    ones = np.ones(min(window, len(common)))
    weight = np.convolve(np.ones(len(common)), ones, mode="same")
    smooth = np.array([np.convolve(run, ones, mode="same") / weight for run in values])
    return np.array(common), np.stack([smooth.mean(0), smooth.min(0), smooth.max(0)])


def _figure(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.10, h_pad=0.08, hspace=0.03, wspace=0.03)
    figure = Figure(figsize=(width, height), dpi=110, layout=layout, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _curves(evidence: Evidence, picture: _Picture, png: Path) -> None:
    rates = list(evidence.sweep.axes["lr"])
    figure = _figure(12.0, 3.9 * len(rates))
    highest = []
    for row, rate in enumerate(rates):
        for column, (title, objectives) in enumerate((("compared with", _BASELINES), ("its parts", _ABLATIONS))):
            axes = figure.add_subplot(len(rates), 2, 2 * row + column + 1)
            lr = evidence.rate(rate)
            _plain(axes, f"TEPO and what it is {title}, lr {lr}" if not column else f"TEPO and {title}, lr {lr}", picture.label)
            axes.set_xlabel("step", fontsize=10, color=_INK)
            for name, colour in zip(objectives, _COLOURS, strict=False):
                _curve(axes, evidence, (name, rate), picture, colour)
            if axes.get_legend_handles_labels()[0]:
                axes.legend(fontsize=8.5, framealpha=0.85, edgecolor="none", labelcolor=_INK, ncols=2)
            highest.append(axes)
    low, high = min(axes.get_ylim()[0] for axes in highest), max(axes.get_ylim()[1] for axes in highest)
    for axes in highest:
        axes.set_ylim(min(low, 0.0) if low < 0.2 * high else low, high)
    figure.savefig(png, format="png", metadata={"Software": None})


def _curve(axes: Axes, evidence: Evidence, key: Key, picture: _Picture, colour: str) -> None:
    runs = [points(evidence.runs[key][seed], picture.column) for seed in evidence.seeds(key)]
    runs = [run for run in runs if run]
    steps, values = mean_curve(runs, _SMOOTHED if picture.smooth else 1)
    if not steps.size:
        return
    mean, low, high = values * picture.scale
    first = key[0] == "tepo"
    label = f"{key[0]} ({len(runs)})"
    axes.plot(steps, mean, color=colour, linewidth=2.4 if first else 1.5, label=label, zorder=4 if first else 3)
    if len(runs) > 1:
        axes.fill_between(steps, low, high, color=colour, alpha=0.14 if first else 0.07, linewidth=0, zorder=2)


def frontier(evidence: Evidence, key: Key) -> np.ndarray:
    """[N, 2]: entropy and greedy accuracy at each evaluated step, smoothed as in the curves and averaged over seeds."""
    runs = [evidence.runs[key][seed] for seed in evidence.seeds(key)]
    entropies, accuracies = (
        mean_curve([curve for rows in runs if (curve := points(rows, column))], _SMOOTHED)
        for column in ("entropy/mean", "accuracy/greedy")
    )
    steps = [step for step in accuracies[0] if step in entropies[0]]
    rows = [[values[0][list(known).index(step)] for known, values in (entropies, accuracies)] for step in steps]
    return np.array(rows).reshape(-1, 2)


def _frontier(evidence: Evidence, png: Path) -> None:
    rates = list(evidence.sweep.axes["lr"])
    figure = _figure(12.0, 3.9 * len(rates))
    for row, rate in enumerate(rates):
        for column, (title, objectives) in enumerate((("compared with", _BASELINES), ("its parts", _ABLATIONS))):
            axes = figure.add_subplot(len(rates), 2, 2 * row + column + 1)
            _plain(axes, f"TEPO and {'what it is ' * (not column)}{title}, lr {evidence.rate(rate)}", "held-out greedy, %")
            axes.set_xlabel("entropy, nats a token (a run moves from right to left)", fontsize=10, color=_INK)
            for name, colour in zip(objectives, _COLOURS, strict=False):
                path = frontier(evidence, (name, rate))
                if len(path):
                    width = 2.4 if name == "tepo" else 1.5
                    axes.plot(path[:, 0], 100 * path[:, 1], color=colour, linewidth=width, label=name)
                    axes.plot(path[-1:, 0], 100 * path[-1:, 1], "o", color=colour, markersize=6)
            if axes.get_legend_handles_labels()[0]:
                axes.legend(fontsize=8.5, framealpha=0.85, edgecolor="none", labelcolor=_INK, ncols=2)
    figure.savefig(png, format="png", metadata={"Software": None})


def _times(evidence: Evidence, png: Path) -> None:
    figures = Figures(evidence)
    objectives = [item for item in evidence.sweep.axes["objective"] if item != BASELINE and evidence.seeds((item,))]
    figure = _figure(8.0, 1.2 + 0.6 * max(1, len(objectives)))
    axes = figure.add_subplot(1, 1, 1)
    _plain(axes, "Time of a step, as a ratio to GRPO's with the same seed", "")
    axes.axvline(1.0, color=_INK, linewidth=1)
    for index, name in enumerate(objectives):
        other = figures.of("step", (BASELINE,))
        ratios = [value / other[s] for s, value in figures.of("step", (name,)).items() if value and other.get(s)]  # type: ignore[operator]
        result = figures.against("step", (name,), (BASELINE,))
        axes.plot(ratios, [index + 0.14] * len(ratios), "o", color=_COLOURS[1], markersize=5, alpha=0.6)
        if not math.isnan(result.low):
            axes.plot([result.low, result.high], [index - 0.1] * 2, color=_COLOURS[0], linewidth=2)
        axes.plot([result.mean], [index - 0.1], "s", color=_COLOURS[0], markersize=7)
    axes.set_yticks(range(len(objectives)), objectives)
    axes.set_ylim(len(objectives) - 0.5, -0.5)
    axes.set_xlabel(
        f"{FIGURES['step'].name}, ratio: seeds (round), mean and its 95 % interval (square)", fontsize=10, color=_INK
    )
    figure.savefig(png, format="png", metadata={"Software": None})


def _plain(axes: Axes, title: str, label: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, color=_INK, pad=8)
    axes.set_ylabel(label, fontsize=10, color=_INK)
    axes.grid(True, color=_FAINT, linewidth=0.7, alpha=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#aab4be")
    axes.tick_params(colors="#52606d", labelsize=9, length=3)


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tepo_megatron.tools.bench.evidence", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    for name in SWEEPS:
        text = f"output of examples/evidence/{name}.yaml"
        parser.add_argument(f"--{name.replace('_', '-')}", type=Path, metavar="FOLDER", help=text)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[3], help="repository whose page is made")
    args = parser.parse_args()
    folders = {name: folder for name in SWEEPS if (folder := getattr(args, name)) is not None}
    try:
        for line in make(args.root, folders):
            print(line)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    _main()
