"""Fills the table of results.md from what ``tepo eval`` wrote: python examples/paper/results.py out/paper > results.md

Each evaluation has a folder below it, named after its file here (7b, 7b-seed1, 7b-step72, …). Others are "not run here".
"""

import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
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
RUNS = ("7b", "7b-p1", "7b-grpo", "7b-dapo", "14b", "14b-grpo", "14b-dapo", "70b", "70b-p1", "70b-grpo")  # their files
LARGE_STEPS = 200
STEPS = (72, 132)  # both are reported; a run of 132 steps keeps its model of step 72
SEEDS = (0, 1)


@dataclass(frozen=True)
class Line:
    """A line of the table: one configuration after so many steps, with a folder for each seed."""

    run: str
    steps: int
    folders: tuple[str, ...]


def _lines() -> Iterator[Line]:
    for run in RUNS:
        if run.startswith("70b"):
            yield Line(run, LARGE_STEPS, (run,))
        else:
            for steps in STEPS:
                end = "" if steps == STEPS[-1] else f"-step{steps}"
                yield Line(run, steps, tuple(f"{run}{f'-seed{seed}' if seed else ''}{end}" for seed in SEEDS))


LINES = tuple(_lines())
FOLDERS = tuple(folder for line in LINES for folder in line.folders)
"""Where ``tepo eval`` leaves its results, below the folder of all runs."""

HEAD = f"""# The papers' figures, and ours

Written by `python examples/paper/results.py out/paper`: accuracy in percent, avg@n of each benchmark, with its 95 % interval
over the problems for one seed, and each seed's accuracy for two. **P1** and **P2** are what the papers report; their prompts
and rates are not known, so a difference to them says little. Our lines of one size and number of steps can be compared: they
differ in the objective alone (DAPO's in its sampling too). "{NOT_RUN}" means that nobody has run it with this project.

"""


def figure_of(results: StoredSet) -> str:
    """The mean accuracy of its samples, or of the greedy response where it drew none."""
    samples = results.settings["samples"]
    return f"avg@{samples}" if samples else "greedy"


def accuracy(results: StoredSet) -> tuple[float, float, float]:
    """Mean, low and high, in percent."""
    figure = figure_of(results)
    result = interval(figure, [figures[figure] for _, figures in results.problems.values()])
    return 100 * result.mean, 100 * result.low, 100 * result.high


def of_seeds(means: Sequence[float]) -> str:
    if len(means) == 1:
        return f"{means[0]:.1f}"
    return f"{statistics.fmean(means):.1f} ({', '.join(f'{mean:.1f}' for mean in means)})"


def cells_of(seeds: Sequence[Mapping[str, StoredSet]]) -> list[str]:
    """Of each benchmark, and the average if every seed has every benchmark."""
    by_seed = [{row.name: accuracy(run[row.name]) for row in ROWS if row.name in run} for run in seeds]
    cells = []
    for row in ROWS:
        results = [run[row.name] for run in by_seed if row.name in run]
        if len(results) < len(seeds):
            cells.append(NOT_STATED)
        elif len(results) == 1:
            cells.append("{:.1f} ({:.1f} to {:.1f})".format(*results[0]))
        else:
            cells.append(of_seeds([mean for mean, _, _ in results]))
    averages = [statistics.fmean(mean for mean, _, _ in run.values()) for run in by_seed if len(run) == len(ROWS)]
    return [*cells, of_seeds(averages) if len(averages) == len(seeds) else NOT_STATED]


def table(folder: Path | None) -> str:
    """The page. Raises ValueError for results that are damaged."""
    benchmarks = (*ROWS, AVERAGE)
    lines = [["run", "steps", "seeds", *(row.title for row in benchmarks)], ["---"] * (3 + len(benchmarks))]
    lines.append(["P1", NOT_STATED, NOT_STATED, *(row.p1 for row in benchmarks)])
    lines.append(["P2", NOT_STATED, "2", *(row.p2 for row in benchmarks)])
    for line in LINES:
        done = {
            seed: read_results(folder / name)
            for seed, name in enumerate(line.folders)
            if folder and any((folder / name / "eval/results").glob("*.json"))  # written when an evaluation has ended
        }
        cells = cells_of(list(done.values())) if done else [NOT_STATED] * len(benchmarks)
        lines.append([f"`{line.run}`", str(line.steps), ", ".join(map(str, done)) or NOT_RUN, *cells])
    return HEAD + "".join("| " + " | ".join(line) + " |\n" for line in lines)


if __name__ == "__main__":
    sys.stdout.write(table(Path(sys.argv[1]) if len(sys.argv) > 1 else None))
