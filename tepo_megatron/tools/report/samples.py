"""Samples of evaluations and training steps, as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from tepo_megatron.runtime.files import parse_samples, read_lines


@dataclass
class SampleGroup:
    """Responses to one prompt at one step of one run.

    ``kind``: ``heldout``, ``train`` or ``tokens``. ``responses``: as the page gets them. ``cost``: tokens, or characters of
    text.
    """

    run: int
    kind: str
    step: int
    problem: str
    prompt: str
    answer: str
    responses: list[dict[str, Any]]
    cost: int
    source: str = ""
    origin: Any = field(default=None, repr=False)
    """For ``report.tokens``."""


def evenly(groups: Sequence[SampleGroup], responses: int, room: int) -> list[SampleGroup]:
    """Choose groups within the limits on responses and total cost; first groups of all steps come before second ones.

    Groups of equal rank are spread evenly over runs and steps, with the newest. The result keeps the given order.
    """
    ranks: dict[int, list[int]] = {}
    seen: dict[tuple[int, int], int] = {}
    for index, group in enumerate(groups):
        place = (group.run, group.step)
        seen[place] = seen.get(place, -1) + 1
        ranks.setdefault(seen[place], []).append(index)
    taken: list[int] = []
    for rank in sorted(ranks):
        for index in _spread(ranks[rank]):
            count, cost = len(groups[index].responses), groups[index].cost
            if count <= responses and cost <= room:
                taken.append(index)
                responses, room = responses - count, room - cost
    return [groups[index] for index in sorted(taken)]


def _spread(places: Sequence[int]) -> list[int]:
    """Every prefix is spread evenly: the last, the first, the middle, the quarters …"""
    if len(places) < 3:
        return list(reversed(places))
    order, step = [len(places) - 1, 0], len(places) - 1
    while step > 1:
        half = step / 2
        order += [round(half + k * step) for k in range(int((len(places) - 1 - half) / step) + 1)]
        step = -(-step // 2)
    return [places[index] for index in dict.fromkeys([*order, *range(len(places))]) if index < len(places)]


Row = Mapping[str, Any]

FILES = {"heldout": "samples.jsonl", "train": "train_samples.jsonl"}


def read_samples(run: int, folder: Path, kind: str) -> list[SampleGroup]:
    """All groups of one kind; none without the file. Skips a half-written last line.

    A response has ``text``, ``reward``, ``tokens`` (a count), ``finish``, and if known ``name``, ``correct``, ``error``,
    ``version``, ``turns``. Raises ValueError with the place of an invalid line.
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
    for index, item in enumerate(row.get("sampled") or [], start=1):
        yield _response(item, f"sample {index}")


def _response(given: Row, name: str) -> dict[str, Any]:
    result: dict[str, Any] = {
        "text": str(given.get("response") or ""),
        "reward": given.get("reward"),
        "tokens": given.get("tokens"),
        "finish": given.get("finish_reason"),
    }
    also = {"name": name, "error": given.get("error"), "version": given.get("weights_version"), "correct": given.get("correct")}
    result |= {key: value for key, value in also.items() if value not in (None, "")}
    if given.get("turns"):
        result["turns"] = [[str(turn.get("by")), str(turn.get("text"))] for turn in given["turns"]]
    if given.get("components"):
        result["components"] = given["components"]
    return result


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
