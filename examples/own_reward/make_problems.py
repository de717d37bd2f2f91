"""Writes problems.jsonl and heldout.jsonl: sums with the carry as a further key. ``python make_problems.py``."""

import json
from pathlib import Path

from tepo_megatron.core.problem import Problem
from tepo_megatron.tasks.data.problems import load_problems

HERE = Path(__file__).parent


def line_of(problem: Problem) -> str:
    """One line of a data file; keys beside id, prompt and answer reach the verifier as ``problem.metadata``."""
    units = sum(int(number) % 10 for number in problem.id.split("+"))
    entry = {"id": problem.id, "prompt": problem.prompt, "answer": problem.answer, "carry": units // 10}
    return json.dumps(entry) + "\n"


for name, source, count in (("problems", "builtin:addition", 600), ("heldout", "builtin:addition-heldout", 100)):
    (HERE / f"{name}.jsonl").write_text("".join(line_of(problem) for problem in load_problems(source)[:count]))
