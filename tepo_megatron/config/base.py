import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic.json_schema import GenerateJsonSchema

LARGEST_INTEGER = 2**31 - 1

USER_FUNCTION = re.compile(r"([A-Za-z_]\w*(\.[A-Za-z_]\w*)*|[^:]+\.py):[A-Za-z_]\w*")
"""``package.module:name`` or ``path/file.py:name``."""

Seconds = Annotated[float, Field(gt=0, le=30 * 24 * 3600)]
"""More than 30 days is no limit, and system clocks overflow."""


class SchemaGenerator(GenerateJsonSchema):
    """Names a section without the underscore of a class that only its own module uses."""

    def normalize_name(self, name: str) -> str:
        return super().normalize_name(name.removeprefix("_"))


class Section(BaseModel):
    """Refuses unknown keys, infinite numbers, integers beyond 31 bits, and text that no file can hold.

    ``tepo config schema`` shows the string below a field.
    """

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
    def _paths_are_not_empty(cls, raw: Any) -> Any:
        """An empty path would be the current folder."""
        if isinstance(raw, Mapping):
            for name, field in cls.model_fields.items():
                if field.annotation in (Path, Path | None) and raw.get(name) == "":
                    raise ValueError(f"{name} is an empty path; write . for the current folder")
        return raw

    @field_validator("*")
    @classmethod
    def _can_be_kept(cls, value: Any) -> Any:
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, int) and abs(item) > LARGEST_INTEGER:
                raise ValueError(f"an integer here is {LARGEST_INTEGER} at most")
            if isinstance(item, str | Path):
                _check_text(str(item))
        return value

    def _changed(self, *names: str) -> dict[str, Any]:
        """Those that differ from their defaults, which a complete configuration (resolved.yaml) names too."""
        values = {name: getattr(self, name) for name in names}
        values = {name: value for name, value in values.items() if value != type(self).model_fields[name].default}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def _faults(self) -> Iterator[str]:
        """Yields sentences that say what to change in fields that contradict each other; validation reports the first."""
        return iter(())

    @model_validator(mode="after")
    def _fields_go_together(self) -> Self:
        for fault in self._faults():
            raise ValueError(fault)
        return self


def _check_text(text: str) -> None:
    for character in text:
        if character == "\0" or "\ud800" <= character <= "\udfff":
            raise ValueError(f"U+{ord(character):04X} is a character that no file and no command line takes; leave it out")
