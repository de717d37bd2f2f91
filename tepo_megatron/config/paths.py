"""One rule for a run's paths: in a file they are relative to the file, elsewhere to the current folder."""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tepo_megatron.config.base import Section
from tepo_megatron.config.data import BUILTIN
from tepo_megatron.runtime.hub import HUB

_PATHS = re.compile(
    r"output|model\.(path|shards|lora\.path)|data\.(train|heldout)(\[\d+\](\.path)?)?|(evaluate\.sets|teachers)\.[^.]+\.path"
    r"|environment\.(agent\.)?key_file|rollout\.replay|(rollout|teachers\.[^.]+)\.server\.(registry|speculative\.draft_model)"
    r"|cluster\.ssh_identity"
)
_CUSTOM_CODE = re.compile(r"[^:\n]+\.py:[A-Za-z_]\w*")
_TEXTS = ("kwargs", "verifier_kwargs", "template", "system_prompt", "stop", "bad_words", "extra_args")
_Change = Callable[[str, str], str]  # (field such as data.train[1].verifier, path) → path


def _with_paths(values: Any, change: _Change, name: str = "") -> Any:
    """Changes each path in ``values``, a section or a file's content; of ``path/file.py:function`` the file's."""
    if isinstance(values, Section):
        parts = {key: getattr(values, key) for key in type(values).model_fields}
        made = {key: _inner(part, name, key, change) for key, part in parts.items()}
        return values.model_copy(update={key: part for key, part in made.items() if part != parts[key]})
    if isinstance(values, Mapping):
        return {key: _inner(part, name, str(key), change) for key, part in values.items()}
    if isinstance(values, list | tuple):
        return type(values)(_with_paths(part, change, f"{name}[{index}]") for index, part in enumerate(values))
    if isinstance(values, Path):
        return Path(change(name, str(values)))
    if not isinstance(values, str):
        return values
    if _PATHS.fullmatch(name) or (name == "train.resume_from" and "/" in values):
        return change(name, values)
    if _CUSTOM_CODE.fullmatch(values) and name != "name" and not name.startswith("cluster."):
        place, _, function = values.rpartition(":")
        return f"{change(name, place)}:{function}"
    return values


def _inner(part: Any, above: str, key: str, change: _Change) -> Any:
    if key in _TEXTS and above not in ("evaluate.sets", "teachers"):  # whose keys are names
        return part
    return _with_paths(part, change, f"{above}.{key}" if above else key)


def paths_in(values: Any) -> dict[str, str]:
    """Returns paths by field, such as ``data.train[1].path``; of ``path/file.py:function`` the file's."""
    result: dict[str, str] = {}
    _with_paths(values, lambda field, path: result.setdefault(field, path))
    return result


def _is_relative(path: str) -> bool:
    return not path.startswith((BUILTIN, HUB, "/", "~", "${"))


def absolute(values: Any) -> Any:
    """For what another process reads, or reads later, in whatever folder it is."""

    def change(_: str, path: str) -> str:
        return _clean(Path(path).expanduser()) if _is_relative(path) or path.startswith("~") else path

    return _with_paths(values, change)


def seen_from(values: Any, folder: Path) -> Any:
    """Makes paths relative to ``folder``, for a file there."""
    there = os.path.realpath(folder)  # .. of a link is not beside it
    return _with_paths(values, lambda _, path: os.path.relpath(_clean(Path(path)), there) if _is_relative(path) else path)


@dataclass
class FilePaths:
    """Makes paths of files relative to the current folder if they lie in it, and absolute otherwise."""

    _written: dict[str, tuple[str, Path]] = field(default_factory=dict)  # path → as in the file, and the file

    def of_file(self, values: Any, file: Path) -> Any:
        def change(_: str, path: str) -> str:
            if not _is_relative(path):
                return path
            result = _from_here(file.parent / path)
            self._written[result] = (path, file)
            return result

        return values if file.parent.resolve() == Path.cwd() else _with_paths(values, change)

    def misplaced(self, config: Section, file: Path) -> Iterator[str]:
        """Yields a sentence for each path that is missing, and would not be by the other rule. ``file``: the run's."""
        for name, path in paths_in(config).items():
            if os.path.lexists(path):
                continue
            if path in self._written:
                written, source = self._written[path]
                remedy = f"There is one in the current folder; write {os.path.relpath(written, source.parent)}"
                if os.path.lexists(Path(written, "resolved.yaml") if name == "output" else written):
                    yield f"{name}: there is no {path}: {written!r} in {source} is relative to that file. {remedy}"
            elif name != "output" and _is_relative(path) and os.path.lexists(file.parent / path):
                rule = "on the command line it is relative to the current folder"
                yield f"{name}: there is no {path}: {rule}. There is one beside {file}; write {file.parent / path}"


def _from_here(path: Path) -> str:
    result = _clean(path)
    relative = os.path.relpath(result)
    return result if relative.startswith("..") else relative


def _clean(path: Path) -> str:
    short = os.path.abspath(path)
    is_same = os.path.realpath(short) == os.path.realpath(path)  # .. behind a link is not
    return short if is_same else str(path.parent.resolve() / path.name)
