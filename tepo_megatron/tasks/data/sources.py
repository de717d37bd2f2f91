"""The problems of a run: every source's, without those that filters or their length leave out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tepo_megatron.config.data import DataConfig, SourceConfig
from tepo_megatron.core.types import Problem
from tepo_megatron.tasks.data.problems import load_problems
from tepo_megatron.tasks.data.prompts import encode_prompt
from tepo_megatron.tasks.data.select import load_filters, refused_by
from tepo_megatron.tasks.data.tokenizer import Tokenizer

FILTER = "refused by the filter"
TOO_LONG = "longer than data.max_prompt_tokens"
"""Why a problem is left out: one of the filters, by its name, or its length."""


@dataclass(frozen=True)
class Prompt:
    """A problem, and how many tokens its prompt has: 0 where a filter leaves it out before it is encoded. ``left_out`` says why
    it is not used: ``FILTER`` and the filter's name, or ``TOO_LONG``.
    """

    problem: Problem
    tokens: int
    left_out: str | None = None


@dataclass(frozen=True)
class Source:
    """A source, and all of its prompts in its own order. ``name`` is empty for a plain path."""

    name: str
    path: str
    prompts: Sequence[Prompt]

    @property
    def used(self) -> list[Problem]:
        """The problems that are used."""
        return [prompt.problem for prompt in self.prompts if prompt.left_out is None]

    @property
    def left_out(self) -> Counter[str]:
        """How many are not, by the cause."""
        return Counter(prompt.left_out for prompt in self.prompts if prompt.left_out is not None)

    @property
    def notices(self) -> list[str]:
        """The same as sentences."""
        counts = self.left_out.most_common()
        return [f"{self.path}: {count} problem{'s'[: count > 1]} left out, {cause}" for cause, count in counts]


def read_sources(config: DataConfig, field: Literal["train", "heldout"], tokenizer: Tokenizer) -> list[Source]:
    """Reads the sources of ``data.train`` or ``data.heldout``. Every prompt is encoded here, so that one that cannot be is
    found before a run starts.

    Raises:
        ValueError: a source that cannot be read, a prompt that cannot be encoded, a filter that fails; nothing is left of a
            source; or two sources have a problem of the same id.
    """
    plain = isinstance(getattr(config, field), str)
    found = []
    for source in config.train_sources if field == "train" else config.heldout_sources:
        found.append(read_source(config, source, tokenizer, name="" if plain else source.called))
    _check_ids(found)
    return found


def read_source(config: DataConfig, source: SourceConfig, tokenizer: Tokenizer, *, name: str = "") -> Source:
    """Reads one source, which ``config.complete`` has completed. ``name``: of its problems' ``source``. Raises as
    :func:`read_sources`.
    """
    found = Source(name, source.path, list(_prompts(config, source, name, tokenizer)))
    _check_some_are_left(config, found)
    return found


def _prompts(config: DataConfig, source: SourceConfig, name: str, tokenizer: Tokenizer) -> Iterator[Prompt]:
    filters, bound = load_filters(source.filter or ()), config.max_prompt_tokens
    for problem in load_problems(source):
        cause = refused_by(filters, problem)
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
