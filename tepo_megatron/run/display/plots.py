"""The curves of one run, or of several, as one picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tepo_megatron.run.display.figures import PHASE_COLOURS, RUN_COLOURS, fault_lines, figures_of, idle_line
from tepo_megatron.run.metrics import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_Corner = Literal["upper right", "lower right"]
Row = Mapping[str, Any]
Series = tuple[np.ndarray, np.ndarray]  # steps and values, both float64 [N], without rows that lack the value

_INK, _FAINT = "#22303c", "#d9dfe5"
_REWARD, _GREEDY, _SAMPLED, _PASS = "#2b6cb0", "#d9480f", "#2f9e44", "#9c6ade"
_ENTROPY, _MASKED, _NORM = "#0b7285", "#e8590c", "#6741d9"


def plot_curves(metrics_path: Path, png: Path, title: str) -> None:
    """Draws a PNG of 1800×1080. Raises ValueError if there is no row."""
    rows = _rows(metrics_path)
    panels = _Picture(title)
    panels.note(" · ".join(fault_lines(rows)))
    _reward_and_accuracy(panels.at(0, "Reward and accuracy", "reward, accuracy"), rows)
    _entropy_and_mask(panels.at(1, "Entropy and masked tokens", "entropy (nats per token)"), rows)
    _gradient_norm(panels.at(2, "Gradient norm", "global L2 norm before clipping"), rows)
    _time_split(panels.at(3, "Where the time goes", "seconds per step"), rows)
    panels.save(png, rows)


def plot_comparison(runs: Mapping[str, Path], png: Path, title: str) -> None:
    panels = _Picture(title)
    reward = panels.at(0, "Reward (line) and greedy accuracy (points)", "reward, accuracy")
    entropy = panels.at(1, "Entropy", "entropy (nats per token)")
    norm = panels.at(2, "Gradient norm", "global L2 norm before clipping")
    seconds = panels.at(3, "Step time without evaluation", "seconds per step")
    every_row: list[Row] = []
    for number, (name, path) in enumerate(runs.items()):
        rows, colour = _rows(path), RUN_COLOURS[number % len(RUN_COLOURS)]
        every_row += rows
        _smoothed(reward, _series(rows, "reward/mean"), colour, name)
        _points(reward, _series(rows, "accuracy/greedy"), colour, None)
        _smoothed(entropy, _series(rows, "entropy/mean"), colour, name)
        _smoothed(norm, _series(rows, "grad_norm"), colour, name)
        without_evaluation = [{**row, "time/step": row["time/step"] - (row.get("time/eval") or 0)} for row in _timed(rows)]
        _smoothed(seconds, _series(without_evaluation, "time/step"), colour, name)
    _unit_interval(reward)
    for axes in (entropy, norm, seconds):
        axes.set_ylim(bottom=0)
    _legend(reward, loc="lower right")
    panels.save(png, every_row)


class _Picture:
    def __init__(self, title: str) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine

        layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.10, hspace=0.03, wspace=0.03)
        self._figure = Figure(figsize=(12, 7.2), dpi=150, layout=layout, facecolor="white")
        FigureCanvasAgg(self._figure)
        self._figure.suptitle(title, fontsize=15, fontweight="bold", color=_INK, x=0.012, ha="left")

    def at(self, place: int, title: str, ylabel: str) -> Axes:
        from matplotlib.ticker import MaxNLocator

        axes = self._figure.add_subplot(2, 2, place + 1)
        axes.set_title(title, loc="left", fontsize=11.5, color=_INK, pad=8)
        axes.set_xlabel("step", fontsize=10, color=_INK)
        axes.set_ylabel(ylabel, fontsize=10, color=_INK)
        axes.grid(True, color=_FAINT, linewidth=0.7, alpha=0.8)
        axes.set_axisbelow(True)
        _plain_frame(axes)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
        return axes

    def note(self, text: str) -> None:
        if text:
            self._figure.supxlabel(text, fontsize=9, color=_MASKED, x=0.012, ha="left")

    def save(self, png: Path, rows: Sequence[Row]) -> None:
        steps = [row["step"] for row in rows]
        margin = max(0.5, 0.01 * (max(steps) - min(steps)))
        for axes in self._figure.axes:
            axes.set_xlim(min(steps) - margin, max(steps) + margin)
        png.parent.mkdir(parents=True, exist_ok=True)
        self._figure.savefig(png, format="png")


def _reward_and_accuracy(axes: Axes, rows: Sequence[Row]) -> None:
    _smoothed(axes, _series(rows, "reward/mean"), _REWARD, "reward, training samples")
    _points(axes, _series(rows, "accuracy/greedy"), _GREEDY, "accuracy, held out, greedy")
    _points(axes, _series(rows, "accuracy/avg@k"), _SAMPLED, "accuracy, held out, avg@k", marker="s")
    _points(axes, _series(rows, "accuracy/pass@k"), _PASS, "accuracy, held out, pass@k", marker="^")
    if any(figure.key == "heldout/reward_greedy" for row in rows for figure, _ in figures_of(row)):  # not the accuracy again
        _points(axes, _series(rows, "heldout/reward_greedy"), _REWARD, "reward, held out, greedy", marker="D")
    _unit_interval(axes)
    _legend(axes, loc="lower right")


def _entropy_and_mask(axes: Axes, rows: Sequence[Row]) -> None:
    _smoothed(axes, _series(rows, "entropy/mean"), _ENTROPY, "entropy")
    axes.set_ylim(bottom=0)
    axes.yaxis.label.set_color(_ENTROPY)
    steps, fractions = _series(rows, "mask/fraction")
    if not steps.size:
        return
    twin = axes.twinx()
    _plain_frame(twin)
    twin.set_ylabel("masked response tokens (%)", fontsize=10, color=_MASKED)
    _smoothed(twin, (steps, 100 * fractions), _MASKED, "masked tokens", linestyle="--")
    twin.set_ylim(0, max(1.0, 1.15 * float(100 * fractions.max())))
    handles = [*axes.get_legend_handles_labels()[0], *twin.get_legend_handles_labels()[0]]
    _legend(twin, loc="upper right", handles=handles)


def _gradient_norm(axes: Axes, rows: Sequence[Row]) -> None:
    _smoothed(axes, _series(rows, "grad_norm"), _NORM, "gradient norm")
    axes.set_ylim(bottom=0)


def _time_split(axes: Axes, rows: Sequence[Row]) -> None:
    timed = _timed(rows)
    if not timed:
        return
    steps = np.array([row["step"] for row in timed], dtype=float)
    seconds = np.array([[row.get(f"time/{name}") or 0.0 for row in timed] for name in PHASE_COLOURS])
    shares = 100 * seconds.sum(axis=1) / max(float(seconds.sum()), 1e-9)
    labels = [f"{name}  {share:.0f} %" for name, share in zip(PHASE_COLOURS, shares, strict=True)]
    edges = np.stack([steps - 0.5, steps + 0.5], axis=1).ravel()
    axes.stackplot(
        edges, seconds.repeat(2, axis=1), labels=labels, colors=list(PHASE_COLOURS.values()), linewidth=0, alpha=0.92
    )
    axes.set_ylim(0, max(1.04 * float(seconds.sum(axis=0).max()), 1e-3))
    handles, names = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1],
        names[::-1],
        loc="center left",
        bbox_to_anchor=(1.01, 0.5),
        fontsize=9,
        frameon=False,
        labelcolor=_INK,
        title=idle_line(timed).replace(": ", ":\n").replace(", ", "\n"),
        title_fontsize=9,
    )


def _smoothed(axes: Axes, series: Series, colour: str, label: str, linestyle: str = "-") -> None:
    steps, values = series
    if not steps.size:
        return
    window = min(9, max(1, steps.size // 8))
    if window > 1:
        axes.plot(steps, values, color=colour, linewidth=0.9, alpha=0.28)
    marker = "o" if steps.size == 1 else ""
    axes.plot(steps, _moving_average(values, window), linestyle, color=colour, linewidth=2, marker=marker, label=label)


def _points(axes: Axes, series: Series, colour: str, label: str | None, marker: str = "o") -> None:
    if series[0].size:
        (line,) = axes.plot(*series, color=colour, linewidth=1, alpha=0.95, marker=marker, label=label, zorder=4)
        line.set(markeredgecolor="white", markeredgewidth=0.9, markersize=6.5, clip_on=False)


def _moving_average(values: np.ndarray, window: int) -> np.ndarray:
    ones = np.ones(window)
    return np.convolve(values, ones, mode="same") / np.convolve(np.ones_like(values), ones, mode="same")


def _series(rows: Sequence[Row], key: str) -> Series:
    points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    columns = np.array(points, dtype=float).reshape(-1, 2)
    return columns[:, 0], columns[:, 1]


def _timed(rows: Sequence[Row]) -> list[Row]:
    """Drops row 0: its wait for servers and model would dwarf the others."""
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


def _legend(axes: Axes, loc: _Corner, handles: list[Any] | None = None) -> None:
    shown = axes.get_legend_handles_labels()[0] if handles is None else handles
    if shown:
        axes.legend(handles=shown, loc=loc, fontsize=9, framealpha=0.85, edgecolor="none", labelcolor=_INK)


def _plain_frame(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#aab4be")
    axes.tick_params(colors="#52606d", labelsize=9, length=3)
