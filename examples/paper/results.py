"""Fills the table of results.md from what ``tepo eval`` wrote: python examples/paper/results.py out/paper > results.md

Below the folder each run has one of its own, named as its file here (7b, 7b-p1, …). What is not there stays "not run here".
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tepo_megatron.tasks.evaluate.results import StoredSet, interval, read_results

NOT_RUN = "not run here"
NOT_STATED = "–"


@dataclass(frozen=True)
class Row:
    """A benchmark by its name for ``tepo data prepare``, and what the papers report on it, in percent."""

    name: str
    title: str
    p1: str = NOT_STATED
    p2: str = NOT_STATED


ROWS = (
    Row("math500", "MATH-500", "77.20", "86.4"),
    Row("aime24", "AIME 2024"),
    Row("aime25", "AIME 2025"),
    Row("amc23", "AMC 2023", p2="66.41"),
    Row("omni-math", "Omni-MATH", p2="39.55"),
    Row("olympiadbench", "OlympiadBench"),
    Row("minerva", "Minerva Math", p2="49.26"),
)
AVERAGE = Row("", "average", "32.04, 1.74 above GRPO", "44.02")
RUNS = ("7b", "7b-p1", "7b-grpo", "7b-dapo", "70b", "70b-p1", "70b-grpo")
"""Their files, and their folders."""

HEAD = f"""# The papers' figures, and ours

Written by `python examples/paper/results.py out/paper`: accuracy in percent, avg@n of each benchmark with its 95 % interval
over the problems. **P1** and **P2** are what the papers report; their base models, prompts and lengths are not all known, so a
difference to them says little. Our columns of one size can be compared: they differ in the objective alone (DAPO's in its
sampling too). "{NOT_RUN}" means that nobody has run it with this project.

"""


def figure_of(results: StoredSet) -> str:
    """The mean accuracy of its samples, or of the greedy response where it drew none."""
    samples = results.settings["samples"]
    return f"avg@{samples}" if samples else "greedy"


def accuracy(results: StoredSet) -> tuple[float, str]:
    """In percent: the mean, and how the table shows it."""
    figure = figure_of(results)
    found = interval(figure, [figures[figure] for _, figures in results.problems.values()])
    low, mean, high = (100 * value for value in (found.low, found.mean, found.high))
    return mean, f"{mean:.1f} ({low:.1f} to {high:.1f})"


def cells_of(run: Mapping[str, StoredSet]) -> dict[str, str]:
    """By benchmark; the average only where every benchmark is there."""
    found = {row.name: accuracy(run[row.name]) for row in ROWS if row.name in run}
    cells = {name: shown for name, (_, shown) in found.items()}
    if len(found) == len(ROWS):
        cells[AVERAGE.name] = f"{sum(mean for mean, _ in found.values()) / len(ROWS):.1f}"
    return cells


def table(folder: Path | None) -> str:
    """The page. Raises ValueError for results that are damaged."""
    columns = [cells_of(read_results(folder / run)) if folder and (folder / run / "eval").is_dir() else {} for run in RUNS]
    lines = [["benchmark", "P1", "P2", *(f"`{run}`" for run in RUNS)], ["---"] * (3 + len(RUNS))]
    for row in (*ROWS, AVERAGE):
        lines.append([row.title, row.p1, row.p2, *(column.get(row.name, NOT_RUN) for column in columns)])
    return HEAD + "".join("| " + " | ".join(line) + " |\n" for line in lines)


if __name__ == "__main__":
    sys.stdout.write(table(Path(sys.argv[1]) if len(sys.argv) > 1 else None))
