"""Chooses which of the ranks that hold the same part of a tensor sends it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence, Set
from typing import NamedTuple

TOLERANCE = 0.01
"""Share of a rank's load that is too small to divide an item for, or to open a connection for."""


class SendItem(NamedTuple):
    """``rows`` rows of ``row_size`` elements that ``receiver`` needs; ``key`` is the caller's: (the owners, a number)."""

    key: tuple[tuple[int, ...], int]
    receiver: int
    rows: int
    row_size: int


class Assignment(NamedTuple):
    """``owner`` sends rows ``start`` to ``stop`` of the item ``key``."""

    key: tuple[tuple[int, ...], int]
    owner: int
    start: int
    stop: int


def assign_senders(
    items: Mapping[tuple[int, ...], Sequence[SendItem]], loads: MutableMapping[int, int]
) -> Iterator[Assignment]:
    """Divides items among the ranks that hold them, so that all ranks send as nearly as possible the same number of elements.

    ``items`` maps a set of owners to the items that any of them can send. ``loads`` counts the elements that each rank sends;
    the assigned ones are added. The items with the fewest owners are assigned first, among equally many owners the largest
    amount, and the others fill up. Owners take the items in their order, one owner after the other; an item is divided between
    two owners where the first one is full. With items ordered by receiver each receiver thus has few senders, and the senders
    work at the same time. Items that are negligible together, such as norms, which all tensor-parallel ranks hold, are assigned
    to a rank that sends to the receiver anyway.
    """
    routes: set[tuple[int, int]] = set()
    amounts = {owners: sum(item.rows * item.row_size for item in group) for owners, group in items.items()}
    for owners, group in sorted(items.items(), key=lambda pair: (len(pair[0]), -amounts[pair[0]], pair[0])):
        order = sorted(owners, key=lambda owner: (loads[owner], owner))
        amount = amounts[owners]
        level = _water_level([loads[owner] for owner in order], amount)
        if amount <= TOLERANCE * loads[order[-1]]:
            assigned = _assign_whole(order, group, routes)
        else:
            assigned = _assign_in_order(order, [level - loads[owner] for owner in order], group, slack=TOLERANCE * level)
        # A generator assigns the items, so that it sees the routes that this loop adds before it chooses the next owner.
        for assignment, item in assigned:
            loads[assignment.owner] += (assignment.stop - assignment.start) * item.row_size
            routes.add((assignment.owner, item.receiver))
            yield assignment


def _water_level(loads: Sequence[int], amount: int) -> float:
    """Returns the load up to which owners are filled if ``amount`` always goes to the least busy ones; ``loads`` ascend.

    This is water-filling with the loads as heights of columns. Over the lowest ``count`` columns the level is (their sum +
    amount) / count; it is the right count as soon as the next column is not below that level.
    """
    total = float(amount)
    for count, load in enumerate(loads, 1):
        total += load
        if count == len(loads) or total / count <= loads[count]:
            return total / count
    raise AssertionError("an item has an owner")


def _assign_whole(
    order: Sequence[int], items: Sequence[SendItem], routes: Set[tuple[int, int]]
) -> Iterator[tuple[Assignment, SendItem]]:
    """Assigns undivided items to the least busy owner that already sends to the receiver, or else to the least busy one."""
    for item in items:
        owner = next((owner for owner in order if (owner, item.receiver) in routes), order[0])
        yield Assignment(item.key, owner, 0, item.rows), item


def _assign_in_order(
    order: Sequence[int], capacities: Sequence[float], items: Sequence[SendItem], *, slack: float
) -> Iterator[tuple[Assignment, SendItem]]:
    """Fills one owner after the other up to its capacity in elements (a column below the water level), dividing items by rows.

    An owner may take up to ``slack`` too much instead of dividing an item. The last one takes what is left.
    """
    index, capacity = 0, capacities[0]
    for item in items:
        start = 0
        while start < item.rows:
            left = item.rows - start
            is_last = index == len(order) - 1
            fits = left * item.row_size <= capacity + slack
            rows = left if is_last or fits else min(left, round(capacity / item.row_size))
            if not is_last and (rows <= 0 or capacity <= slack):
                # What this owner took too much (a negative capacity) or too little is carried over to the next one.
                index += 1
                capacity += capacities[index]
                continue
            yield Assignment(item.key, order[index], start, start + rows), item
            start += rows
            capacity -= rows * item.row_size
