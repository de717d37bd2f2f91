"""Writes the two data sets of the example, ``sums`` (Parquet) and ``talk`` (messages): ``python make_data.py [FOLDER]``."""

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet

from tepo_megatron.core.problem import Problem
from tepo_megatron.tasks.data.problems import load_problems

SPLITS = {"train": load_problems("builtin:addition")[:900], "test": load_problems("builtin:addition-heldout")[:100]}


def sum_row(problem: Problem) -> dict[str, Any]:
    """A row of ``sums``: the columns have other names than those that are looked for, and one more says how hard it is."""
    first, second = problem.id.split("+")
    carries = (int(first) % 10 + int(second) % 10) // 10
    return {"question": problem.id, "solution": {"value": int(problem.answer)}, "carries": carries}


def talk_row(problem: Problem) -> dict[str, Any]:
    """A line of ``talk``: the prompt is a list of messages."""
    return {"messages": [{"role": "user", "content": problem.id}], "answer": f"It is {problem.answer}."}


def write(folder: Path) -> None:
    """A third of the problems are ``talk``, the others ``sums``."""
    for split, problems in SPLITS.items():
        (folder / "sums").mkdir(parents=True, exist_ok=True)
        (folder / "talk").mkdir(parents=True, exist_ok=True)
        sums = [sum_row(problem) for at, problem in enumerate(problems) if at % 3]
        parquet.write_table(pa.Table.from_pylist(sums), folder / "sums" / f"{split}-00000-of-00001.parquet")
        talk = [talk_row(problem) for problem in problems[::3]]
        (folder / "talk" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in talk))


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
