import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from tepo_megatron.runtime.text import check_text

LARGEST_INTEGER = 2**31 - 1

_USER_FUNCTION = re.compile(r"([A-Za-z_]\w*(\.[A-Za-z_]\w*)*|[^:]+\.py):[A-Za-z_]\w*")
"""``package.module:name`` or ``path/file.py:name``."""

_FUNCTION_FORM = "package.module:function or path/file.py:function"


def check_known(names: Sequence[str], known: Sequence[str], what: str, form: str) -> None:
    """Raises ValueError for a name that is neither known nor a user's function, or called as another."""
    for name in names:
        if name not in known and not _USER_FUNCTION.fullmatch(name):
            raise ValueError(f"{name!r} is no {what}; known: {', '.join(known)}, or your own {form} as {_FUNCTION_FORM}")
    called = [name.rpartition(":")[2] for name in names]
    twice = next((name for name in called if called.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"two {what}s are called {twice}, and their counts could not be told apart; rename one")


class _SafeLoader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"):
            if key.value in keys:
                raise yaml.MarkedYAMLError(problem=f"duplicate key {key.value}", problem_mark=key.start_mark)
            keys.add(key.value)
        return node


def read_yaml(path: Path, raw: bytes | None = None) -> Any:
    """``raw``: the file's bytes, if they were read. Raises ValueError if it cannot be read or is no YAML."""
    try:
        value = yaml.load((path.read_bytes() if raw is None else raw).decode(), _SafeLoader)  # noqa: S506
        check_text(value, "it")
        return value
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    except (yaml.YAMLError, ValueError, RecursionError, AttributeError) as error:  # a value such as !!timestamp 1 too
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error


def merge_sections(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Field by field; a section of another kind replaces the one below."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            is_other_kind = "kind" in old and value.get("kind", old["kind"]) != old["kind"]
            value = value if is_other_kind else merge_sections(old, value)
        merged[key] = value
    return merged


Seconds = Annotated[float, Field(gt=0, le=30 * 24 * 3600)]
"""More than 30 days is no limit, and system clocks overflow."""


class Section(BaseModel):
    """Refuses unknown keys, infinite numbers, integers beyond 31 bits, and unwritable text."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        model_title_generator=lambda model: model.__name__.removeprefix("_"),
    )

    @model_validator(mode="before")
    @classmethod
    def _nothing_is_converted(cls, raw: Any) -> Any:
        """An empty path would be the current folder, and ``true`` 1."""
        if isinstance(raw, Mapping):
            for name, field in cls.model_fields.items():
                if field.annotation in (Path, Path | None) and raw.get(name) == "":
                    raise ValueError(f"{name} is an empty path; write . for the current folder")
                value = raw.get(name)
                items = dict(enumerate(value)) if isinstance(value, list | tuple) else value
                places = {f".{key}": item for key, item in items.items()} if isinstance(items, Mapping) else {"": items}
                for place, item in places.items():
                    if isinstance(item, bool) and _takes_numbers_only(field.annotation, mapping=isinstance(value, Mapping)):
                        raise ValueError(f"{name}{place} = {_as_yaml(item)} is no number; write one")
        return raw

    @field_validator("*")
    @classmethod
    def _can_be_kept(cls, value: Any) -> Any:
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, int) and abs(item) > LARGEST_INTEGER:
                raise ValueError(f"an integer here is {LARGEST_INTEGER} at most")
            for character in str(item) if isinstance(item, str | Path) else "":
                if character == "\0" or "\ud800" <= character <= "\udfff":
                    code = f"U+{ord(character):04X}"
                    raise ValueError(f"{code} is a character that no file and no command line takes; leave it out")
        return value

    def _changed(self, *names: str) -> dict[str, Any]:
        """Fields that differ from their defaults; a complete configuration (resolved.yaml) sets all."""
        values = {name: getattr(self, name) for name in names}
        values = {name: value for name, value in values.items() if value != type(self).model_fields[name].default}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def with_values(self, values: Mapping[str, Any]) -> Self:
        """``values``: by dotted path. Raises ValidationError; does not warn."""
        raw = self.model_dump()
        for path, value in values.items():
            *parents, name = path.split(".")
            inner: Any = raw
            for parent in parents:
                inner = inner[parent]
            inner[name] = value
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return type(self).model_validate(raw)

    def _idle(self, names: Iterable[str], other: str, needed: Any) -> Iterator[str]:
        """Yields a sentence for each set field that acts only if ``other`` has the value ``needed``."""
        if getattr(self, other) != needed:
            for name, value in self._changed(*names).items():
                actual, remedy = (f"{other} = {_as_yaml(item)}" for item in (getattr(self, other), needed))
                yield f"{name} = {_as_yaml(value)} does nothing with {actual}; set {remedy}, or leave {name} out"

    def _faults(self) -> Iterator[str]:
        """Yields sentences on contradicting fields; validation reports the first."""
        return iter(())

    def _training_faults(self) -> Iterator[str]:
        """As ``_faults``, of what acts only if the run trains."""
        return iter(())

    @model_validator(mode="after")
    def _fields_go_together(self, info: ValidationInfo) -> Self:
        trains = (info.context or {}).get("trains", True)
        for fault in chain(self._faults(), self._training_faults() if trains else ()):
            raise ValueError(fault)
        return self


def _takes_numbers_only(annotation: Any, *, mapping: bool) -> bool:
    """``mapping``: as its values, and not as the fields of a section."""
    kinds = set(re.findall(r"\w+", repr(annotation)))
    return bool(kinds & {"int", "float"}) and not kinds & {"bool", "Any"} and (not mapping or bool(kinds & {"dict", "Mapping"}))


def _as_yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
