"""``sampling``: how tokens are drawn, and where a response ends."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from tepo_megatron.config.base import USER_FUNCTION, Section

MOST_KEPT = 1024
"""Largest ``top_k`` of training: a server names all candidates of every token."""


class SamplingConfig(Section):
    max_new_tokens: PositiveInt = 512
    """Largest length of a response in tokens; a longer one is cut."""

    temperature: Annotated[float, Field(ge=0.01, le=2)] = 1.0
    """Sampling temperature. The trainer divides its logits by it too, so that both sides have one distribution. vLLM raises
    values below 0.01, and refuses values above 2."""

    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling: draw from the likeliest tokens that reach this probability; 1: from all
    (docs/reference/truncated-sampling.md)."""

    top_k: PositiveInt | None = None
    """Draw from this many likeliest tokens; default: all. Training with ``top_p``, ``min_p`` or ``bad_words`` needs it, usually
    20 to 100 and at most 1024, since a server names them one by one."""

    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Draw from tokens with at least this fraction of the likeliest one's probability; 0: from all. Training needs
    ``top_k``."""

    stop: tuple[str, ...] = ()
    """A response ends with the token that completes one of these strings (reason ``stop``), and keeps it. Servers then load the
    tokenizer."""

    bad_words: tuple[str, ...] = ()
    """Strings not to draw, as tokenized with and without a leading space; other divisions of the text are possible. Training
    needs ``top_k``. Servers then load the tokenizer."""

    @property
    def truncates(self) -> bool:
        """Whether some tokens cannot be drawn, which raises the others' probabilities."""
        return self.top_k is not None or self.top_p < 1 or self.min_p > 0 or bool(self.bad_words)

    @property
    def needs_tokenizer(self) -> bool:
        return bool(self.stop or self.bad_words)

    @field_validator("stop", "bad_words")
    @classmethod
    def _no_empty_strings(cls, strings: tuple[str, ...]) -> tuple[str, ...]:
        if not all(strings):
            raise ValueError("one of the strings is empty, and would be found everywhere; leave it out")
        return strings


def training_fault(sampling: SamplingConfig, *, speculative: bool, partial: bool) -> str | None:
    """Returns a sentence if rollouts cannot be drawn, or the trainer cannot score their tokens; else None."""
    top_k = sampling.top_k
    if partial and sampling.needs_tokenizer:
        return (
            "partial = true with sampling.stop or sampling.bad_words: a string that begins in one part of a response and ends "
            "in the next would not be found; leave one of the two out"
        )
    if not sampling.truncates:
        return None
    if top_k is None:
        raw = "bad_words" if sampling.bad_words else f"min_p = {sampling.min_p:g}"
        raw = f"top_p = {sampling.top_p:g}" if sampling.top_p < 1 else raw
        return (
            f"sampling.{raw} without sampling.top_k: the trainer scores a token among those that could have been drawn, "
            "which a server names one by one, and without top_k that may be the whole vocabulary; set sampling.top_k = 100, or "
            f"up to {MOST_KEPT}"
        )
    if top_k > MOST_KEPT:
        return (
            f"sampling.top_k = {top_k}: a server names every token that could have been drawn, at most {MOST_KEPT} of them; "
            "set it lower, or leave it out together with top_p, min_p and bad_words"
        )
    if speculative:
        return (
            f"sampling.top_k = {top_k} with server.speculative: which tokens could have been drawn in place of a guess has not "
            "been tested; leave one of the two out"
        )
    return None


NAMED_FILTERS = ("zero_variance", "too_long", "reward_range")


class FilterGroupsConfig(Section):
    """Dynamic sampling (DAPO): filtered groups are not trained on; further prompts fill the batch to ``prompts_per_step``
    groups."""

    filters: tuple[str, ...] = ("zero_variance",)
    """Filters of groups, in this order; all must keep a group. ``zero_variance`` refuses equal rewards, ``too_long`` more than
    ``max_truncated`` cut responses, ``reward_range`` a mean reward outside ``reward_range``, or a custom function ``(group:
    Sequence[Rollout]) -> bool``, true to keep it: ``package.module:function`` or ``path/file.py:function``. They see the
    verifier's rewards, without ``overlong``."""

    max_batches: PositiveInt = 10
    """Most prompts of a step, in units of ``prompts_per_step``; then the run stops and shows the rewards. verl:
    ``max_num_gen_batches``; NeMo-RL: ``dynamic_sampling_max_gen_batches``."""

    max_truncated: Annotated[float, Field(ge=0, lt=1)] | None = None
    """For ``too_long``: largest share of a group's responses cut at ``max_new_tokens``."""

    reward_range: tuple[float, float] | None = None
    """For ``reward_range``: smallest and largest mean reward, inclusive; (0.1, 0.9) drops groups (almost) always or never
    solved."""

    @field_validator("filters")
    @classmethod
    def _filters_are_known(cls, filters: tuple[str, ...]) -> tuple[str, ...]:
        if not filters:
            raise ValueError("filters is empty, so that nothing is filtered; leave filter_groups out")
        for name in filters:
            if name not in NAMED_FILTERS and not USER_FUNCTION.fullmatch(name):
                raise ValueError(
                    f"{name!r} is no filter; known: {', '.join(NAMED_FILTERS)}, or your own as package.module:function or "
                    "path/file.py:function"
                )
        names = [name.rpartition(":")[2] for name in filters]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"two filters are called {twice}, and their counts could not be told apart; rename one")
        return filters

    @model_validator(mode="after")
    def _filters_have_their_bounds(self) -> FilterGroupsConfig:
        for name, field in (("too_long", "max_truncated"), ("reward_range", "reward_range")):
            if (name in self.filters) != (getattr(self, field) is not None):
                missing = f"the filter {name} needs {field}" if name in self.filters else f"{field} is for the filter {name}"
                raise ValueError(f"{missing}; give both, or neither")
        if self.reward_range is not None and self.reward_range[0] > self.reward_range[1]:
            raise ValueError(f"reward_range = {list(self.reward_range)} holds no number; give the smaller one first")
        return self


class OverlongConfig(Section):
    """DAPO's soft overlong punishment, subtracted from the reward of a response close to ``max_new_tokens``."""

    buffer: PositiveInt
    """Tokens before ``max_new_tokens`` over which the punishment grows from 0 to ``penalty``; DAPO: 4096 of 20480."""

    penalty: PositiveFloat = 1.0
    """Subtracted from a cut response's reward; 1 in DAPO, with rewards −1 and 1."""
