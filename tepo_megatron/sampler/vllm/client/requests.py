"""How prompts become requests: one for each, with a seed of its own (decision 006)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from tepo_megatron.core.types import Response, TokenIds, token_ids

_NO_TOKENS = token_ids(())


class HasSampling(Protocol):
    """Settings of sampling, as the config has them too (``SamplingConfig``)."""

    @property
    def temperature(self) -> float: ...

    @property
    def max_new_tokens(self) -> int: ...

    @property
    def top_p(self) -> float: ...

    @property
    def top_k(self) -> int | None: ...

    @property
    def min_p(self) -> float: ...

    @property
    def stop(self) -> tuple[str, ...]: ...

    @property
    def bad_words(self) -> tuple[str, ...]: ...


class Sampling(NamedTuple):
    """How responses are drawn: ``temperature`` 0 decodes greedily; any of ``stop_token_ids`` ends one, as its last id, and so
    does the token that completes any of ``stop``. The others are those of ``SamplingConfig``.
    """

    temperature: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    bad_words: tuple[str, ...] = ()
    sampling_mask: bool = False
    """Whether responses have a ``sampling_mask``, which needs ``top_k``."""

    @classmethod
    def of(cls, settings: HasSampling, stop_token_ids: tuple[int, ...], *, sampling_mask: bool = False) -> Sampling:
        """The settings, with what is not in them."""
        given = truncation_of(settings)
        return cls(settings.temperature, settings.max_new_tokens, stop_token_ids, sampling_mask=sampling_mask, **given)

    def parameters(self) -> dict[str, Any]:
        """What a server is asked for, under vLLM's names; what is as by default is left out."""
        return {"temperature": self.temperature, "stop_token_ids": list(self.stop_token_ids), **truncation_of(self)}


def truncation_of(settings: HasSampling) -> dict[str, Any]:
    """Which tokens may be drawn and where a response ends, as keyword arguments, without what is as by default."""
    usual, names = Sampling._field_defaults, ("top_p", "top_k", "min_p", "stop", "bad_words")
    return {name: value for name in names if (value := getattr(settings, name)) != usual[name]}


@dataclass(frozen=True)
class Sample:
    """One sample of a prompt: its number in the group, its seed (None where nothing is drawn), and how many tokens there may be
    behind ``prefix``, which was drawn before.
    """

    index: int
    seed: int | None
    max_new_tokens: int
    prefix: TokenIds = field(default_factory=lambda: _NO_TOKENS)


def make_sample(index: int, seed: int, sampling: Sampling, part: Response | None = None) -> Sample:
    """Sample ``index`` of a group that has the seed ``seed``; vLLM would draw sample j of a request with its seed + j, too.

    One that goes on behind ``part`` has another seed: the same one would draw the numbers of the first tokens again. Raises
    ValueError where ``part`` leaves no room.
    """
    done = _NO_TOKENS if part is None else part.response_ids
    room = sampling.max_new_tokens - done.size
    if room < 1:
        raise ValueError(f"a response of {done.size} tokens cannot go on: max_new_tokens = {sampling.max_new_tokens}")
    own = seed + index if not done.size else prompt_seed(seed + index, done.size)
    return Sample(index, None if sampling.temperature == 0 else own, room, done)


def prompt_seed(seed: int, prompt: int) -> int:
    """A seed of 62 bits for the prompt's group, unrelated to those of its neighbours."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{prompt}".encode(), digest_size=8).digest()) >> 2


def server_seed(seed: int, index: int) -> int:
    """The seed of server number ``index``: vLLM takes 32 bits. Requests for samples bring seeds of their own."""
    return (seed + index) % 2**32
