"""Which of many samples a page has room for: whole groups, evenly over the steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class SampleGroup:
    """The responses to one prompt at one step of one run.

    ``kind``: ``heldout``, ``train`` or ``tokens``. ``responses``: what the page gets of each (see ``report.samples`` and
    ``report.tokens``). ``cost``: tokens, or characters of text, by which the room is measured.
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
    """Where its tokens lie, for ``report.tokens``."""


def evenly(groups: Sequence[SampleGroup], responses: int, room: int) -> list[SampleGroup]:
    """At most so many responses, and so much cost in all; the first groups of all steps before the second ones.

    Of groups that are first, second … alike, those are taken that lie evenly over runs and steps, the newest among them. The
    result is in the order in which the groups were given.
    """
    ranks: dict[int, list[int]] = {}
    seen: dict[tuple[int, int], int] = {}
    for at, group in enumerate(groups):
        place = (group.run, group.step)
        seen[place] = seen.get(place, -1) + 1
        ranks.setdefault(seen[place], []).append(at)
    taken: list[int] = []
    for rank in sorted(ranks):
        for at in _spread(ranks[rank]):
            count, cost = len(groups[at].responses), groups[at].cost
            if count <= responses and cost <= room:
                taken.append(at)
                responses, room = responses - count, room - cost
    return [groups[at] for at in sorted(taken)]


def _spread(places: Sequence[int]) -> list[int]:
    """An order whose every beginning lies evenly: the last, the first, the middle, the quarters …"""
    if len(places) < 3:
        return list(reversed(places))
    order, step = [len(places) - 1, 0], len(places) - 1
    while step > 1:
        half = step / 2
        order += [round(half + k * step) for k in range(int((len(places) - 1 - half) / step) + 1)]
        step = -(-step // 2)
    return [places[at] for at in dict.fromkeys([*order, *range(len(places))]) if at < len(places)]
