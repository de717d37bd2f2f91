from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tepo_megatron.config.base import read_yaml
from tepo_megatron.config.schema import schema_rows
from tepo_megatron.run.display.figures import COUNTED, LOST, fault_lines
from tepo_megatron.run.loggers import without_secrets
from tepo_megatron.run.metrics import read_metrics
from tepo_megatron.run.output.status import run_status
from tepo_megatron.runtime.text import flat

Settings = Mapping[str, str]  # dotted path → value as JSON text
_IDENTITY = ("seed", "output", "name")
_BESIDE = re.compile(r"output|train\.resume|train\.resume_from|log(\..*)?")


def is_beside_training(path: str) -> bool:
    """Runs that differ in this setting alone train the same."""
    return _BESIDE.fullmatch(path) is not None


def settings_of(section: Mapping[str, Any]) -> dict[str, str]:
    return {path: json.dumps(value, ensure_ascii=False, default=str) for path, value in flat(section).items()}


def compared(runs: Sequence[Settings]) -> list[dict[str, Any]]:
    """Settings unknown to another version have their default."""
    paths = dict.fromkeys(path for run in runs for path in run)
    usual = {path: {"{}", "[]", "null"} for path in paths}  # an empty section has no default of its own
    for row in schema_rows():
        usual.setdefault(row.path, set()).add(_plain(row.default))
    return [
        {
            "path": path,
            "values": [run.get(path) for run in runs],
            "differs": _differ([run.get(path, "" if _was_unknown(path, run) else None) for run in runs], usual[path]),
            "usual": path in _IDENTITY or all(run.get(path) is None or _plain(run[path]) in usual[path] for run in runs),
            "beside": path == "name" or is_beside_training(path),
        }
        for path in paths
    ]


def _was_unknown(path: str, run: Settings) -> bool:
    parts = path.split(".")
    above = (".".join(parts[:length]) for length in range(1, len(parts)))
    return bool(run) and not any(item in run for item in above) and not any(item.startswith(f"{path}.") for item in run)


def _differ(values: Sequence[str | None], usual: set[str]) -> bool:
    plain = {value if not value else _plain(value) for value in values}
    return len(plain - {""} if plain - {""} <= usual else plain) > 1


def changes(before: Settings, after: Settings) -> list[tuple[str, str | None, str | None]]:
    paths = dict.fromkeys((*before, *after))
    return [(path, before.get(path), after.get(path)) for path in paths if before.get(path) != after.get(path)]


def _plain(value: str) -> str:
    try:
        read = json.loads(value)
    except ValueError:
        return value
    if isinstance(read, float) and read.is_integer():
        read = int(read)
    return json.dumps(read, sort_keys=True)


Row = Mapping[str, Any]
_MOST_HANG_TEXT = 20_000
_BEGINS_S = 300.0  # a run without output, or a sweep's next one, may be starting its ranks for this long
_EVENTS = {**COUNTED, **LOST, "log/failed": "log files that could not be written"}
_AGO = re.compile(r",? [\d:.]+(?: s)? ago")
_SEED = re.compile(r"[-_.]?seed[-_]?\d+$")


@dataclass(frozen=True)
class Run:
    """``settings`` is empty without ``resolved.yaml``, ``rows`` before the first step."""

    name: str
    folder: Path
    rows: Sequence[Row]
    settings: Settings = field(default_factory=dict)
    said: str = ""  # state or end, as a sentence
    goes_on: bool = False
    earlier: Sequence[Settings] = ()  # before each resumption that changed some; oldest first
    hangs: Sequence[tuple[str, str]] = ()  # file name, text

    @classmethod
    def read(cls, name: str, folder: Path) -> Run:
        """Skips a half-written line. Raises ValueError for damaged ones."""
        metrics = folder / "metrics.jsonl"
        rows = read_metrics(metrics) if metrics.is_file() else []
        resolved = folder / "resolved.yaml"
        if not resolved.is_file():
            return cls(name, folder, rows, said="only its metrics are here")
        settings = _settings(resolved)
        lines, goes_on = run_status(folder, rows=rows)
        begins = (
            not rows and not any((folder / "status").glob("rank-*.json")) and time.time() - resolved.stat().st_mtime < _BEGINS_S
        )
        earlier = sorted(folder.glob("resolved.*.yaml"), key=_natural)
        hangs = [
            (path.name, path.read_text(encoding="utf-8", errors="replace")[:_MOST_HANG_TEXT])
            for path in sorted((folder / "logs").glob("hang-*.txt"))
        ]
        return cls(
            name,
            folder,
            rows,
            settings=settings,
            said="begins" if begins else _AGO.sub("", lines[0].removeprefix(f"{json.loads(settings.get('name', 'null'))}: ")),
            goes_on=goes_on or begins,
            earlier=[_settings(path) for path in earlier],
            hangs=hangs,
        )

    @classmethod
    def find(cls, paths: Sequence[Path]) -> dict[str, Path]:
        """Raises ValueError for a path without runs."""
        result: list[Path] = []
        for path in paths:
            inside = cls.folders_in(path)
            if not inside:
                raise ValueError(
                    f"{path} holds no run: neither it nor a folder in it has a metrics.jsonl or resolved.yaml; give the output"
                    " folder of tepo train or of tepo sweep"
                )
            result += [item for item in inside if item.resolve() not in {one.resolve() for one in result}]
        return dict(zip(_names(result), result, strict=True))

    @staticmethod
    def folders_in(path: Path) -> list[Path]:
        """Reads the folder, else its children, else its grandchildren."""
        folder = path.parent if path.name == "metrics.jsonl" else path
        for depth in ("", "*/", "*/*/"):
            files = [
                item for name in ("metrics.jsonl", "resolved.yaml") for item in folder.glob(depth + name) if item.is_file()
            ]
            if files:
                return sorted({item.parent for item in files}, key=_natural)
        return []

    @property
    def wrote_lately(self) -> bool:
        files = (self.folder / "metrics.jsonl", self.folder / "resolved.yaml", *self.folder.glob("status/rank-*.json"))
        with suppress(FileNotFoundError):  # it may be removed meanwhile
            return time.time() - max((path.stat().st_mtime for path in files if path.is_file()), default=0.0) < _BEGINS_S
        return True

    @property
    def faults(self) -> list[str]:
        return fault_lines(self.rows)

    @property
    def events(self) -> list[tuple[int, str, float]]:
        """(step, what happened, count or seconds)."""
        return [(row["step"], text, row[key]) for row in self.rows for key, text in _EVENTS.items() if row.get(key)]


def _natural(path: Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", str(path))]


def _names(folders: Sequence[Path]) -> list[str]:
    for depth in range(1, 5):
        names = ["/".join(folder.resolve().parts[-depth:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
    return [str(folder.resolve()) for folder in folders]


def _settings(path: Path) -> Settings:
    read = read_yaml(path)
    if not isinstance(read, Mapping):
        raise ValueError(f"{path} is no configuration: sections by name were expected")
    return settings_of(without_secrets(read))


def run_groups(runs: Sequence[Run]) -> list[tuple[str, tuple[int, ...]]]:
    """(label, indices of runs) that train the same but for the seed; a run without settings is alone."""
    result: dict[tuple[Any, ...], list[int]] = {}
    for index, run in enumerate(runs):
        alone = (index,) if not run.settings else ()
        paths = sorted(path for path in run.settings if path not in _IDENTITY and not is_beside_training(path))
        result.setdefault((*alone, *((path, run.settings[path]) for path in paths)), []).append(index)
    labels = []
    for first, *others in result.values():
        name, parent = runs[first].name, runs[first].folder.resolve().parent.name
        labels.append(_SEED.sub("", name) or parent if others else name)
    if len(set(labels)) < len(labels):
        labels = [runs[members[0]].name for members in result.values()]
    return [(label, tuple(members)) for label, members in zip(labels, result.values(), strict=True)]
