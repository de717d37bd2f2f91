"""The canary: one fixed prompt that the trainer and every server score after a sync, and one that goes through their caches.

Digests show that the bytes arrived; this shows that the servers compute with them what the trainer does. Log-probs are natural
logarithms under temperature 1, of every token of the prompt but the first. Scores of a prompt never come from a prefix cache,
so a server also draws tokens after a longer prompt twice, with what its cache has of the prompt and without.
``run/step/agreement.py`` compares the rollouts themselves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tepo_megatron.config import RunConfig

if TYPE_CHECKING:
    from tepo_megatron.weights.architecture import ModelSpec

LENGTH = 32
STALE_SHARE = 0.01
"""A server is stale if its answer stays the same, to the bit, until the trainer's has moved by this share of the tolerance."""

CACHED_TOKENS = 16
"""Tokens drawn after the prompt for the caches."""

CACHE_SHARE = 0.02
"""Share of the tolerance that a cache may make a difference of. After an update it is empty, so that both log-probs come from
one server and one computation: they were equal to the last bit in float32 and bfloat16.
"""

CACHED_LENGTH = 257
"""Tokens of the prompt for the caches: two blocks of 128, as vLLM has them on a CPU (16 on a GPU), and one more, since the last
token of a prompt is never taken from a cache.
"""

_TOLERANCES = {"float32": 1e-3, "bfloat16": 0.5}
_QUANTISED_TOLERANCE = 2.0
"""Nats. From 5 (FP8) to 300 times (float32) what was measured: docs/reference/numerics.md."""

_MEAN_TOLERANCES = {"float32": 1e-4, "bfloat16": 0.1}
_QUANTISED_MEAN_TOLERANCE = 1.0
"""Nats, of the mean over the tokens of a group of rollouts: docs/reference/numerics.md."""


def canary_prompt(vocab_size: int, limit: int) -> tuple[int, ...]:
    """Token ids drawn evenly over the vocabulary by a fixed rule; ``limit``: tokens that a server takes at once.

    Every rank can make it, without a tokenizer; it touches embeddings and head all over, so that rows in wrong places show; and
    no token of it is likely, so that none of its log-probs is near 0, where differences vanish.
    """
    return _tokens("canary", max(2, min(LENGTH, limit - 1)), vocab_size)  # the server samples a token after it


def cached_prompt(vocab_size: int, limit: int) -> tuple[int, ...]:
    """As :func:`canary_prompt`, long enough to fill blocks of a prefix cache; the same after every sync, so that what a server
    still has of it would be used.
    """
    return _tokens("cached canary", max(2, min(CACHED_LENGTH, limit - CACHED_TOKENS - 1)), vocab_size)


def _tokens(name: str, length: int, vocab_size: int) -> tuple[int, ...]:
    digests = (hashlib.blake2b(f"{name} {at}".encode(), digest_size=8).digest() for at in range(length))
    return tuple(int.from_bytes(digest) % vocab_size for digest in digests)


def due_prompt(config: RunConfig, spec: ModelSpec, *, sync: int) -> tuple[int, ...] | None:
    """What both sides score after sync number ``sync``, from 0; None where nothing is due, or no server is there."""
    rollout = config.rollout
    if rollout.replay is not None or not rollout.canary.every or sync % rollout.canary.every:
        return None
    lora = config.model.lora
    if sync and config.train.schedule == "overlap" and lora is not None and lora.serve == "adapter":
        return None  # vLLM 0.32 cannot score a prompt beside other requests of an adapter; the rollouts are compared
    return canary_prompt(spec.vocab_size, rollout.server.max_model_len or spec.max_positions)


def tolerance(config: RunConfig) -> float:
    """What the two sides may differ by, in nats: the run's, or the default for the coarser of their number formats."""
    if config.rollout.canary.tolerance is not None:
        return config.rollout.canary.tolerance
    return _coarser(config, _TOLERANCES, _QUANTISED_TOLERANCE)


def rollouts_tolerance(config: RunConfig) -> float:
    """What the two sides' log-probs of the tokens of a group of rollouts may differ by on average, in nats; as above."""
    if config.rollout.canary.rollouts_tolerance is not None:
        return config.rollout.canary.rollouts_tolerance
    return _coarser(config, _MEAN_TOLERANCES, _QUANTISED_MEAN_TOLERANCE)


def _coarser(config: RunConfig, by_dtype: Mapping[str, float], quantised: float) -> float:
    server = config.rollout.server
    if server.quantization != "none" or config.engine.fp8.enabled:
        return quantised
    return max(by_dtype[config.model.dtype], by_dtype[server.served_dtype(config.model.dtype)])


class Canary:
    """Compares the two sides' log-probs, at most ``tolerance`` nats apart; remembers since when a server has given its answer,
    by which old weights are known, however little a single update moves them.
    """

    def __init__(self, tolerance: float) -> None:
        self._tolerance = tolerance
        self._since: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
        """A server's address → its answer, and the trainer's log-probs when it first gave that."""

    def check(self, step: int, prompt: Sequence[int], ours: Sequence[float], theirs: Mapping[str, Sequence[float]]) -> float:
        """The largest difference, in nats, between the trainer's log-probs and any server's (by its address).

        Raises RuntimeError that names every server which differs by more than the tolerance, with prompt, position and both
        log-probs of its worst token, or which gives the same answer as long ago although the trainer's has moved.
        """
        found = {url: _worst(ours, given) for url, given in theirs.items()}
        wrong = [
            f"{url} gives token {prompt[at + 1]} at position {at + 1} the log-prob {theirs[url][at]:.6g}, "
            f"the trainer {ours[at]:.6g}"
            for url, (gap, at) in found.items()
            if not gap <= self._tolerance
        ]
        wrong = wrong or [
            f"{url} still gives the same log-probs, to the last bit, after the trainer's have moved by {moved:.2g} nats"
            for url, moved in self._moved(ours, theirs).items()
            if moved > STALE_SHARE * self._tolerance
        ]
        if wrong:
            raise RuntimeError(
                f"weights {step}: trainer and servers do not compute the same of the canary prompt {list(prompt)}: "
                f"{'; '.join(wrong)} (rollout.canary.tolerance = {self._tolerance:g}). Either weights lie in the wrong place "
                "there, or are old ones, or the two sides' models differ; samples of these servers would train nothing"
            )
        return max(gap for gap, _ in found.values())

    def check_cache(self, step: int, found: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> float:
        """The largest difference, in nats, between a token's log-prob after a prompt of which a server may have cached blocks,
        and the same without the cache; ``found``: a server's address → the two, of several tokens.

        Raises RuntimeError that names every server where it is more than ``CACHE_SHARE`` of the tolerance.
        """
        limit = CACHE_SHARE * self._tolerance
        worst = {url: _worst(fresh, through) for url, (through, fresh) in found.items() if fresh}
        wrong = [
            f"{url} gives a token the log-prob {found[url][0][at]:.6g} through its prefix cache and {found[url][1][at]:.6g} "
            "without it"
            for url, (gap, at) in worst.items()
            if not gap <= limit
        ]
        if wrong:
            raise RuntimeError(
                f"weights {step}: {'; '.join(wrong)} (more than {limit:g} apart, by the canary's tolerance). The cache was not "
                "emptied with the update: it holds keys and values of older weights, and samples that begin as earlier ones "
                "did would be wrong"
            )
        return max((gap for gap, _ in worst.values()), default=0.0)

    def _moved(self, ours: Sequence[float], theirs: Mapping[str, Sequence[float]]) -> dict[str, float]:
        """How far the trainer's log-probs have moved since each server first gave its present answer, in nats."""
        for url, given in theirs.items():
            if url not in self._since or self._since[url][0] != given:
                self._since[url] = (given, ours)
        return {url: _worst(ours, self._since[url][1])[0] for url in theirs}


def _worst(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, int]:
    """The largest difference and where it is; nan, from either side, is larger than any number."""
    gaps = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    return max(((gap, at) for at, gap in enumerate(gaps)), key=lambda found: (found[0] != found[0], found[0]))
