"""The validation split of the second round: 200 of the sums that models train on, which no run of the round trains on.

    python examples/evidence/second/split.py      writes validation.jsonl, which is in the repository

``data.filter=[split.py:is_trained]`` leaves them out.
"""

import hashlib
import json
from functools import cache
from pathlib import Path

from tepo_megatron.core.problem import Problem
from tepo_megatron.tasks.data.problems import load_problems

FILE = Path(__file__).with_name("validation.jsonl")
PROBLEMS = 200


def is_trained(problem: Problem) -> bool:
    return problem.prompt not in _validation_prompts()


@cache
def _validation_prompts() -> frozenset[str]:
    return frozenset(json.loads(line)["prompt"] for line in FILE.read_text(encoding="utf-8").splitlines())


def validation() -> str:
    """The problems with the smallest digests of their prompts: no seed and no order of the data changes them."""
    problems = sorted(load_problems("builtin:addition"), key=lambda item: hashlib.sha256(item.prompt.encode()).hexdigest())
    rows = ({"id": item.id, "prompt": item.prompt, "answer": item.answer} for item in problems[:PROBLEMS])
    return "".join(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    FILE.write_text(validation(), encoding="utf-8")
