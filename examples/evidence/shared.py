"""What pages of results share: places in their text, curves over seeds, and the style of pictures."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from examples.evidence.figures import Evidence, Key

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WINDOW = 5  # steps over which a smoothed curve is averaged

INK = "#22303c"
STYLE: dict[Any, Any] = {
    **{"figure.dpi": 110, "figure.constrained_layout.use": True, "figure.constrained_layout.w_pad": 0.10},
    **{f"figure.constrained_layout.{name}": value for name, value in (("h_pad", 0.08), ("hspace", 0.03), ("wspace", 0.03))},
    **{"axes.titlelocation": "left", "axes.titlesize": 11, "axes.titlecolor": INK, "axes.titlepad": 8, "axes.labelsize": 10},
    **{"axes.labelcolor": INK, "axes.edgecolor": "#aab4be", "axes.spines.top": False, "axes.spines.right": False},
    **{"axes.axisbelow": True, "axes.grid": True, "grid.color": "#d9dfe5", "grid.linewidth": 0.7, "grid.alpha": 0.8},
    **{f"{axis}tick.{name}": value for axis in "xy" for name, value in (("labelsize", 9), ("major.size", 3))},
    **{"xtick.color": "#52606d", "ytick.color": "#52606d", "legend.fontsize": 8.5, "legend.framealpha": 0.85},
    **{"legend.edgecolor": "none", "legend.labelcolor": INK},
}
COLOURS = ("#d9480f", "#2b6cb0", "#2f9e44", "#9c6ade", "#b08900", "#0b7285", "#c2255c", "#495057")  # TEPO is always the first


def filled(text: str, parts: Mapping[str, str], page: str) -> str:
    """Fills what is between ``<!-- NAME -->`` and ``<!-- end -->``. Raises ValueError unless each name has one place."""
    names = re.findall(r"<!-- (?!end)([\w-]+) -->", text)
    if sorted(names) != sorted(parts):
        raise ValueError(f"{page} has places for {', '.join(sorted(names))}; the tables are {', '.join(sorted(parts))}")
    return re.sub(
        r"<!-- (?!end)([\w-]+) -->\n.*?<!-- end -->",
        lambda result: f"<!-- {result[1]} -->\n\n{parts[result[1]]}\n<!-- end -->",
        text,
        flags=re.S,
    )


def mean_curve(runs: Sequence[Sequence[tuple[int, float]]], window: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Steps [N], and [3, N] with mean, minimum and maximum, smoothed by a centred mean over ``window`` points."""
    common = sorted(set.intersection(*(set(dict(run)) for run in runs))) if runs else []
    if not common:
        return np.empty(0), np.empty((3, 0))
    values = np.array([[dict(run)[step] for step in common] for run in runs])
    ones = np.ones(min(window, len(common)))
    weight = np.convolve(np.ones(len(common)), ones, mode="same")
    smooth = np.array([np.convolve(run, ones, mode="same") / weight for run in values])
    return np.array(common), np.stack([smooth.mean(0), smooth.min(0), smooth.max(0)])


def plot_curve(
    axes: Axes, name: str, runs: Sequence[Sequence[tuple[int, float]]], colour: str, *, smooth: bool = False, scale: float = 1.0
) -> None:
    """The mean over seeds within their range; bold if it is TEPO's."""
    steps, values = mean_curve(runs, WINDOW if smooth else 1)
    if not steps.size:
        return
    mean, low, high = values * scale
    bold = colour == COLOURS[0]
    axes.plot(steps, mean, color=colour, linewidth=2.4 if bold else 1.5, label=f"{name} ({len(runs)})", zorder=3 + bold)
    if len(runs) > 1:
        axes.fill_between(steps, low, high, color=colour, alpha=0.14 if bold else 0.07, linewidth=0, zorder=2)


def frontier(evidence: Evidence, key: Key) -> np.ndarray:
    """[N, 2]: entropy and greedy accuracy at evaluated steps, smoothed as the curves and averaged over seeds."""
    entropy, accuracy = (
        dict(zip(steps.tolist(), values[0], strict=True))
        for steps, values in (mean_curve(evidence.curves(key, name), WINDOW) for name in ("entropy/mean", "accuracy/greedy"))
    )
    return np.array([(entropy[step], accuracy[step]) for step in accuracy if step in entropy]).reshape(-1, 2)


def plot_frontier(axes: Axes, name: str, evidence: Evidence, key: Key, colour: str) -> None:
    values = frontier(evidence, key)
    if len(values):
        width = 2.4 if colour == COLOURS[0] else 1.5
        axes.plot(values[:, 0], 100 * values[:, 1], color=colour, linewidth=width, label=name)
        axes.plot(values[-1:, 0], 100 * values[-1:, 1], "o", color=colour, markersize=6)
