"""Rows with the columns of published code benchmarks, written for these tests."""

from collections.abc import Mapping
from typing import Any

HUMANEVAL: list[dict[str, Any]] = [
    {
        "task_id": "HumanEval/0",
        "prompt": "from typing import List\n\n\ndef evens(values: List[int]) -> List[int]:\n"
        '    """ The even ones.\n    >>> evens([1, 2])\n    [2]\n    """\n',
        "canonical_solution": "    return [value for value in values if value % 2 == 0]\n",
        "test": "\n\nMETADATA = {'author': 'us'}\n\n\ndef check(candidate):\n"
        "    assert candidate([1, 2, 4]) == [2, 4]\n    assert candidate([]) == []\n",
        "entry_point": "evens",
    },
    {
        "task_id": "HumanEval/1",
        "prompt": "\n\ndef half(x: float) -> float:\n    return x / 2\n\n\n"
        'def quarter(x: float) -> float:\n    """A fourth of x."""\n',
        "canonical_solution": "    return half(half(x))\n",
        "test": "def check(candidate):\n    assert abs(candidate(1.0) - 0.25) < 1e-9\n    assert candidate(0) == 0\n",
        "entry_point": "quarter",
    },
]
MBPP: list[dict[str, Any]] = [
    {
        "task_id": 11,
        "text": "Write a function to double a number.",
        "code": "def twice(x):\r\n  return 2 * x",
        "test_list": ["assert twice(2) == 4", "assert twice(0) == 0", "assert twice(-1) == -2"],
        "test_setup_code": "",
        "challenge_test_list": [],
    },
    {
        "task_id": 12,
        "text": "Write a function to add two numbers. ",
        "code": "def sum(a, b):\r\n  return a + b",
        "test_list": ["assert sum(2, 3) == 5", "assert sum(0, 0) == 0", "assert sum(-1, 1) == ZERO"],
        "test_setup_code": "ZERO = 0",
        "challenge_test_list": [],
    },
]
SANITIZED: list[dict[str, Any]] = [
    {
        "source_file": "own",
        "task_id": 2,
        "prompt": "Write a function to find the area of a disc.",
        "code": "def area(r):\n  return 3.141592653589793 * r * r",
        "test_imports": ["import math"],
        "test_list": ["assert math.isclose(area(1), math.pi)", "assert area(0) == 0"],
    }
]
FILES: Mapping[str, list[dict[str, Any]]] = {
    "humaneval": HUMANEVAL,
    "mbpp": MBPP,
    "mbpp-sanitized": SANITIZED,
    "mbpp-train": [{**MBPP[0], "task_id": 601}],
}


def _asked(row: dict[str, Any], text: str) -> str:
    return f"{text}\n\nYour code should pass these tests:\n\n" + "\n".join(row["test_list"])


_TWICE, _SUM, _AREA = (*MBPP, *SANITIZED)
EXPECTED: Mapping[str, list[tuple[str, str, str]]] = {
    "humaneval": [
        (f"humaneval/{row['task_id']}", (stub := row["prompt"].strip()), f"{stub}\n{row['canonical_solution'].rstrip()}")
        for row in HUMANEVAL
    ],
    "mbpp": [
        ("mbpp/11", _asked(_TWICE, "Write a function to double a number."), _TWICE["code"]),
        ("mbpp/12", _asked(_SUM, "Write a function to add two numbers."), _SUM["code"]),
    ],
    "mbpp-sanitized": [("mbpp-sanitized/2", _asked(_AREA, _AREA["prompt"]), _AREA["code"])],
    "mbpp-train": [("mbpp-train/601", _asked(_TWICE, _TWICE["text"]), _TWICE["code"])],
}
"""A benchmark's problems: id, prompt and answer."""
