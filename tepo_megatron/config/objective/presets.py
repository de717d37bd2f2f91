from __future__ import annotations

from collections.abc import Mapping
from difflib import SequenceMatcher
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tepo_megatron.config.base import read_yaml

LARGEST_FILE = 2**20  # bytes; a configuration has a few thousand


class Preset(NamedTuple):
    """A name of `PRESETS`, or a file, which has a base."""

    source: str
    formula: str
    changes: Mapping[str, Any]  # sections that differ from TEPO's, or from the base's
    base: str | None = None  # built-in preset under the file
    plugins: tuple[str, ...] = ()  # of the file: absolute paths, or module names

    @classmethod
    def find(cls, name: Any) -> Preset:
        """A file has the keys of ``objective``, and ``formula`` and ``source`` as text. Raises ValueError.

        Its ``preset`` is the one below (``tepo``); ``plugins`` are relative to the file.
        """
        if isinstance(name, str) and cls.is_file(name):
            return _read_preset(name)
        if not isinstance(name, str) or name not in PRESETS:
            text = str(name)  # one whose letters are in another order is nearer
            nearest = max(PRESETS, key=lambda key: (SequenceMatcher(None, text, key).ratio(), sorted(text) == sorted(key)))
            raise ValueError(
                f"objective.preset = {text[:60]!r} is unknown; the nearest is {nearest!r}. Known: {', '.join(PRESETS)}, or a "
                "file of your own, my_preset.yaml"
            )
        return PRESETS[name]

    @staticmethod
    def is_file(name: str) -> bool:
        return name.endswith(_SUFFIXES)


_SHIPPED: Mapping[str, Mapping[str, Preset]] = {
    kind: {name: Preset(entry.pop("source"), entry.pop("formula"), entry) for name, entry in entries.items()}
    for kind, entries in yaml.load(
        files("tepo_megatron.config.objective").joinpath("presets.yaml").read_text("utf-8"),
        Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader),  # ten times as fast: every command reads it  # noqa: S506
    ).items()
}
PRESETS = _SHIPPED["presets"]
CORRECTIONS = _SHIPPED["corrections"]

_SUFFIXES = (".yaml", ".yml")


def _read_preset(name: str) -> Preset:
    path, where = Path(name).expanduser().absolute(), f"objective.preset = {name}"
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise ValueError(f"{where}: {path} cannot be read: {error.strerror}") from error
    if len(data) > LARGEST_FILE:
        raise ValueError(f"{where}: {path} is larger than {LARGEST_FILE} bytes; this is no preset")
    raw = read_yaml(path, data)
    if not isinstance(raw, Mapping) or not all(isinstance(key, str) for key in raw):
        raise ValueError(f"{where}: a preset's file has the keys of an objective section, such as 'trust_region:'")
    if isinstance(raw.get("objective"), Mapping):
        raise ValueError(f"{where}: the keys of an objective section are at its top, without 'objective:'; is it a run's file?")
    sections = dict(raw)
    texts = {key: sections.pop(key, "") for key in ("source", "formula")}
    for key, value in texts.items():
        if not isinstance(value, str):
            raise ValueError(f"{where}: {key} is a text")
    base = sections.pop("preset", "tepo")
    if not isinstance(base, str) or base not in PRESETS:
        raise ValueError(f"{where}: its own preset = {str(base)[:60]!r} must be one of {', '.join(PRESETS)}")
    plugins = beside(path, sections.pop("plugins", ()))
    return Preset(**texts, changes=sections, base=base, plugins=plugins if isinstance(plugins, tuple) else (plugins,))


def beside(file: Path, path: Any) -> Any:
    """Makes a preset's or plugin's path, or a list of them, relative to the file; ``~`` and ``${`` stay."""
    if isinstance(path, list | tuple):
        return tuple(beside(file, item) for item in path)
    is_path = isinstance(path, str) and path.endswith((*_SUFFIXES, ".py")) and not path.startswith(("~", "${"))
    return str(file.absolute().parent / path) if is_path else path
