"""``data`` and ``evaluate``: problems and evaluations."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from tepo_megatron.config.base import Section, check_known

_COLUMN = re.compile(r"\{[A-Za-z_][\w.]*\}")


class _FieldsConfig(Section):
    """Column names of a file. ``a.b`` is key b of column a."""

    prompt: Annotated[str, Field(min_length=1)] = "prompt"
    """The prompt: text, or a list of messages."""

    messages: Annotated[str, Field(min_length=1)] | None = None
    """The prompt as messages with ``role`` and ``content``. null: ``messages``, in lines without a prompt."""

    answer: Annotated[str, Field(min_length=1)] = "answer"
    """Text or number."""

    id: Annotated[str, Field(min_length=1)] = "id"
    """Names the problem. Default: file and line."""


_OF_PROMPTS = ("template", "system_prompt", "chat_template", "special_tokens")


class _PromptsConfig(Section):
    """How lines of a file become prompts; a source may override ``data``."""

    template: str | None = None
    r"""Makes a prompt of a line's columns, such as ``"{prompt}\nAnswer:"``; ``{{`` is a brace. null: the prompt as it is."""

    system_prompt: str | None = None
    """System message in the chat template; a line's own one wins. null, or empty: none."""

    @field_validator("template")
    @classmethod
    def _template_has_a_column(cls, template: str | None) -> str | None:
        if template is not None and not _COLUMN.search(template.replace("{{", "")):
            raise ValueError("the template has no {column} in it, so that all prompts would be the same; write {prompt} there")
        return template


class _InheritingConfig(_PromptsConfig):
    """Unset fields are as in ``data``."""

    path: Annotated[str, Field(min_length=1)]
    """``builtin:NAME``, a file (JSON lines, Parquet), or a folder (of Hugging Face's ``datasets``, or Parquet files)."""

    chat_template: bool | None = None
    """As ``data.chat_template``; null: the same."""

    special_tokens: bool | None = None
    """Overrides ``data.special_tokens``; null: the same."""

    fields: _FieldsConfig | None = None
    """As ``data.fields``; null: the same."""

    split: str | None = None
    """Names a folder's split. null: the only one."""

    @property
    def columns(self) -> _FieldsConfig:
        is_builtin = self.path.startswith(BUILTIN)  # data.fields is for files
        return _DEFAULT_COLUMNS if is_builtin or self.fields is None else self.fields


_DEFAULT_COLUMNS = _FieldsConfig()

BUILTIN = "builtin:"

FILTERS = ("unique", "number")

ORDERS = ("shuffled", "as_given", "shortest_first")

_NAME = re.compile(r"[A-Za-z_][\w.-]{0,59}")


def _check_filters(names: tuple[str, ...]) -> tuple[str, ...]:
    check_known(names, FILTERS, "filter", "(problem) -> bool")
    return names


_Filters = Annotated[tuple[str, ...], AfterValidator(_check_filters)]


class SourceConfig(_InheritingConfig):
    """Unset fields are as in ``data``, or ``reward`` for the verifier."""

    name: str | None = None
    """Name in metrics, messages and ids: letters, digits, ``_ . -``. null: the file's, and ids without it."""

    weight: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Share of prompts, relative to other sources."""

    verifier: str | None = None
    """Scores its responses. null: ``reward.verifier``, with its arguments and weights."""

    verifier_kwargs: dict[str, Any] = Field(default_factory=dict)
    """As ``reward.kwargs``, for ``verifier``."""

    verifier_weights: dict[str, float] | None = None
    """As ``reward.weights``, for ``verifier``."""

    teacher: str | None = None
    """Names the teacher of its responses (``teachers``). null: the only one."""

    filter: _Filters | None = None
    """As ``data.filter``; null: the same for training problems."""

    @model_validator(mode="before")
    @classmethod
    def _text_is_a_path(cls, raw: Any) -> Any:
        return {"path": raw} if isinstance(raw, str) else raw

    @field_validator("name")
    @classmethod
    def _name_can_be_a_metric(cls, name: str | None) -> str | None:
        if name is not None and not _NAME.fullmatch(name):
            raise ValueError("a source's name begins with a letter and has letters, digits, _ . and -, 60 at most")
        return name

    @property
    def scoring(self) -> dict[str, Any]:
        """Fields of ``reward`` that its own verifier replaces."""
        return {"verifier": self.verifier, "kwargs": self.verifier_kwargs, "weights": self.verifier_weights}

    def _faults(self) -> Iterator[str]:
        if self.verifier is None and (self.verifier_kwargs or self.verifier_weights is not None):
            yield "verifier_kwargs and verifier_weights are for this source's own verifier; give it, or set reward's"

    @property
    def called(self) -> str:
        stem = PurePath(self.path.removeprefix(BUILTIN)).stem
        split = f"-{self.split}" if self.split else ""
        return self.name or re.sub(r"^[^A-Za-z_]+|[^\w.-]", "", f"{stem}{split}")[:60] or "source"


Sources = str | tuple[SourceConfig, ...]


class DataConfig(_PromptsConfig):
    train: Sources = "builtin:addition"
    """Training problems: ``builtin:NAME``, file, folder, ``hub:ORGANISATION/NAME``, or sources (docs/guides/data.md)."""

    heldout: Sources | None = "builtin:addition-heldout"
    """Problems for evaluation only, unweighted. null: none, the default for a custom ``train``."""

    chat_template: bool = False
    """Wrap prompts in the tokenizer's chat template; prompts of messages always are."""

    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the chat template, such as ``{enable_thinking: false}``, wherever the run uses it."""

    special_tokens: bool = False
    """Special tokens' names in plain prompts and ``template`` become these tokens. false: plain text."""

    fields: _FieldsConfig = _FieldsConfig()
    """Column names of the files."""

    filter: _Filters = ()
    """Filters of training problems; all must accept: ``unique`` (no repeated prompt in a source), ``number`` (the answer has
    one), or a custom ``(problem) -> bool``, true to accept, as ``path/file.py:function``.
    """

    order: str = "shuffled"
    """Order in a source: ``shuffled`` (by ``seed``, new in each pass), ``as_given``, ``shortest_first`` (characters), or a
    custom ``(problem) -> float``, smallest first, as ``path/file.py:function``. Sources alternate by weight.
    """

    max_prompt_tokens: PositiveInt | None = None
    """Largest prompt in tokens; longer ones are left out. Default: no bound."""

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

    @field_validator("order")
    @classmethod
    def _order_is_known(cls, name: str) -> str:
        check_known([name], ORDERS, "order", "(problem) -> float")
        return name

    @property
    def train_sources(self) -> tuple[SourceConfig, ...]:
        """They inherit from this section. A plain path has no name."""
        return tuple(self.complete(source) for source in _listed(self.train))

    @property
    def source_verifiers(self) -> dict[str, Any]:
        return {source.called: [*source.scoring.values()] for source in self.train_sources if source.verifier is not None}

    @property
    def heldout_sources(self) -> tuple[SourceConfig, ...]:
        """As ``train_sources``, without ``filter``; may be empty."""
        return tuple(self.complete(source, filtered=False) for source in _listed(self.heldout or ()))

    @property
    def heldout_without_verifier(self) -> list[str]:
        named = {} if isinstance(self.heldout, str) else self.source_verifiers
        return [item.path for item in self.heldout_sources if item.verifier is None and item.called not in named]

    def _faults(self) -> Iterator[str]:
        named = {} if isinstance(self.train, str) else {item.called: item.scoring for item in self.train_sources}
        for item in self.heldout_sources:
            if item.verifier is not None and named.get(item.called, item.scoring) != item.scoring:
                yield (
                    f"data.train and data.heldout both have a source {item.called}, with other verifiers, and a response is "
                    "scored by its source's name; give the held-out source another name"
                )

    def complete(self, source: SourceConfig, *, filtered: bool = True) -> SourceConfig:
        """Fills in what the source inherits."""
        inherited = [*_OF_PROMPTS, "fields", *(["filter"] if filtered else [])]
        return source.model_copy(update={name: getattr(self, name) for name in inherited if getattr(source, name) is None})


def _listed(raw: Sources) -> tuple[SourceConfig, ...]:
    return (SourceConfig(path=raw),) if isinstance(raw, str) else raw


class _SetSamplingConfig(Section):
    """Sampling for a set. Greedy uses only the length."""

    temperature: Annotated[float | None, Field(ge=0.01, le=2)] = None
    """Sampling temperature. Default: ``rollout.sampling.temperature``."""

    max_new_tokens: PositiveInt | None = None
    """Largest response in tokens. Default: ``rollout.sampling.max_new_tokens``."""

    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    """Nucleus sampling: probability of the kept tokens; 1: all. Default: ``rollout.sampling.top_p``."""

    top_k: NonNegativeInt | None = None
    """This many likeliest tokens; 0: all. Default: ``rollout.sampling.top_k``."""

    min_p: Annotated[float | None, Field(ge=0, lt=1)] = None
    """Tokens with at least this fraction of the likeliest one's probability; 0: all. Default: ``rollout.sampling.min_p``."""

    @property
    def truncation(self) -> dict[str, float | int | None]:
        """In the sampler's form: ``top_k`` None is all."""
        bounds = {name: getattr(self, name) for name in ("top_p", "min_p", "top_k")}
        return {name: value or None if name == "top_k" else value for name, value in bounds.items() if value is not None}


class EvaluationSetConfig(_InheritingConfig):
    sha256: Annotated[str | None, Field(pattern="^[0-9a-f]{64}$")] = None
    """Expected digest, from ``tepo data prepare``. null: unchecked."""

    verifier: str | None = None
    """As ``reward.verifier``, with ``reward``'s limits, without ``kwargs`` and ``weights``. null: the run's."""

    every: NonNegativeInt | None = None
    """As ``evaluate.every``. null: the same. ``tepo eval`` ignores it."""

    problems: PositiveInt | None = None
    """Use the first so many. Default: all."""

    greedy: bool = True
    """Also answer greedily."""

    samples: NonNegativeInt | None = None
    """n, the samples per problem. null: ``evaluate.samples``."""

    k: tuple[PositiveInt, ...] | None = None
    """The k of pass@k and maj@k, estimated from samples; at most ``samples``. null: ``samples`` alone."""

    sampling: _SetSamplingConfig = _SetSamplingConfig()

    majority: Literal["auto", "verifier", "text", "none"] = "auto"
    """Equality of answers for maj@k. ``verifier`` accepts one for the other; ``text``: equal final answers, but for spaces,
    case etc. ``auto``: ``verifier`` for exact, last_word, last_number and math, ``none`` for python_tests and stack_machine,
    else ``text``. ``none``: no maj@k.
    """

    correct_at: float | None = None
    """As ``evaluate.correct_at``. null: the same."""

    correct: str | None = None
    """As ``evaluate.correct``, and the same if the set has no ``verifier`` of its own."""

    show: NonNegativeInt | None = None
    """As ``evaluate.show``. null: the same."""

    def _faults(self) -> Iterator[str]:
        if self.k is not None and len(set(self.k)) < len(self.k):
            yield "k names a number twice; leave one out"


_SET_NAME = re.compile(r"[A-Za-z0-9_-]{1,40}")


class EvaluateConfig(Section):
    every: NonNegativeInt = 10
    """Evaluate before the first step, after multiples of this, and after ``train.steps``; 0: never."""

    problems: PositiveInt | None = None
    """Use the first so many. Default: all."""

    samples: NonNegativeInt = 4
    """k, samples per problem for avg@k and pass@k; 0: greedy only."""

    correct_at: float = 1.0
    """Least reward of a correct response; mean rewards (``heldout/…``) ignore it."""

    correct: str | None = None
    """The component that ``correct_at`` is for, instead of the reward; ``right,ok`` where verifiers differ. Required if the
    verifier returns components.
    """

    show: NonNegativeInt = 32
    """First problems written to ``samples.jsonl``."""

    sets: dict[str, EvaluationSetConfig] = Field(default_factory=dict)
    """Further problems: ``evaluate.sets.aime.path=aime.jsonl``. Metrics: ``eval/NAME/…``."""

    def every_of(self, name: str | None) -> int:
        every = None if name is None else self.sets[name].every
        return self.every if every is None else every

    def is_due(self, name: str | None, step: int, last_step: int) -> bool:
        """``name`` None: ``data.heldout``."""
        every = self.every_of(name)
        return bool(every) and (step % every == 0 or step == last_step)

    def any_due(self, step: int, last_step: int, *, heldout: bool) -> bool:
        names = (*([None] if heldout else []), *self.sets)
        return any(self.is_due(name, step, last_step) for name in names)

    def _faults(self) -> Iterator[str]:
        for name, item in self.sets.items():
            if not _SET_NAME.fullmatch(name):
                yield f"evaluate.sets: {name[:60]!r} cannot name a set: a name has letters, digits, - and _, 40 at most"
            samples = self.samples if item.samples is None else item.samples
            if not item.greedy and not samples:
                yield f"evaluate.sets.{name}: greedy = false with samples = 0 leaves nothing to answer; set one of them"
            if item.k is not None and max(item.k, default=0) > samples:
                yield f"evaluate.sets.{name}.k = {max(item.k)} cannot be estimated from {samples} samples; raise its samples"
