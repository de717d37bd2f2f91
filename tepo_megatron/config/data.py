"""``data``: problems for training and evaluation."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Annotated, Any

from pydantic import Field, PositiveInt, field_validator, model_validator

from tepo_megatron.config.base import USER_FUNCTION, Section

_COLUMN = re.compile(r"\{[A-Za-z_][\w.]*\}")


class FieldsConfig(Section):
    """Column names of a file. ``a.b`` is key b of column a."""

    prompt: Annotated[str, Field(min_length=1)] = "prompt"
    """The column with the prompt: text, or a list of messages."""

    messages: Annotated[str, Field(min_length=1)] | None = None
    """Column with the prompt as messages, each with ``role`` and ``content``. null: ``messages``, in lines without a prompt."""

    answer: Annotated[str, Field(min_length=1)] = "answer"
    """Column with the answer: text, or a number."""

    id: Annotated[str, Field(min_length=1)] = "id"
    """Column that names the problem. Without it, file and line do."""


class PromptsConfig(Section):
    """How lines of a file become prompts; a source may override ``data``."""

    template: str | None = None
    r"""Makes a prompt of a line: text with columns in braces, such as ``"{prompt}\nAnswer:"``; ``{{`` is a brace. null: the
    prompt as it is."""

    system_prompt: str | None = None
    """System message of each prompt in the chat template; a line's own one wins. null, or empty: none."""

    @field_validator("template")
    @classmethod
    def _template_has_a_column(cls, template: str | None) -> str | None:
        if template is not None and not _COLUMN.search(template.replace("{{", "")):
            raise ValueError("the template has no {column} in it, so that all prompts would be the same; write {prompt} there")
        return template


BUILTIN = "builtin:"
"""Prefix of problems that ship with the package."""

FILTERS = ("unique", "number")

ORDERS = ("shuffled", "as_given", "shortest_first")

_NAME = re.compile(r"[A-Za-z_][\w.-]{0,59}")


def _known(names: Sequence[str], known: Sequence[str], what: str, form: str) -> None:
    for name in names:
        if name not in known and not USER_FUNCTION.fullmatch(name):
            raise ValueError(
                f"{name!r} is no {what}; known: {', '.join(known)}, or your own {form} as package.module:function or "
                "path/file.py:function"
            )


class SourceConfig(PromptsConfig):
    """One of several sources of problems. Unset fields are as in ``data``, or ``reward`` for the verifier."""

    path: Annotated[str, Field(min_length=1)]
    """``builtin:NAME``, a file (JSON lines or Parquet), or a folder (of Hugging Face's ``datasets``, or Parquet files)."""

    name: str | None = None
    """Name in metrics, messages and ids (``name/id``): letters, digits, and ``_ . -``. null: the file's name, and ids
    unchanged."""

    weight: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Share of the prompts, relative to other sources' weights."""

    verifier: str | None = None
    """Scores responses to its problems. null: ``reward.verifier``, with its arguments and weights."""

    verifier_kwargs: dict[str, Any] = Field(default_factory=dict)
    """As ``reward.kwargs``, for ``verifier``."""

    verifier_weights: dict[str, float] | None = None
    """As ``reward.weights``, for ``verifier``."""

    chat_template: bool | None = None
    """As ``data.chat_template``; null: the same."""

    fields: FieldsConfig | None = None
    """As ``data.fields``; null: the same."""

    split: str | None = None
    """Split of a folder, such as ``train``. null: the only one."""

    filter: tuple[str, ...] | None = None
    """As ``data.filter``; null: the same for problems to train on."""

    @field_validator("name")
    @classmethod
    def _name_can_be_a_metric(cls, name: str | None) -> str | None:
        if name is not None and not _NAME.fullmatch(name):
            raise ValueError("a source's name begins with a letter and has letters, digits, _ . and -, 60 at most")
        return name

    @field_validator("filter")
    @classmethod
    def _filters_are_known(cls, names: tuple[str, ...] | None) -> tuple[str, ...] | None:
        _known(names or (), FILTERS, "filter", "(problem) -> bool")
        return names

    @model_validator(mode="after")
    def _arguments_have_their_verifier(self) -> SourceConfig:
        if self.verifier is None and (self.verifier_kwargs or self.verifier_weights is not None):
            raise ValueError(
                "verifier_kwargs and verifier_weights are for this source's own verifier; give it, or set reward's"
            )
        return self

    @property
    def called(self) -> str:
        """Its name, or one from its path."""
        stem = PurePath(self.path.removeprefix(BUILTIN)).stem
        split = f"-{self.split}" if self.split else ""
        return self.name or re.sub(r"^[^A-Za-z_]+|[^\w.-]", "", f"{stem}{split}")[:60] or "source"


Sources = str | tuple[SourceConfig, ...]


class DataConfig(PromptsConfig):
    train: Sources = "builtin:addition"
    """Problems to train on: ``builtin:NAME``, or a file or folder with ``prompt``, ``answer`` and optionally ``id``; or a list
    of sources (``path``, ``weight``, ``verifier``, …: docs/guides/data.md)."""

    heldout: Sources | None = "builtin:addition-heldout"
    """Problems for evaluation, never trained on; weights do not count. null: none, the default if ``train`` is your own, since
    built-in problems go only with built-in ones."""

    chat_template: bool = False
    """Wrap each prompt in the tokenizer's chat template as a user message; prompts of messages always are."""

    fields: FieldsConfig = FieldsConfig()
    """Column names of the files."""

    filter: tuple[str, ...] = ()
    """Filters of training problems; all must keep a problem: ``unique`` (no repeated prompt in a source), ``number`` (the
    answer has a number), or a custom function ``(problem) -> bool``, true to keep it, as ``path/file.py:function`` or
    ``package.module:function``."""

    order: str = "shuffled"
    """Order of a source's problems in each pass: ``shuffled`` (by ``seed``, new in each pass), ``as_given``, ``shortest_first``
    (by characters of the prompt), or a custom function ``(problem) -> float`` as ``path/file.py:function``, smallest first,
    equal ones shuffled. Sources always alternate by weight."""

    max_prompt_tokens: PositiveInt | None = None
    """Largest prompt in tokens; problems with longer ones are left out, and counted. Default: no bound."""

    @field_validator("train", "heldout")
    @classmethod
    def _sources_can_be_told_apart(cls, raw: Sources | None) -> Sources | None:
        if raw == ():
            raise ValueError("the list of sources is empty; give a path, or at least one source")
        called = [source.called for source in raw] if isinstance(raw, tuple) else []
        twice = next((name for name in called if called.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"two sources are called {twice}, and could not be told apart; give each a name of its own")
        return raw

    @field_validator("filter")
    @classmethod
    def _filters_are_known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        _known(names, FILTERS, "filter", "(problem) -> bool")
        return names

    @field_validator("order")
    @classmethod
    def _order_is_known(cls, name: str) -> str:
        _known([name], ORDERS, "order", "(problem) -> float")
        return name

    @property
    def train_sources(self) -> tuple[SourceConfig, ...]:
        """Training sources with all that they inherit from this section. A plain path is one without a name."""
        return tuple(self.complete(source) for source in _listed(self.train))

    @property
    def heldout_sources(self) -> tuple[SourceConfig, ...]:
        """As :attr:`train_sources`, without ``filter``; may be empty."""
        return tuple(self.complete(source, filtered=False) for source in _listed(self.heldout or ()))

    @property
    def paths(self) -> dict[str, str]:
        """Path of each source by field, such as ``data.train`` or ``data.train[1].path``."""
        result = {}
        for field in ("train", "heldout"):
            raw = getattr(self, field)
            if isinstance(raw, str):
                result[f"data.{field}"] = raw
            else:
                result |= {f"data.{field}[{index}].path": source.path for index, source in enumerate(raw or ())}
        return result

    def with_paths(self, change: dict[str, str]) -> DataConfig:
        """Keys are as in :attr:`paths`."""
        changed: dict[str, Any] = {}
        for field in ("train", "heldout"):
            raw = getattr(self, field)
            if isinstance(raw, str):
                changed[field] = change[f"data.{field}"]
            elif raw is not None:
                paths = [change[f"data.{field}[{index}].path"] for index in range(len(raw))]
                changed[field] = tuple(
                    source.model_copy(update={"path": path}) for source, path in zip(raw, paths, strict=True)
                )
        return self.model_copy(update=changed)

    def complete(self, source: SourceConfig, *, filtered: bool = True) -> SourceConfig:
        """The source with all that it inherits from this section; ``filtered``: also ``filter``."""
        inherited = ["template", "system_prompt", "chat_template", "fields", *(["filter"] if filtered else [])]
        return source.model_copy(update={name: getattr(self, name) for name in inherited if getattr(source, name) is None})


def _listed(raw: Sources) -> tuple[SourceConfig, ...]:
    return (SourceConfig(path=raw),) if isinstance(raw, str) else raw


def is_custom(given: Any) -> bool:
    """Whether a problem is the user's own; ``given`` is as for ``data.train``, checked or not."""
    if isinstance(given, str):
        return not given.startswith(BUILTIN)
    if isinstance(given, Sequence):
        return any(is_custom(source.get("path") if isinstance(source, Mapping) else source) for source in given)
    return is_custom(given.path) if isinstance(given, SourceConfig) else False


def show_paths(given: Sources) -> str:
    """Paths of problems, in one line."""
    return given if isinstance(given, str) else ", ".join(source.path for source in given)
