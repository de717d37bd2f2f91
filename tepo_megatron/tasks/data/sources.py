"""The problems of a run's sources, after filters and the length limit."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from tepo_megatron.config.data import FILTERS, ORDERS, DataConfig, SourceConfig
from tepo_megatron.core.problem import Problem
from tepo_megatron.runtime.user_code import load_user_code
from tepo_megatron.tasks.data.problems import load_problems
from tepo_megatron.tasks.data.prompts import encode_prompt
from tepo_megatron.tasks.data.tokenizer import Tokenizer

FILTER = "refused by the filter"
TOO_LONG = "longer than data.max_prompt_tokens"
"""Reasons for leaving a problem out; ``FILTER`` is followed by the filter's name."""


@dataclass(frozen=True)
class Prompt:
    """A problem that a filter left out has 0 tokens."""

    problem: Problem
    tokens: int
    left_out: str | None = None


@dataclass(frozen=True)
class Source:
    """``name`` is empty for a plain path."""

    name: str
    path: str
    prompts: Sequence[Prompt]

    @property
    def used(self) -> list[Problem]:
        return [prompt.problem for prompt in self.prompts if prompt.left_out is None]

    @property
    def left_out(self) -> Counter[str]:
        return Counter(prompt.left_out for prompt in self.prompts if prompt.left_out is not None)

    @property
    def notices(self) -> list[str]:
        counts = self.left_out.most_common()
        return [f"{self.path}: {count} problem{'s'[: count > 1]} left out, {cause}" for cause, count in counts]


def read_sources(config: DataConfig, field: Literal["train", "heldout"], tokenizer: Tokenizer) -> list[Source]:
    """Encodes every prompt, to find errors early. Raises ValueError: an unreadable source, a prompt that cannot be encoded, a
    failing filter, a source without problems left, or an id in two sources.
    """
    plain = isinstance(getattr(config, field), str)
    sources = []
    for source in config.train_sources if field == "train" else config.heldout_sources:
        sources.append(read_source(config, source, tokenizer, name="" if plain else source.called))
    _check_ids(sources)
    return sources


def read_source(config: DataConfig, source: SourceConfig, tokenizer: Tokenizer, *, name: str = "") -> Source:
    """``name`` becomes the problems' ``source``. Raises as :func:`read_sources`."""
    completed = Source(name, source.path, list(_prompts(config, source, name, tokenizer)))
    _check_some_are_left(config, completed)
    return completed


def _prompts(config: DataConfig, source: SourceConfig, name: str, tokenizer: Tokenizer) -> Iterator[Prompt]:
    filters, bound = load_filters(source.filter or ()), config.max_prompt_tokens
    for problem in load_problems(source):
        cause = _refused_by(filters, problem)
        if cause is not None:
            yield Prompt(replace(problem, source=name), 0, f"{FILTER} {cause}")
            continue
        tokens = len(encode_prompt(tokenizer, problem))
        too_long = bound is not None and tokens > bound
        yield Prompt(replace(problem, source=name), tokens, TOO_LONG if too_long else None)


def _check_some_are_left(config: DataConfig, source: Source) -> None:
    if source.used:
        return
    lengths = [prompt.tokens for prompt in source.prompts if prompt.left_out == TOO_LONG]
    if len(lengths) == len(source.prompts):
        raise ValueError(
            f"data.max_prompt_tokens = {config.max_prompt_tokens} leaves no problem of {source.path}: the shortest of "
            f"{len(lengths)} prompts has {min(lengths)} tokens; raise it"
        )
    causes = ", ".join(f"{count} {cause}" for cause, count in source.left_out.most_common())
    raise ValueError(f"none of the {len(source.prompts)} problems of {source.path} is left: {causes}; change data.filter")


def _check_ids(sources: Sequence[Source]) -> None:
    source_of: dict[str, Source] = {}
    for source in sources:
        for prompt in source.prompts:
            other = source_of.setdefault(prompt.problem.id, source)
            if other is not source:
                raise ValueError(
                    f"the id {prompt.problem.id!r} is in {other.path} and in {source.path}, and samples and rewards could not "
                    "be told apart; give the sources names (data.train[0].name and so on), which then begin their ids"
                )


Keeps = Callable[[Problem], Any]


def load_filters(names: Sequence[str]) -> dict[str, Keeps]:
    """Raises ValueError for a function that cannot be imported."""
    return {name.rpartition(":")[2]: _load_filter(name) for name in names}


def _refused_by(filters: Mapping[str, Keeps], problem: Problem) -> str | None:
    for name, keeps in filters.items():
        try:
            verdict = keeps(problem)
        except Exception as error:
            raise ValueError(
                f"the filter {name} (data.filter) raised {type(error).__name__} on problem {problem.id!r}: {error}"
            ) from error
        if not isinstance(verdict, bool):
            raise ValueError(
                f"the filter {name} (data.filter) returned {verdict!r} for problem {problem.id!r}; return True to keep it, or "
                "False"
            )
        if not verdict:
            return name
    return None


def order_keys(name: str, problems: Sequence[Problem]) -> list[float] | None:
    """None: shuffled. Raises ValueError if the user's function cannot be imported, raises, or returns no finite number."""
    if name == "shuffled":
        return None
    if name == "as_given":
        return [float(index) for index in range(len(problems))]
    if name == "shortest_first":
        return [float(len(problem.prompt)) for problem in problems]
    function = load_user_code(name, f"data.order: {name}")
    assert name not in ORDERS
    return [_key(function, name, problem) for problem in problems]


def _key(function: Callable[[Problem], Any], name: str, problem: Problem) -> float:
    try:
        key = float(function(problem))
    except Exception as error:
        raise ValueError(f"data.order = {name} raised {type(error).__name__} on problem {problem.id!r}: {error}") from error
    if not math.isfinite(key):
        raise ValueError(f"data.order = {name} returned {key} for problem {problem.id!r}; return a finite number")
    return key


def _load_filter(name: str) -> Keeps:
    if name not in FILTERS:
        result: Keeps = load_user_code(name, f"data.filter: {name}")
        return result
    return _Unique() if name == "unique" else _has_number


class _Unique:
    def __init__(self) -> None:
        self._seen: set[object] = set()

    def __call__(self, problem: Problem) -> bool:
        key = problem.messages or problem.prompt
        first = key not in self._seen
        self._seen.add(key)
        return first


def _has_number(problem: Problem) -> bool:
    return any(character.isdigit() for character in problem.answer)
