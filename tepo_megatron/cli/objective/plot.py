"""Curves of an objective's gradient weight: as text for a terminal, as a PNG."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tepo_megatron.core.objective.gradient_weight import GradientWeights

XLABEL = "ratio to π_old"
YLABEL = "gradient weight ∂J/∂log π"


class Curve(NamedTuple):
    """One line of the picture; ``mark`` is its character in a terminal."""

    label: str
    mark: str
    colour: str
    ys: Sequence[float]


def curves(weights: GradientWeights) -> list[Curve]:
    """A > 0 and A < 0, and A > 0 with falling entropy where that differs."""
    found = [
        Curve("A = 1", "+", "#2b6cb0", weights.positive_N.tolist()),
        Curve("A = −1", "o", "#d9480f", weights.negative_N.tolist()),
    ]
    if (weights.falling_N - weights.positive_N).abs().max() > 0.01 * weights.positive_N.abs().max():  # to be seen at all
        found.append(Curve("A = 1, the entropy falls", "*", "#9c6ade", weights.falling_N.tolist()))
    return found


def text_plot(xs: Sequence[float], lines: Sequence[Curve], *, width: int = 72, height: int = 17) -> str:
    """The curves on a grid of characters, the first on top; x from the first to the last of ``xs``, which are in order."""
    low, high = _span(lines)
    grid = [[" "] * width for _ in range(height)]

    def row(y: float) -> int:
        return round((high - y) / (high - low) * (height - 1))

    grid[row(0.0)] = ["·"] * width
    for curve in reversed(lines):
        for column in range(width):
            at = round(column / (width - 1) * (len(xs) - 1))
            grid[row(curve.ys[at])][column] = curve.mark
    labels = {row(y): f"{y:.3g}" for y in (high, 0.0, low)}
    drawn = [f"{labels.get(number, ''):>8} │{''.join(cells)}" for number, cells in enumerate(grid)]
    ends = f"{xs[0]:.4g}", f"{xs[len(xs) // 2]:.4g}", f"{xs[-1]:.4g}"
    left = width // 2 - len(ends[0]) - len(ends[1]) // 2
    axis = (
        ends[0] + " " * left + ends[1] + " " * (width - width // 2 - len(ends[1]) + len(ends[1]) // 2 - len(ends[2])) + ends[2]
    )
    legend = " " * 10 + "   ".join(f"{curve.mark} {curve.label}" for curve in lines)
    return "\n".join([f"{YLABEL}, against the {XLABEL}", *drawn, " " * 9 + "└" + "─" * width, " " * 10 + axis, legend])


def draw(xs: Sequence[float], lines: Sequence[Curve], png: Path, title: str) -> None:
    """The curves as a PNG of 1200×750; folders on the way are made."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(textwrap.fill(title, 95), loc="left", fontsize=11)
    axes.set_xlabel(XLABEL)
    axes.set_ylabel(YLABEL)
    axes.ticklabel_format(useOffset=False)
    axes.grid(True, color="#d9dfe5", linewidth=0.7)
    axes.axhline(0, color="#22303c", linewidth=0.8)
    for curve in reversed(lines):
        axes.plot(xs, curve.ys, color=curve.colour, label=curve.label)
    axes.legend(frameon=False)
    png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(png, format="png")


def _span(lines: Sequence[Curve]) -> tuple[float, float]:
    values = [0.0, *(y for curve in lines for y in curve.ys)]
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 1.0, high + 1.0)
