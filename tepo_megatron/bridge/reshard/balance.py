"""Which of the ranks that hold the same part of a tensor sends it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence, Set
from typing import NamedTuple

TOLERANCE = 0.01
"""What share of a rank's load is too little to cut a part for, or to open a connection for."""


class Part(NamedTuple):
    """Something to be sent: ``rows`` rows of ``row_size`` elements; ``key`` is the caller's: the owners, and a number."""

    key: tuple[tuple[int, ...], int]
    receiver: int
    rows: int
    row_size: int


class Share(NamedTuple):
    """Rows ``start`` to ``stop`` of the part ``key``, sent by ``owner``."""

    key: tuple[tuple[int, ...], int]
    owner: int
    start: int
    stop: int


def share_out(wanted: Mapping[tuple[int, ...], Sequence[Part]], loads: MutableMapping[int, int]) -> Iterator[Share]:
    """Divides parts among the ranks that hold them, so that all send as nearly the same number of elements as they can.

    ``wanted`` maps the owners to the parts that any of them can send; ``loads`` counts what each rank sends, and is added to.
    The parts of the fewest owners go first, of as many owners the largest amount, and the others fill up. The owners take the
    parts in their order, one owner after the other; a part is cut between two owners where the first is full. Parts that are
    ordered by receiver thus have few senders per receiver, and the senders work at the same time. Parts that are negligible
    together, such as norms, which all tensor-parallel ranks hold, go where something goes anyway.
    """
    routes: set[tuple[int, int]] = set()
    amounts = {owners: sum(part.rows * part.row_size for part in parts) for owners, parts in wanted.items()}
    for owners, parts in sorted(wanted.items(), key=lambda item: (len(item[0]), -amounts[item[0]], item[0])):
        order = sorted(owners, key=lambda owner: (loads[owner], owner))
        amount = amounts[owners]
        level = _level([loads[owner] for owner in order], amount)
        if amount <= TOLERANCE * loads[order[-1]]:
            chosen = _beside(order, parts, routes)
        else:
            chosen = _fill(order, [level - loads[owner] for owner in order], parts, slack=TOLERANCE * level)
        for share, part in chosen:
            loads[share.owner] += (share.stop - share.start) * part.row_size
            routes.add((share.owner, part.receiver))
            yield share


def _level(loads: Sequence[int], amount: int) -> float:
    """The height to which ``amount`` fills up columns of these heights, which are ascending."""
    total = float(amount)
    for count, load in enumerate(loads, 1):
        total += load
        if count == len(loads) or total / count <= loads[count]:
            return total / count
    raise AssertionError("a part has an owner")


def _beside(order: Sequence[int], parts: Sequence[Part], routes: Set[tuple[int, int]]) -> Iterator[tuple[Share, Part]]:
    """Whole parts, from the least busy owner that sends to the receiver already, or else the least busy one."""
    for part in parts:
        owner = next((owner for owner in order if (owner, part.receiver) in routes), order[0])
        yield Share(part.key, owner, 0, part.rows), part


def _fill(order: Sequence[int], rooms: Sequence[float], parts: Sequence[Part], *, slack: float) -> Iterator[tuple[Share, Part]]:
    """Shares, each with the part it is of. What an owner takes too much or too little is made up for by the next."""
    at, room = 0, rooms[0]
    for part in parts:
        start = 0
        while start < part.rows:
            left = part.rows - start
            last = at == len(order) - 1
            rows = left if last or left * part.row_size <= room + slack else min(left, round(room / part.row_size))
            if not last and (rows <= 0 or room <= slack):
                at += 1
                room += rooms[at]
                continue
            yield Share(part.key, order[at], start, start + rows), part
            start += rows
            room -= rows * part.row_size
