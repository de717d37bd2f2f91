"""``data``: the problems to train on and to evaluate on."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Annotated, Any

from pydantic import Field, PositiveInt, field_validator, model_validator

from tepo_megatron.config.base import USER_FUNCTION, Section

_COLUMN = re.compile(r"\{[A-Za-z_][\w.]*\}")


class FieldsConfig(Section):
    """What the columns of a file are called. ``a.b`` is the key b of a column a."""

    prompt: Annotated[str, Field(min_length=1)] = "prompt"
    """The column with the prompt: text, or a list of messages."""

    messages: Annotated[str, Field(min_length=1)] | None = None
    """The column with the prompt as a list of messages, each with ``role`` and ``content``. null: ``messages``, in lines
    without a prompt."""

    answer: Annotated[str, Field(min_length=1)] = "answer"
    """The column with the answer: text, or a number."""

    id: Annotated[str, Field(min_length=1)] = "id"
    """The column that names the problem. Where it is absent, problems are called by their file and line."""


class PromptsConfig(Section):
    """How prompts are made of the lines of a file; ``data`` has these for all files, and each source may have its own."""

    template: str | None = None
    """Text with columns in braces, such as ``"{prompt}\\nAnswer:"``, which makes a prompt of a line; ``{{`` is a brace. null:
    the prompt as it is."""

    system_prompt: str | None = None
    """The system message of each prompt in the chat template; a line whose messages have one keeps its own. null, or empty:
    none."""

    @field_validator("template")
    @classmethod
    def _template_has_a_column(cls, template: str | None) -> str | None:
        if template is not None and not _COLUMN.search(template.replace("{{", "")):
            raise ValueError("the template has no {column} in it, so that all prompts would be the same; write {prompt} there")
        return template


BUILTIN = "builtin:"
"""How the name of what ships with the package begins, in place of a path."""

FILTERS = ("unique", "number")
"""The filters of problems that come with the package, by name."""

ORDERS = ("shuffled", "as_given", "shortest_first")
"""The orders of problems that come with the package, by name."""

_NAME = re.compile(r"[A-Za-z_][\w.-]{0,59}")


def _known(names: Sequence[str], known: Sequence[str], what: str, form: str) -> None:
    for name in names:
        if name not in known and not USER_FUNCTION.fullmatch(name):
            raise ValueError(
                f"{name!r} is no {what}; known: {', '.join(known)}, or your own {form} as package.module:function or "
                "path/file.py:function"
            )


class SourceConfig(PromptsConfig):
    """One of several sources of problems. What is not given is as in ``data``, or as in ``reward`` for its verifier."""

    path: Annotated[str, Field(min_length=1)]
    """``builtin:NAME``, a file (JSON lines or Parquet), or a folder (a data set that Hugging Face's ``datasets`` saved to disk,
    or Parquet files)."""

    name: str | None = None
    """What metrics, messages and ids call it: letters, digits, and ``_ . -``. Ids of its problems are then ``name/id``. null:
    the name of its file, and ids as they are."""

    weight: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Its share of the prompts, relative to the other sources' weights."""

    verifier: str | None = None
    """Scores the responses to its problems. null: ``reward.verifier``, with its arguments and weights."""

    verifier_kwargs: dict[str, Any] = Field(default_factory=dict)
    """As ``reward.kwargs``, for ``verifier``."""

    verifier_weights: dict[str, float] | None = None
    """As ``reward.weights``, for ``verifier``."""

    chat_template: bool | None = None
    """As ``data.chat_template``, which null stands for."""

    fields: FieldsConfig | None = None
    """As ``data.fields``, which null stands for."""

    split: str | None = None
    """Which split of a folder, such as ``train``. null: the only one that it has."""

    filter: tuple[str, ...] | None = None
    """As ``data.filter``, which null stands for where the problems are trained on."""

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
        """Its name, or one that its path gives."""
        stem = PurePath(self.path.removeprefix(BUILTIN)).stem
        split = f"-{self.split}" if self.split else ""
        return self.name or re.sub(r"^[^A-Za-z_]+|[^\w.-]", "", f"{stem}{split}")[:60] or "source"


Sources = str | tuple[SourceConfig, ...]


class DataConfig(PromptsConfig):
    train: Sources = "builtin:addition"
    """Problems to train on: ``builtin:NAME``, or a file or folder with ``prompt``, ``answer`` and optionally ``id``. Or a list
    of several sources (``path``, ``weight``, ``verifier`` and others: docs/guides/data.md)."""

    heldout: Sources | None = "builtin:addition-heldout"
    """Problems for evaluation, given in the same way; they are never trained on, and weights do not count. null: nothing is
    evaluated, which is the default where ``train`` is your own file: built-in problems stand beside built-in ones only."""

    chat_template: bool = False
    """Wrap each prompt in the tokenizer's chat template as a user message. Prompts that are messages always are."""

    fields: FieldsConfig = FieldsConfig()
    """What the columns of the files are called."""

    filter: tuple[str, ...] = ()
    """Only problems to train on that each of these keeps: ``unique`` (leaves out a prompt that came before in its source),
    ``number`` (an answer without a number in it), or your own function ``(problem) -> bool``, true to keep it, as
    ``path/file.py:function`` or ``package.module:function``."""

    order: str = "shuffled"
    """The order of a source's problems in each pass over them: ``shuffled`` (by ``seed``, another one in each pass),
    ``as_given`` (as in the file), ``shortest_first`` (by the characters of the prompt), or your own function
    ``(problem) -> float`` as ``path/file.py:function``, the smallest first, equal ones shuffled. Sources alternate by their
    weights in any order."""

    max_prompt_tokens: PositiveInt | None = None
    """Largest length of a prompt in tokens; problems with a longer one are left out, and counted. Default: no bound."""

    @field_validator("train", "heldout")
    @classmethod
    def _sources_can_be_told_apart(cls, given: Sources | None) -> Sources | None:
        if given == ():
            raise ValueError("the list of sources is empty; give a path, or at least one source")
        called = [source.called for source in given] if isinstance(given, tuple) else []
        twice = next((name for name in called if called.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"two sources are called {twice}, and could not be told apart; give each a name of its own")
        return given

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
        """The sources to train on, each with everything that it takes from this section. A plain path is one without a name."""
        return tuple(self.complete(source) for source in _listed(self.train))

    @property
    def heldout_sources(self) -> tuple[SourceConfig, ...]:
        """The same of the held-out problems; none without any."""
        return tuple(self.complete(source, filtered=False) for source in _listed(self.heldout or ()))

    @property
    def paths(self) -> dict[str, str]:
        """The path of each source, by its field, such as ``data.train`` or ``data.train[1].path``."""
        found = {}
        for field in ("train", "heldout"):
            given = getattr(self, field)
            if isinstance(given, str):
                found[f"data.{field}"] = given
            else:
                found |= {f"data.{field}[{at}].path": source.path for at, source in enumerate(given or ())}
        return found

    def with_paths(self, change: dict[str, str]) -> DataConfig:
        """With other paths; keys as in :attr:`paths`."""
        changed: dict[str, Any] = {}
        for field in ("train", "heldout"):
            given = getattr(self, field)
            if isinstance(given, str):
                changed[field] = change[f"data.{field}"]
            elif given is not None:
                moved = [change[f"data.{field}[{at}].path"] for at in range(len(given))]
                changed[field] = tuple(
                    source.model_copy(update={"path": path}) for source, path in zip(given, moved, strict=True)
                )
        return self.model_copy(update=changed)

    def complete(self, source: SourceConfig, *, filtered: bool = True) -> SourceConfig:
        """The source with everything that it takes from this section; ``filtered``: also ``filter``."""
        inherited = ["template", "system_prompt", "chat_template", "fields", *(["filter"] if filtered else [])]
        return source.model_copy(update={name: getattr(self, name) for name in inherited if getattr(source, name) is None})


def _listed(given: Sources) -> tuple[SourceConfig, ...]:
    return (SourceConfig(path=given),) if isinstance(given, str) else given


def is_own(given: Any) -> bool:
    """Whether one of these problems is the user's own; ``given`` as for ``data.train``, also before it is checked."""
    if isinstance(given, str):
        return not given.startswith(BUILTIN)
    if isinstance(given, Sequence):
        return any(is_own(source.get("path") if isinstance(source, Mapping) else source) for source in given)
    return is_own(given.path) if isinstance(given, SourceConfig) else False


def show_paths(given: Sources) -> str:
    """The paths of problems, in one line."""
    return given if isinstance(given, str) else ", ".join(source.path for source in given)
