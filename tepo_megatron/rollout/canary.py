"""The canary: one fixed prompt that the trainer and every server score after a sync.

Digests show that the bytes arrived; this shows that the servers compute with them what the trainer does. Log-probs are natural
logarithms under temperature 1, of every token of the prompt but the first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tepo_megatron.config import RunConfig

if TYPE_CHECKING:
    from tepo_megatron.bridge.architecture import ModelSpec

LENGTH = 32
STALE_SHARE = 0.01
"""A server is stale if its answer stays the same, to the bit, until the trainer's has moved by this share of the tolerance."""

_TOLERANCES = {"float32": 1e-3, "bfloat16": 0.5}
_QUANTISED_TOLERANCE = 2.0
"""Nats. From 5 (FP8) to 300 times (float32) what was measured: docs/numerics.md."""


def canary_prompt(vocab_size: int, limit: int) -> tuple[int, ...]:
    """Token ids drawn evenly over the vocabulary by a fixed rule; ``limit``: tokens that a server takes at once.

    Every rank can make it, without a tokenizer; it touches embeddings and head all over, so that rows in wrong places show; and
    no token of it is likely, so that none of its log-probs is near 0, where differences vanish.
    """
    length = max(2, min(LENGTH, limit - 1))  # the server samples a token after it
    digests = (hashlib.blake2b(f"canary {at}".encode(), digest_size=8).digest() for at in range(length))
    return tuple(int.from_bytes(digest) % vocab_size for digest in digests)


def due_prompt(config: RunConfig, spec: ModelSpec, *, sync: int) -> tuple[int, ...] | None:
    """What both sides score after sync number ``sync``, from 0; None where nothing is due, or no server is there."""
    rollout = config.rollout
    if rollout.replay is not None or not rollout.canary.every or sync % rollout.canary.every:
        return None
    return canary_prompt(spec.vocab_size, rollout.server.max_model_len or spec.max_positions)


def tolerance(config: RunConfig) -> float:
    """What the two sides may differ by, in nats: the run's, or the default for the coarser of their number formats."""
    if config.rollout.canary.tolerance is not None:
        return config.rollout.canary.tolerance
    server = config.rollout.server
    if server.quantization != "none" or config.engine.fp8.enabled:
        return _QUANTISED_TOLERANCE
    return max(_TOLERANCES[config.model.dtype], _TOLERANCES[server.served_dtype(config.model.dtype)])


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
