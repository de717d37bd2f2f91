"""Writes and reads plans as JSON, and computes the digest that identifies a plan by its inputs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from tepo_megatron.weights.geometry import Box, Move, Region, ReshardPlan

FORMAT = "tepo-reshard-plan"
VERSION = 2
"""Version of the file format and of the planner. Plans with the same digest are equal, so a change of either raises it."""


def digest_of(*inputs: object) -> str:
    """Returns the hex SHA-256 of dataclasses, numbers and sequences of them, and of the planner's version."""
    text = json.dumps([FORMAT, VERSION, [_plain(value) for value in inputs]], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, range):
        return [value.start, value.stop]
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def plan_to_json(plan: ReshardPlan) -> str:
    """Returns the plan as one line of JSON, in which each name is written once and referred to by its number."""
    names: dict[str, int] = {}

    def number(name: str) -> int:
        return names.setdefault(name, len(names))

    moves = [
        [
            number(move.tensor),
            move.source,
            move.destination,
            number(move.source_param),
            _region_to_list(move.source_region),
            number(move.destination_param),
            _region_to_list(move.destination_region),
        ]
        for move in plan.moves
    ]
    return json.dumps(
        {
            "format": FORMAT,
            "version": VERSION,
            "digest": plan.digest,
            "num_sources": plan.num_sources,
            "num_destinations": plan.num_destinations,
            "local": sorted(plan.local.items()),
            "names": list(names),
            "moves": moves,
        },
        separators=(",", ":"),
    )


def plan_from_json(text: str) -> ReshardPlan:
    """Reads a plan that :func:`plan_to_json` wrote. Raises ValueError for any other text."""
    try:
        raw: Mapping[str, Any] = json.loads(text)
        if raw["format"] != FORMAT or raw["version"] != VERSION:
            raise ValueError(f"it is {raw['format']} version {raw['version']}, not {FORMAT} version {VERSION}")
        names = raw["names"]
        moves = tuple(
            Move(names[tensor], source, destination, names[ours], _region(at), names[theirs], _region(to))
            for tensor, source, destination, ours, at, theirs, to in raw["moves"]
        )
        local = {int(destination): int(source) for destination, source in raw["local"]}
        return ReshardPlan(moves, raw["num_sources"], raw["num_destinations"], local, raw["digest"])
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"this is no reshard plan that can be read ({error}); make it again") from error


def _region_to_list(region: Region) -> list[Any]:
    return [list(region.box.start), list(region.box.stop), region.count, region.step]


def _region(raw: list[Any]) -> Region:
    start, stop, count, step = raw
    return Region(Box(tuple(start), tuple(stop)), count, step)
