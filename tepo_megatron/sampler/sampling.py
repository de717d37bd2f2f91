"""Settings and seeds of samples (decision 006), checks and joins of responses."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tepo_megatron.config.rollout import SamplingConfig
from tepo_megatron.core.rollout import Logprobs, Response, Rollout, SamplingMask, TokenIds, token_ids

_NO_TOKENS = token_ids(())
_ROUNDING = 1e-3  # nats that a log-prob may exceed 0


class Sampling(NamedTuple):
    """``temperature`` 0 is greedy. ``stop_token_ids`` and ``stop`` strings end a response."""

    temperature: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    bad_words: tuple[str, ...] = ()
    sampling_mask: bool = False  # needs top_k

    @classmethod
    def of(cls, settings: SamplingSettings, stop_token_ids: tuple[int, ...], *, sampling_mask: bool = False) -> Sampling:
        truncation = truncation_of(settings)
        return cls(settings.temperature, settings.max_new_tokens, stop_token_ids, sampling_mask=sampling_mask, **truncation)

    def parameters(self) -> dict[str, Any]:
        """Uses vLLM's names, without defaults."""
        return {"temperature": self.temperature, "stop_token_ids": list(self.stop_token_ids), **truncation_of(self)}


SamplingSettings = SamplingConfig | Sampling


def truncation_of(settings: SamplingSettings) -> dict[str, Any]:
    usual, names = Sampling._field_defaults, ("top_p", "top_k", "min_p", "stop", "bad_words")
    return {name: value for name in names if (value := getattr(settings, name)) != usual[name]}


@dataclass(frozen=True)
class Sample:
    """``seed`` is None if nothing is drawn; ``prefix`` precedes new tokens."""

    index: int
    seed: int | None
    max_new_tokens: int
    prefix: TokenIds = field(default_factory=lambda: _NO_TOKENS)

    @classmethod
    def of(cls, index: int, seed: int, sampling: Sampling, part: Response | None = None) -> Sample:
        """A continued sample needs another seed, or it repeats random numbers. Raises ValueError if ``part`` leaves no room."""
        done = _NO_TOKENS if part is None else part.response_ids
        room = sampling.max_new_tokens - done.size
        if room < 1:
            raise ValueError(f"a response of {done.size} tokens cannot go on: max_new_tokens = {sampling.max_new_tokens}")
        seed = seed + index if not done.size else prompt_seed(seed + index, done.size)
        return cls(index, None if sampling.temperature == 0 else seed, room, done)


def prompt_seed(seed: int, prompt: int) -> int:
    """Returns 62 bits, unrelated to neighbouring prompts' seeds."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{prompt}".encode(), digest_size=8).digest()) >> 2


def response_faults(response: Response | Rollout, logprobs: Logprobs, vocab_size: int | None) -> Iterator[str]:
    ids, mask = response.response_ids, response.sampling_mask
    starts = [start for start, _ in response.versions]
    if starts[:1] != [0] or starts != sorted(set(starts)) or starts[-1] >= max(1, ids.size):
        yield f"the weights are said to change at response tokens {starts}, which are not places in order from 0"
    if logprobs.size != ids.size:
        yield f"{logprobs.size} log-probs for {ids.size} response tokens"
    if mask is not None and len(mask) != ids.size:
        yield f"a sampling mask of {len(mask)} tokens for {ids.size} response tokens"
    for index in np.flatnonzero(~((logprobs > -math.inf) & (logprobs <= _ROUNDING))):  # also nan
        yield f"the log-prob of response token {index} is {logprobs[index]}, not a finite number of at most 0"
    if vocab_size is not None:
        for tokens in (ids, *(() if mask is None else (mask.ids,))):
            for token in tokens[(tokens < 0) | (tokens >= vocab_size)]:
                yield f"token {token} is not one of the model's {vocab_size}"


def join_parts(part: Response | None, rest: Response) -> Response:
    """A ``rest`` without versions is an environment's."""
    if part is None:
        return rest
    size = part.response_ids.size
    spans = [(size + first, version) for first, version in rest.versions]
    routes, sampling_mask = part.routed_experts, part.sampling_mask
    if not spans:
        if sampling_mask is not None:
            sampling_mask = SamplingMask.joined([sampling_mask, SamplingMask.empty(rest.response_ids.size)])
    else:
        # The rest's record repeats the part, maybe by newer weights.
        routes = _continued(part, routes, rest.routed_experts, lambda a, b: np.concatenate([a, b[len(a) :]]))
        before = sampling_mask if part.versions else SamplingMask.empty(size)
        sampling_mask = _continued(part, before, rest.sampling_mask, lambda a, b: SamplingMask.joined([a, b]))
        if not part.versions:  # an environment alone wrote it
            spans[0] = (0, spans[0][1])
        elif spans[0][1] == part.versions[-1][1]:
            del spans[0]
    masks = [np.ones(one.response_ids.size, np.bool_) if one.loss_mask is None else one.loss_mask for one in (part, rest)]
    return Response(
        np.concatenate([part.response_ids, rest.response_ids]),
        np.concatenate([part.logprobs, rest.logprobs]),
        rest.finish_reason,
        (*part.versions, *spans),
        routes,
        np.concatenate(masks),  # Response drops one that is true throughout
        sampling_mask,
    )


def _continued(part: Response, before: Any, after: Any, join: Callable[[Any, Any], Any]) -> Any:
    if after is None or (before is None and part.versions):
        return None
    return after if before is None else join(before, after)


def append_observation(part: Response | None, ids: TokenIds) -> Response:
    """Observations have log-probs 0, outside the loss mask; the finish reason is ``abort``."""
    return join_parts(part, Response(ids, np.zeros(ids.size), "abort", (), None, np.zeros(ids.size, np.bool_)))
