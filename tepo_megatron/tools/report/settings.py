"""Settings of runs side by side: what differs between them, and what differs from the defaults."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tepo_megatron.config.loading.schema import schema_rows

Settings = Mapping[str, str]
"""Dotted path → value as JSON text."""

IDENTITY = ("seed", "output", "name")
"""What tells runs of the same kind apart."""


def flat(section: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Every value by its dotted path, as JSON text; an empty section is a value."""
    found: dict[str, str] = {}
    for name, value in section.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{path}.")
        else:
            found[path] = json.dumps(value, ensure_ascii=False, default=str)
    return found


def without_identity(settings: Settings) -> dict[str, str]:
    return {path: value for path, value in settings.items() if path not in IDENTITY}


def compared(runs: Sequence[Settings]) -> list[dict[str, Any]]:
    """Every path that a run has, in the order of the files: its value in each run (None where it has none), whether all values
    are the default, and whether they differ. A setting that another version of the software did not have is at its default.
    """
    paths = dict.fromkeys(path for run in runs for path in run)
    usual = {path: {"{}", "[]", "null"} for path in paths}  # an empty section has no default of its own
    for row in schema_rows():
        usual.setdefault(row.path, set()).add(_plain(row.default))
    return [
        {
            "path": path,
            "values": [run.get(path) for run in runs],
            "differs": _differ([run.get(path, "" if _was_unknown(path, run) else None) for run in runs], usual[path]),
            "usual": path in IDENTITY or all(run.get(path) is None or _plain(run[path]) in usual[path] for run in runs),
        }
        for path in paths
    ]


def _was_unknown(path: str, run: Settings) -> bool:
    """Whether a run without this path has nothing in its place: no section there, and none of its sections left out."""
    parts = path.split(".")
    above = (".".join(parts[:length]) for length in range(1, len(parts)))
    return bool(run) and not any(each in run for each in above) and not any(each.startswith(f"{path}.") for each in run)


def _differ(values: Sequence[str | None], usual: set[str]) -> bool:
    """``""`` stands for the default."""
    plain = {value if not value else _plain(value) for value in values}
    return len(plain - {""} if plain - {""} <= usual else plain) > 1


def changes(before: Settings, after: Settings) -> list[tuple[str, str | None, str | None]]:
    """Path, value before, value after, of all that differs."""
    paths = dict.fromkeys((*before, *after))
    return [(path, before.get(path), after.get(path)) for path in paths if before.get(path) != after.get(path)]


def _plain(value: str) -> str:
    """The same text for the same value: 5e-5 and 5.0e-05, 1 and 1.0."""
    try:
        read = json.loads(value)
    except ValueError:
        return value
    if isinstance(read, float) and read.is_integer():
        read = int(read)
    return json.dumps(read, sort_keys=True)
