"""Samples as text: what a run wrote of its evaluations and of its training steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from tepo_megatron.runtime.files import parse_samples, read_lines
from tepo_megatron.tools.report.choose import SampleGroup

Row = Mapping[str, Any]

FILES = {"heldout": "samples.jsonl", "train": "train_samples.jsonl"}
"""Kind of samples → the file that a run writes them to."""


def read_samples(run: int, folder: Path, kind: str) -> list[SampleGroup]:
    """All groups of one kind in a run's folder; none where it has no such file. A half-written last line is left out.

    A response has ``text``, ``reward``, ``tokens`` (their number), ``finish``, and where they are known ``name``, ``correct``,
    ``error``, ``version`` and ``turns``. Raises ValueError with the place of a line that is no sample.
    """
    path = folder / FILES[kind]
    if not path.is_file():
        return []
    rows: list[Row] = list(parse_samples(path, read_lines(path)[0]))
    if kind == "heldout":
        return [_group(run, kind, [row], [*_evaluated(row)]) for row in rows]
    together = groupby(rows, lambda row: (row.get("step", 0), row.get("group"), row.get("problem")))
    groups = [list(members) for _, members in together]
    return [_group(run, kind, members, [_response(row, "") for row in members]) for members in groups]


def _evaluated(row: Row) -> Iterator[dict[str, Any]]:
    if row.get("greedy"):
        yield _response(row["greedy"], "greedy")
    for at, each in enumerate(row.get("sampled") or [], start=1):
        yield _response(each, f"sample {at}")


def _response(given: Row, name: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "text": str(given.get("response") or ""),
        "reward": given.get("reward"),
        "tokens": given.get("tokens"),
        "finish": given.get("finish_reason"),
    }
    also = {"name": name, "error": given.get("error"), "version": given.get("weights_version"), "correct": given.get("correct")}
    found |= {key: value for key, value in also.items() if value not in (None, "")}
    if given.get("turns"):
        found["turns"] = [[str(turn.get("by")), str(turn.get("text"))] for turn in given["turns"]]
    if given.get("components"):
        found["components"] = given["components"]
    return found


def _group(run: int, kind: str, rows: list[Row], responses: list[dict[str, Any]]) -> SampleGroup:
    row = rows[0]
    texts = [str(row.get("prompt") or ""), *(response["text"] for response in responses)]
    return SampleGroup(
        run,
        kind,
        step=int(row.get("step", 0)),
        problem=str(row.get("problem", "")),
        prompt=texts[0],
        answer="" if row.get("answer") is None else str(row["answer"]),
        responses=responses,
        cost=sum(map(len, texts)),
        source=str(row.get("set") or row.get("source") or ""),
    )
