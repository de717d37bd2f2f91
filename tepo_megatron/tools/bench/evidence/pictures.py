"""Pictures of docs/results/evidence.md: means over seeds at each step, with the range."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tepo_megatron.tools.bench.evidence.figures import FIGURES, Figures, points
from tepo_megatron.tools.bench.evidence.record import Evidence, Key
from tepo_megatron.tools.bench.evidence.tables import BASELINE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, FAINT = "#22303c", "#d9dfe5"
COLOURS = ("#d9480f", "#2b6cb0", "#2f9e44", "#9c6ade", "#b08900", "#0b7285", "#c2255c", "#495057")
"""TEPO is always the first."""
BASELINES = ("tepo", "grpo", "dapo", "gspo", "luspo", "cispo")
ABLATIONS = ("tepo", "no-mask", "no-likelihood", "neither", "tepo-covariance", "tepo-first-order", "sequence-mean", "constant")
SMOOTHED = 5


class _Picture(NamedTuple):
    stem: str
    column: str
    label: str
    said: str
    smooth: bool = True
    scale: float = 1.0


PICTURES = (
    _Picture("evidence-learning", "accuracy/greedy", "held-out greedy, %", "Held-out greedy accuracy by step", False, 100.0),
    _Picture("evidence-entropy", "entropy/mean", "entropy, nats a token", "Entropy by step"),
    _Picture("evidence-chosen", "entropy/delta_masked", "ΔH of chosen tokens, 10⁻³ nats", "ΔH of chosen tokens", scale=1e3),
    _Picture("evidence-others", "entropy/delta_unmasked", "ΔH of other tokens, 10⁻³ nats", "ΔH of other tokens", scale=1e3),
    _Picture("evidence-gradient", "grad_norm", "gradient norm before clipping", "Gradient norm by step"),
    _Picture("evidence-mask", "mask/fraction", "chosen tokens, %", "Share of chosen tokens by step", scale=100.0),
    _Picture("evidence-kl", "kl/mean", "KL from the old policy, 10⁻³ nats", "KL from the old policy by step", scale=1e3),
)
OF_SECOND = (
    _Picture("evidence-second-learning", "accuracy/greedy", "held-out greedy, %", "Held-out greedy by step", False, 100.0),
    _Picture("evidence-second-entropy", "entropy/mean", "entropy, nats a token", "Entropy by step"),
)
TIME = _Picture("evidence-time", "time/step", "", "Time of a step beside GRPO's")


def draw(tiny: Evidence, second: Evidence, overhead: Evidence, folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for picture, evidence in _pictures(tiny, second, overhead):
        if any(evidence.runs.values()):
            written.append(folder / f"{picture.stem}.png")
            if picture is TIME:
                _times(evidence, written[-1])
            else:
                _curves(evidence, picture, written[-1])
    return written


def shown(tiny: Evidence, second: Evidence, overhead: Evidence) -> dict[str, str]:
    """Place → picture in Markdown, or a sentence without runs."""
    result = {}
    for picture, evidence in _pictures(tiny, second, overhead):
        drawn = any(evidence.runs.values())
        place = picture.stem.replace("evidence", "picture")
        result[place] = f"![{picture.said}](../images/{picture.stem}.png)\n" if drawn else "Not run yet.\n"
    return result


def _pictures(tiny: Evidence, second: Evidence, overhead: Evidence) -> list[tuple[_Picture, Evidence]]:
    return [*((picture, tiny) for picture in PICTURES), *((picture, second) for picture in OF_SECOND), (TIME, overhead)]


def mean_curve(runs: Sequence[Sequence[tuple[int, float]]], window: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Common steps [N], and [3, N] with mean, minimum and maximum. Each run is smoothed by a centred mean over ``window``
    points, fewer at the ends."""
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
        for column, (title, objectives) in enumerate((("compared with", BASELINES), ("its parts", ABLATIONS))):
            axes = figure.add_subplot(len(rates), 2, 2 * row + column + 1)
            lr = evidence.rate(rate)
            _plain(axes, f"TEPO and what it is {title}, lr {lr}" if not column else f"TEPO and {title}, lr {lr}", picture.label)
            axes.set_xlabel("step", fontsize=10, color=INK)
            for name, colour in zip(objectives, COLOURS, strict=False):
                _curve(axes, evidence, (name, rate), picture, colour)
            if axes.get_legend_handles_labels()[0]:
                axes.legend(fontsize=8.5, framealpha=0.85, edgecolor="none", labelcolor=INK, ncols=2)
            highest.append(axes)
    low, high = min(axes.get_ylim()[0] for axes in highest), max(axes.get_ylim()[1] for axes in highest)
    for axes in highest:
        axes.set_ylim(min(low, 0.0) if low < 0.2 * high else low, high)
    figure.savefig(png, format="png", metadata={"Software": None})


def _curve(axes: Axes, evidence: Evidence, key: Key, picture: _Picture, colour: str) -> None:
    runs = [result for rows in evidence.rows(key) if (result := points(rows, picture.column))]
    steps, values = mean_curve(runs, SMOOTHED if picture.smooth else 1)
    if not steps.size:
        return
    mean, low, high = values * picture.scale
    first = key[0] == "tepo"
    label = f"{key[0]} ({len(runs)})"
    axes.plot(steps, mean, color=colour, linewidth=2.4 if first else 1.5, label=label, zorder=4 if first else 3)
    if len(runs) > 1:
        axes.fill_between(steps, low, high, color=colour, alpha=0.14 if first else 0.07, linewidth=0, zorder=2)


def _times(evidence: Evidence, png: Path) -> None:
    figures = Figures(evidence)
    objectives = [item for item in evidence.sweep.axes["objective"] if item != BASELINE and evidence.seeds((item,))]
    figure = _figure(8.0, 1.2 + 0.6 * max(1, len(objectives)))
    axes = figure.add_subplot(1, 1, 1)
    _plain(axes, "Time of a step, as a ratio to GRPO's with the same seed", "")
    axes.axvline(1.0, color=INK, linewidth=1)
    for index, name in enumerate(objectives):
        other = figures.of("step", (BASELINE,))
        ratios = [value / other[s] for s, value in figures.of("step", (name,)).items() if value and other.get(s)]  # type: ignore[operator]
        result = figures.against("step", (name,), (BASELINE,))
        axes.plot(ratios, [index + 0.14] * len(ratios), "o", color=COLOURS[1], markersize=5, alpha=0.6)
        if not math.isnan(result.low):
            axes.plot([result.low, result.high], [index - 0.1] * 2, color=COLOURS[0], linewidth=2)
        axes.plot([result.mean], [index - 0.1], "s", color=COLOURS[0], markersize=7)
    axes.set_yticks(range(len(objectives)), objectives)
    axes.set_ylim(len(objectives) - 0.5, -0.5)
    axes.set_xlabel(
        f"{FIGURES['step'].name}, ratio: seeds (round), mean and its 95 % interval (square)", fontsize=10, color=INK
    )
    figure.savefig(png, format="png", metadata={"Software": None})


def _plain(axes: Axes, title: str, label: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, color=INK, pad=8)
    axes.set_ylabel(label, fontsize=10, color=INK)
    axes.grid(True, color=FAINT, linewidth=0.7, alpha=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#aab4be")
    axes.tick_params(colors="#52606d", labelsize=9, length=3)
