from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tepo_megatron.run.display.figures import PHASE_COLOURS, Row, fault_lines, figures_of, idle_line
from tepo_megatron.run.metrics import read_metrics, value_in
from tepo_megatron.runtime.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_Series = tuple[np.ndarray, np.ndarray]  # steps and values, both float64 [N], without rows that lack the value

_INK = "#22303c"
_RUNS = ("#2b6cb0", "#d9480f", "#2f9e44", "#9c6ade", "#c2255c", "#0b7285", "#b08900", "#495057")
_REWARD, _GREEDY, _SAMPLED, _PASS = "#2b6cb0", "#d9480f", "#2f9e44", "#9c6ade"
_ENTROPY, _MASKED, _NORM = "#0b7285", "#e8590c", "#6741d9"

_STYLE: dict[Any, Any] = {
    **{"figure.figsize": (12, 7.2), "figure.dpi": 150, "savefig.dpi": 150, "figure.facecolor": "white"},
    **{"text.parse_math": False, "text.color": _INK, "figure.titlesize": 15, "figure.titleweight": "bold"},
    **{"axes.titlesize": 11.5, "axes.titlelocation": "left", "axes.titlecolor": _INK, "axes.titlepad": 8},
    **{"axes.labelsize": 10, "axes.labelcolor": _INK, "axes.edgecolor": "#aab4be", "axes.axisbelow": True},
    **{"axes.spines.top": False, "axes.spines.right": False},
    **{"axes.grid": True, "grid.color": "#d9dfe5", "grid.linewidth": 0.7, "grid.alpha": 0.8},
    **{"legend.fontsize": 9, "legend.framealpha": 0.85, "legend.edgecolor": "none", "legend.labelcolor": _INK},
    **{"xtick.color": "#52606d", "xtick.labelsize": 9, "xtick.major.size": 3},
    **{"ytick.color": "#52606d", "ytick.labelsize": 9, "ytick.major.size": 3},
}


def plot_curves(metrics_path: Path, png: Path, title: str) -> None:
    """Draws a PNG of 1800×1080. Raises ValueError without rows."""
    rows = _rows(metrics_path)
    with _picture(png, title, rows) as panel:
        _reward_and_accuracy(panel("Reward and accuracy", "reward, accuracy"), rows)
        _entropy_and_mask(panel("Entropy and masked tokens", "entropy (nats per token)"), rows)
        norm = panel("Gradient norm", "global L2 norm before clipping")
        _smoothed(norm, _series(rows, "grad_norm"), _NORM, "gradient norm")
        norm.set_ylim(bottom=0)
        _time_split(panel("Where the time goes", "seconds per step"), _timed(rows))
        if faults := fault_lines(rows):
            norm.figure.supxlabel(" · ".join(faults), fontsize=9, color=_MASKED, x=0.012, ha="left")


def plot_comparison(runs: Mapping[str, Path], png: Path, title: str) -> None:
    rows_of = {name: _rows(path) for name, path in runs.items()}
    with _picture(png, title, [row for rows in rows_of.values() for row in rows]) as panel:
        reward = panel("Reward (line) and greedy accuracy (points)", "reward, accuracy")
        entropy = panel("Entropy", "entropy (nats per token)")
        norm = panel("Gradient norm", "global L2 norm before clipping")
        seconds = panel("Step time without evaluation", "seconds per step")
        for number, (name, rows) in enumerate(rows_of.items()):
            colour = _RUNS[number % len(_RUNS)]
            _smoothed(reward, _series(rows, "reward/mean"), colour, name)
            _points(reward, _series(rows, "accuracy/greedy"), colour, None)
            _smoothed(entropy, _series(rows, "entropy/mean"), colour, name)
            _smoothed(norm, _series(rows, "grad_norm"), colour, name)
            without_evaluation = [{**row, "time/step": row["time/step"] - (row.get("time/eval") or 0)} for row in _timed(rows)]
            _smoothed(seconds, _series(without_evaluation, "time/step"), colour, name)
        _unit_interval(reward)
        for axes in (entropy, norm, seconds):
            axes.set_ylim(bottom=0)
        _legend(reward, "lower right")


@contextmanager
def _picture(png: Path, title: str, rows: Sequence[Row]) -> Iterator[Callable[[str, str], Axes]]:
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import MaxNLocator

    steps = [row["step"] for row in rows]
    margin = max(0.5, 0.01 * (max(steps) - min(steps)))
    with rc_context(_STYLE):
        figure = Figure(layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.10, hspace=0.03, wspace=0.03))
        FigureCanvasAgg(figure)
        places = count(1)
        figure.suptitle(title, x=0.012, ha="left")

        def panel(title: str, ylabel: str) -> Axes:
            axes = figure.add_subplot(2, 2, next(places), title=title, xlabel="step", ylabel=ylabel)
            axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
            return axes

        yield panel
        for axes in figure.axes:
            axes.set_xlim(min(steps) - margin, max(steps) + margin)
        content = BytesIO()
        figure.savefig(content, format="png")
        write_atomically(png, content.getvalue())


def _reward_and_accuracy(axes: Axes, rows: Sequence[Row]) -> None:
    _smoothed(axes, _series(rows, "reward/mean"), _REWARD, "reward, training samples")
    _points(axes, _series(rows, "accuracy/greedy"), _GREEDY, "accuracy, held out, greedy")
    _points(axes, _series(rows, "accuracy/avg@k"), _SAMPLED, "accuracy, held out, avg@k", marker="s")
    _points(axes, _series(rows, "accuracy/pass@k"), _PASS, "accuracy, held out, pass@k", marker="^")
    if any(figure.key == "heldout/reward_greedy" for row in rows for figure, _ in figures_of(row)):  # not the accuracy again
        _points(axes, _series(rows, "heldout/reward_greedy"), _REWARD, "reward, held out, greedy", marker="D")
    _unit_interval(axes)
    _legend(axes, "lower right")


def _entropy_and_mask(axes: Axes, rows: Sequence[Row]) -> None:
    _smoothed(axes, _series(rows, "entropy/mean"), _ENTROPY, "entropy")
    axes.set_ylim(bottom=0)
    axes.yaxis.label.set_color(_ENTROPY)
    steps, fractions = _series(rows, "mask/fraction")
    if not steps.size:
        return
    twin = axes.twinx()
    twin.grid(visible=False)
    twin.set_ylabel("masked response tokens (%)", color=_MASKED)
    _smoothed(twin, (steps, 100 * fractions), _MASKED, "masked tokens", linestyle="--")
    twin.set_ylim(0, max(1.0, 1.15 * float(100 * fractions.max())))
    _legend(twin, "upper right", [*axes.get_legend_handles_labels()[0], *twin.get_legend_handles_labels()[0]])


def _time_split(axes: Axes, timed: Sequence[Row]) -> None:
    if not timed:
        return
    steps = np.array([row["step"] for row in timed], dtype=float)
    seconds = np.array([[row.get(f"time/{name}") or 0.0 for row in timed] for name in PHASE_COLOURS])
    shares = 100 * seconds.sum(axis=1) / max(float(seconds.sum()), 1e-9)
    labels = [f"{name}  {share:.0f} %" for name, share in zip(PHASE_COLOURS, shares, strict=True)]
    edges = np.stack([steps - 0.5, steps + 0.5], axis=1).ravel()
    axes.stackplot(edges, seconds.repeat(2, axis=1), labels=labels, colors=list(PHASE_COLOURS.values()), alpha=0.92)
    axes.set_ylim(0, max(1.04 * float(seconds.sum(axis=0).max()), 1e-3))
    idle = idle_line(timed).replace(": ", ":\n").replace(", ", "\n")
    place: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1.01, 0.5), "frameon": False}
    axes.legend(handles=axes.get_legend_handles_labels()[0][::-1], title=idle, title_fontsize=9, **place)


def _smoothed(axes: Axes, series: _Series, colour: str, label: str, linestyle: str = "-") -> None:
    steps, values = series
    if not steps.size:
        return
    window = min(9, max(1, steps.size // 8))
    if window > 1:
        axes.plot(steps, values, color=colour, linewidth=0.9, alpha=0.28)
    ones = np.ones(window)
    means = np.convolve(values, ones, mode="same") / np.convolve(np.ones_like(values), ones, mode="same")
    axes.plot(steps, means, linestyle, color=colour, linewidth=2, marker="o" if steps.size == 1 else "", label=label)


def _points(axes: Axes, series: _Series, colour: str, label: str | None, marker: str = "o") -> None:
    if series[0].size:
        (line,) = axes.plot(*series, color=colour, linewidth=1, alpha=0.95, marker=marker, label=label, zorder=4)
        line.set(markeredgecolor="white", markeredgewidth=0.9, markersize=6.5, clip_on=False)


def _series(rows: Sequence[Row], key: str) -> _Series:
    points = [(row["step"], value) for row in rows if (value := value_in(row, key)) is not None]
    columns = np.array(points, dtype=float).reshape(-1, 2)
    return columns[:, 0], columns[:, 1]


def _timed(rows: Sequence[Row]) -> list[Row]:
    """Drops row 0: its wait for servers would dwarf the others."""
    return [row for row in rows if row["step"] and row.get("time/step") is not None]


def _rows(path: Path) -> list[dict[str, Any]]:
    rows = read_metrics(path)
    if not rows:
        raise ValueError(f"{path} has no row yet; there is nothing to draw")
    return rows


def _unit_interval(axes: Axes) -> None:
    low, high = axes.dataLim.intervaly
    if low >= 0 and high <= 1:
        axes.set_ylim(0, 1.02)


def _legend(axes: Axes, loc: Literal["upper right", "lower right"], handles: list[Any] | None = None) -> None:
    shown = axes.get_legend_handles_labels()[0] if handles is None else handles
    if shown:
        axes.legend(handles=shown, loc=loc)
