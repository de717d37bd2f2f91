"""What ``tepo objective`` says of the user's own: presets in files, and plugins with their kinds. No torch."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from pydantic import ValidationError

from tepo_megatron.config.objective.custom import CustomKind, Plugin, kind_name, load_plugin
from tepo_megatron.config.objective.presets import PRESETS, Preset, is_preset_file, read_preset
from tepo_megatron.config.objective.section import ObjectiveConfig

_TRIED = (1.0, 0.1, 0.5, 2.0, 0.01, 10.0, 1)
"""Values for fields without a default, where a kind is checked by itself."""


def find_preset(name: str) -> Preset | None:
    """What a preset says, a row of the table or a file; None for what is neither, which may be a plugin."""
    return read_preset(name).preset if is_preset_file(name) else PRESETS.get(name)


def find_plugin(name: str) -> Plugin:
    """A plugin by its file or module; ValueError that says what would be there where it is none."""
    if not name.endswith(".py") and "." not in name:
        raise ValueError(
            f"{name} is no preset; there are {', '.join(PRESETS)}, or give a file: my_preset.yaml, my_objective.py"
        )
    return load_plugin(name)


def kind_rows(plugin: Plugin) -> Iterator[tuple[str, str, str]]:
    """(field, default, meaning) of every kind of a plugin and of its fields."""
    for kind in plugin.kinds:
        yield f"objective.{kind.slot}.kind = {kind_name(kind)}", "", kind.__doc__ or ""
        for name, field in kind.model_fields.items():
            if name != "kind":
                default = "required" if field.is_required() else str(field.get_default(call_default_factory=True))
                yield f"objective.{kind.slot}.{name}", default, field.description or ""


def kind_records(plugin: Plugin) -> dict[str, Any]:
    """A plugin for tools."""
    fields = [{"field": field, "default": default, "meaning": meaning} for field, default, meaning in kind_rows(plugin)]
    return {"digest": plugin.digest, "fields": fields}


def objectives_of(target: str, preset: str) -> Iterator[tuple[str, ObjectiveConfig]]:
    """What there is to check in a target, with a label: a preset as it is; of a plugin each kind, over ``preset``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a range that belongs to another ratio is no fault of a kind
        if find_preset(target) is not None:
            yield target, ObjectiveConfig(preset=target)
            return
        plugin = find_plugin(target)
        for kind in plugin.kinds:
            yield f"{target}: {kind.slot} {kind_name(kind)}, over {preset}", _alone(kind, plugin, preset)


def notes_on(plugins: Iterable[str]) -> list[str]:
    """A sentence for each plugin that cannot be read where there is no torch."""
    script = "import sys; sys.modules['torch'] = None\n" + (
        "from tepo_megatron.config.objective.custom import load_plugin; load_plugin(sys.argv[1])"
    )
    found = []
    for plugin in plugins:
        done = subprocess.run([sys.executable, "-c", script, plugin], capture_output=True, text=True, check=False)
        if done.returncode:
            found.append(
                f"{plugin} cannot be read without torch, as a login node would for 'tepo plan' and 'tepo launch'; import torch "
                "within the methods that use it, and under typing.TYPE_CHECKING for annotations"
            )
    return found


def _alone(kind: type[CustomKind], plugin: Plugin, preset: str) -> ObjectiveConfig:
    required = [name for name, field in kind.model_fields.items() if field.is_required()]
    problems: Sequence[Any] = ()
    for value in _TRIED:
        section = {"kind": kind_name(kind), **dict.fromkeys(required, value)}
        given = {"preset": preset, "plugins": (plugin.name,), kind.slot: section}
        try:
            return ObjectiveConfig.model_validate(given)
        except ValidationError as error:
            problems = error.errors()
            if not required:
                break
    said = "; ".join(dict.fromkeys(f"{'.'.join(map(str, chain(each['loc'])))}: {each['msg']}" for each in problems))
    raise ValueError(
        f"{plugin.name}: the kind {kind_name(kind)!r} cannot be checked by itself over the preset {preset} ({said}); write a "
        "preset's file that gives its fields values, and check that"
    )
