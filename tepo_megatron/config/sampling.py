"""``sampling``: from which distribution tokens are drawn, and where a response ends."""

from typing import Annotated

from pydantic import Field, PositiveInt, field_validator

from tepo_megatron.config.base import Section

MOST_KEPT = 1024
"""Largest ``top_k`` of training: a server names every token that could have been drawn, for every token that was."""


class SamplingConfig(Section):
    max_new_tokens: PositiveInt = 512
    """Largest length of a response in tokens; a longer one is cut there."""

    temperature: Annotated[float, Field(ge=0.01, le=2)] = 1.0
    """Sampling temperature. The trainer divides its logits by the same, so that both sides mean one distribution. vLLM
    raises what is below 0.01, and refuses what is above 2."""

    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling: tokens are drawn from the likeliest ones whose probabilities reach this sum; 1: from all. In training
    it needs ``top_k`` (docs/reference/truncated-sampling.md)."""

    top_k: PositiveInt | None = None
    """Tokens are drawn from so many of the likeliest ones; default: from all. In training at most 1024, since a server names
    them one by one: 20 to 100 are usual."""

    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Tokens are drawn from those that are at least this times as likely as the likeliest; 0: from all. In training it needs
    ``top_k``."""

    stop: tuple[str, ...] = ()
    """A response ends with the token that completes any of these strings, and with the reason ``stop``. Its tokens and its text
    keep the string. The servers then load the model's tokenizer."""

    bad_words: tuple[str, ...] = ()
    """Strings that are not drawn: never the last token of one behind its others, as the tokenizer divides it with and without a
    space before it. Other divisions of the same text are. In training they need ``top_k``. The servers then load the model's
    tokenizer."""

    @property
    def truncates(self) -> bool:
        """Whether some tokens cannot be drawn at all, so that the others' probabilities are larger than the model's."""
        return self.top_k is not None or self.top_p < 1 or self.min_p > 0 or bool(self.bad_words)

    @property
    def needs_tokenizer(self) -> bool:
        """Whether a server must know the text of tokens."""
        return bool(self.stop or self.bad_words)

    @field_validator("stop", "bad_words")
    @classmethod
    def _no_empty_strings(cls, strings: tuple[str, ...]) -> tuple[str, ...]:
        if not all(strings):
            raise ValueError("one of the strings is empty, and would be found everywhere; leave it out")
        return strings


def training_fault(sampling: SamplingConfig, *, speculative: bool, partial: bool) -> str | None:
    """Returns a sentence if rollouts cannot be drawn like this, or their tokens cannot be scored by the trainer; else None."""
    top_k = sampling.top_k
    if partial and sampling.needs_tokenizer:
        return (
            "partial = true with sampling.stop or sampling.bad_words: a string that begins in one part of a response and ends "
            "in the next would not be found; leave one of the two out"
        )
    if not sampling.truncates:
        return None
    if top_k is None:
        given = "bad_words" if sampling.bad_words else f"min_p = {sampling.min_p:g}"
        given = f"top_p = {sampling.top_p:g}" if sampling.top_p < 1 else given
        return (
            f"sampling.{given} without sampling.top_k: the trainer scores a token among those that could have been drawn, "
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
