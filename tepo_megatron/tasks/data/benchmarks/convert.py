"""Rows of a published file as problems: JSON lines with ``id``, ``prompt``, ``answer`` and what else is kept of a row."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from tepo_megatron.tasks.data.benchmarks.registry import Benchmark, Row

Problem = Mapping[str, Any]


def convert(name: str, benchmark: Benchmark, rows: Iterable[Row]) -> list[Problem]:
    """The problems of a benchmark, in the order of its file; ids are ``name/…``.

    Raises:
        ValueError: a column that the rows lack, a row without a prompt, an answer or tests, or an id that comes twice, with the
            number of the row.
    """
    found: dict[str, Problem] = {}
    for number, row in enumerate(rows, start=1):
        missing = [column for column in benchmark.columns if column not in row]
        if missing:
            raise ValueError(
                f"row {number} has no {' and no '.join(missing)}; its columns are {', '.join(row) or 'none'}: this is another "
                f"file than {benchmark.repository} {benchmark.file}"
            )
        own = number - 1 if benchmark.id is None else benchmark.id(row)
        problem = {
            "id": f"{name}/{own}",
            "prompt": _text(benchmark.prompt(row), "prompt", number),
            "answer": _text(benchmark.answer(row), "answer", number),
            **{column: row[column] for column in benchmark.kept if row.get(column) is not None},
            **benchmark.more(row),
        }
        if "tests" in problem and not problem["tests"]:
            raise ValueError(f"row {number} has no tests")
        if problem["id"] in found:
            raise ValueError(f"row {number} has the id {own!r}, which another row has too")
        found[problem["id"]] = problem
    return list(found.values())


def as_lines(problems: Iterable[Problem]) -> bytes:
    """The same bytes for the same problems, always."""
    return "".join(json.dumps(problem, ensure_ascii=False) + "\n" for problem in problems).encode()


def _text(value: Any, what: str, number: int) -> str:
    text = str(value).strip() if isinstance(value, str | int | float) and not isinstance(value, bool) else ""
    if not text:
        raise ValueError(f"row {number} has no {what}, but {json.dumps(value, default=str)[:60]}")
    return text
