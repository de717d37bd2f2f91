"""The paths that a job's configuration names, as its nodes read them: absolute. The user's own code by file is among them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from tepo_megatron.config import RunConfig
from tepo_megatron.config.base import Section

BUILTIN = "builtin:"

_OWN_CODE = re.compile(r"[^:\n]+\.py:[A-Za-z_]\w*")
"""``path/file.py:name``: a verifier, filter, order, environment, callback or any other function or class of the user's."""

_NOT_OURS = ("cluster", "kwargs", "verifier_kwargs", "template", "system_prompt")
"""Fields without such names: those of the machine that submits, what the user's own code is given, and text for the model."""

Change = Callable[[str, Any], Any]
"""What a field's value becomes; called with the field's name, such as ``data.train[1].verifier``, and the value."""


def absolute(field: str, path: str, config: RunConfig) -> str:
    """The path as the nodes read it. Raises ValueError for a relative one where the job is submitted through ssh."""
    if path.startswith((BUILTIN, "/")):
        return path
    if config.cluster.ssh is not None:
        raise ValueError(
            f"{field} = {path!r} is relative, but with cluster.ssh it lies on another machine; write the whole path"
        )
    return str(Path(path).expanduser().absolute())


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """The configuration with every path absolute: those of files and folders, of problems, and of the user's own code."""

    def change(field: str, value: Any) -> Any:
        if isinstance(value, Path):
            return Path(absolute(field, str(value), config))
        if isinstance(value, str) and _OWN_CODE.fullmatch(value):
            place, _, name = value.rpartition(":")
            return f"{absolute(field, place, config)}:{name}"
        return value

    changed = _changed(config, "", change)
    assert isinstance(changed, RunConfig)
    train = changed.train
    if train.resume_from is not None and "/" in train.resume_from:
        train = train.model_copy(update={"resume_from": absolute("train.resume_from", train.resume_from, config)})
    data = {name: absolute(name, file, config) for name, file in config.data.paths.items()}
    sets = {name: absolute(f"evaluate.sets.{name}.path", file, config) for name, file in config.evaluate.paths.items()}
    model = changed.model.model_copy(update={"path": absolute("model.path", config.model.path, config)})
    return changed.model_copy(
        update={
            "train": train,
            "model": model,
            "data": changed.data.with_paths(data),
            "evaluate": changed.evaluate.with_paths(sets),
        }
    )


def own_code(config: RunConfig) -> dict[str, str]:
    """The files of the user's own code, by the field that names one, such as ``data.order``; without plugins."""
    found = {}

    def note(field: str, value: Any) -> Any:
        if isinstance(value, str) and _OWN_CODE.fullmatch(value):
            found[field] = value.rpartition(":")[0]
        return value

    _changed(config, "", note)
    return found


def own_folders(config: RunConfig) -> set[str]:
    """The folders with the user's own code; what lies beside a file can be imported by it."""
    files = [*own_code(config).values(), *(name for name in config.objective.plugins if name.startswith("/"))]
    return {str(PurePosixPath(file).parent) for file in files}


def _changed(value: Any, field: str, change: Change) -> Any:
    """The value with ``change`` applied to everything in it that is neither a section nor a collection."""
    if isinstance(value, Section):
        parts = {name: getattr(value, name) for name in type(value).model_fields if name not in _NOT_OURS}
        made = {name: _changed(part, f"{field}.{name}" if field else name, change) for name, part in parts.items()}
        return value.model_copy(update={name: part for name, part in made.items() if part != parts[name]})
    if isinstance(value, Mapping):
        return {name: _changed(part, f"{field}.{name}", change) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_changed(part, f"{field}[{at}]", change) for at, part in enumerate(value))
    return change(field, value)
