"""A whole run's configuration, with checks across sections."""

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import field_validator, model_validator

from tepo_megatron.config.base import Section
from tepo_megatron.config.checks import check_sections
from tepo_megatron.config.data import BUILTIN, is_custom, show_paths
from tepo_megatron.config.sections import RunSections

_ABSENT = object()


class RunConfig(RunSections):
    """All settings of a run: the sections of its YAML. Made by `load_run`, immutable, checked as a whole."""

    def require_data(self) -> None:
        """Raises ValueError if the user's own model would be trained on the demonstration's problems for lack of others. A plan
        needs no data."""
        own_model = not self.model.path.startswith(BUILTIN)
        if own_model and self.rollout.replay is None and "train" not in self.data.model_fields_set:
            raise ValueError(
                f"data.train is not given, and model.path = {self.model.path} is a model of your own: it would be trained on "
                f"the demonstration's sums; give data.train = FILE (docs/guides/bring-your-own.md), or data.train = "
                f"{show_paths(self.data.train)} if you mean them"
            )

    @model_validator(mode="before")
    @classmethod
    def _nothing_is_evaluated_without_problems(cls, raw: Any) -> Any:
        """Without held-out problems ``evaluate.every`` is 0; custom training problems bring no built-in ones."""
        if not isinstance(raw, Mapping):
            return raw
        data, evaluate = raw.get("data", {}), raw.get("evaluate", {})
        train, heldout = _given(data, "train"), _given(data, "heldout")
        if heldout is _ABSENT and is_custom(train):
            heldout = None
            raw = {**raw, "data": _with(data, heldout=None)}
        if heldout is None and _given(evaluate, "every") is _ABSENT and not _has_sets(evaluate):
            warnings.warn(
                "no held-out problems (data.heldout): nothing is evaluated. Give a file of problems that are not trained on, "
                "or set evaluate.every = 0 to say that you mean it",
                stacklevel=2,
            )
            return {**raw, "evaluate": _with(evaluate, every=0)}
        return raw

    @field_validator("name")
    @classmethod
    def _name_can_be_shown(cls, name: str) -> str:
        wrong = next((item for item in name if not item.isprintable() or item == "/"), None)
        if wrong is not None:
            raise ValueError(f"a name has printable characters but the slash, not U+{ord(wrong):04X}; output names the folder")
        return name

    @field_validator("output")
    @classmethod
    def _output_is_on_a_disk(cls, output: Path) -> Path:
        parts = Path(os.path.realpath(output)).parts
        if parts[1:2] in [("proc",), ("sys",), ("dev",)] and parts[:3] != ("/", "dev", "shm"):
            raise ValueError(f"a run cannot write to the system's own /{parts[1]}; name a folder on a disk")
        return output

    @model_validator(mode="after")
    def _sections_fit_together(self) -> "RunConfig":
        check_sections(self)
        return self


def _given(section: Any, field: str) -> Any:
    """``section`` may be checked or not."""
    if isinstance(section, Section):
        return getattr(section, field) if field in section.model_fields_set else _ABSENT
    return section.get(field, _ABSENT) if isinstance(section, Mapping) else _ABSENT


def _has_sets(evaluate: Any) -> bool:
    return bool(_given(evaluate, "sets")) and _given(evaluate, "sets") is not _ABSENT


def _with(section: Any, **changes: Any) -> Any:
    """Later checks report what is no section."""
    if isinstance(section, Section):
        return section.model_copy(update=changes)
    return {**section, **changes} if isinstance(section, Mapping) else section
