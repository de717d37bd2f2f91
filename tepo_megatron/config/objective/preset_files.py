"""Presets of one's own: a YAML file that says what an ``objective`` section says, laid over a preset that is there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tepo_megatron.config.bounds import LARGEST_FILE, check_yaml
from tepo_megatron.config.objective.presets import PRESETS, Preset

SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class PresetFile:
    """A preset of one's own, as its file says it."""

    base: str
    """The preset that it is laid over, one of the table."""

    plugins: tuple[str, ...]
    """Absolute paths of files, or names of modules."""

    preset: Preset


def is_preset_file(name: str) -> bool:
    """Whether ``objective.preset`` names a file, and not a row of the table."""
    return name.endswith(SUFFIXES)


def read_preset(name: str) -> PresetFile:
    """Reads a preset's file: the keys of an ``objective`` section, and ``formula`` and ``source`` as text.

    ``preset`` in it names what it is laid over, ``tepo`` unless given; paths of ``plugins`` are relative to the file.

    Raises:
        ValueError: no such file, not YAML of that form, or laid over what is no preset of the table.
    """
    path, where = Path(name).expanduser().absolute(), f"objective.preset = {name}"
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST_FILE).decode()
        check_yaml(text)
        given = yaml.safe_load(text)
    except OSError as error:
        raise ValueError(f"{where}: {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise ValueError(f"{where}: a preset's file has the keys of an objective section, such as 'trust_region:'")
    if isinstance(given.get("objective"), Mapping):
        raise ValueError(f"{where}: the keys of an objective section are at its top, without 'objective:'; is it a run's file?")
    sections = dict(given)
    said = {key: _text(sections.pop(key, ""), key, where) for key in ("source", "formula")}
    base = sections.pop("preset", "tepo")
    if not isinstance(base, str) or base not in PRESETS:
        raise ValueError(f"{where}: its own preset = {str(base)[:60]!r} must be one of {', '.join(PRESETS)}")
    return PresetFile(base, beside(path, sections.pop("plugins", ())), Preset(**said, changes=sections))


def beside(file: Path, plugins: Any) -> tuple[Any, ...]:
    """``plugins`` as a file names them: the paths among them are relative to the file. What is no list is left as it is."""
    if not isinstance(plugins, list | tuple):
        return (plugins,)
    return tuple(beside_path(file, each) if isinstance(each, str) and each.endswith(".py") else each for each in plugins)


def beside_path(file: Path, path: str) -> str:
    """The absolute path of what a file names by a path relative to it; one that begins with ``~`` or ``${`` stays."""
    return path if path.startswith(("~", "${")) else str(file.absolute().parent / path)


def _text(value: Any, key: str, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where}: {key} is a text")
    return value
