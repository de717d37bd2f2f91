"""Settings passed to a measurement's processes, and the figures returned."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

DENSE = "dense torch log_softmax"
MEGATRON = "Megatron-Core cross-entropy (log-prob only)"
AREAL = "AReaL, both scores"
VERL = "verl, both scores"
FLOOR = "floor: read, then read and write"
SLOPE = ", with the entropy's slope"
"""Suffix of methods of ``tepo bench scores`` that also give `TokenScores.entropy_slope`."""


@dataclass(frozen=True)
class ScoreMeasurement:
    """Times are the best repeat, each of its slowest rank."""

    tokens: int
    vocab: int
    dtype: str
    method: str
    forward_ms: float
    backward_ms: float
    peak_extra: float
    """Peak memory beyond the logits, forward and backward, over one logits shard."""
    forward_collectives: int
    backward_collectives: int
    shard_bytes: int
    copy_gbps: float
    """Bandwidth of a large copy in the same memory and run, in 10⁹ bytes/s read and written."""

    @property
    def total_ms(self) -> float:
        return self.forward_ms + self.backward_ms

    @property
    def gbps(self) -> tuple[float, float]:
        """Forward and backward in 10⁹ bytes/s of the required bytes: one read forward, one read and write backward."""
        return self.shard_bytes / self.forward_ms / 1e6, 2 * self.shard_bytes / self.backward_ms / 1e6


@dataclass(frozen=True)
class ReshardMeasurement:
    """Seconds are the best repeat, each of its slowest rank."""

    method: str
    seconds: float
    wire_bytes: int
    """Received from other ranks, by all ranks together."""
    largest_link: int
    """Received by the busiest rank."""
    peak_source: int | None
    """Most bytes of a trainer rank beyond its shards; None if unknown."""
    peak_destination: int | None
    digest_seconds: float
    """Processor seconds of the busiest rank."""


@dataclass(frozen=True)
class ReshardSetting:
    """The two splits of a Llama of ``layers`` layers, 1024 wide, with 32 000 tokens."""

    tp: int
    pp: int
    server_tp: int
    servers: int
    layers: int
    dtype: str

    @property
    def sources(self) -> int:
        return self.tp * self.pp

    @property
    def destinations(self) -> int:
        return self.server_tp * self.servers


WARM_UP = 3
"""First steps, left out of times: they compile, allocate, and fill FP8's history."""


@dataclass(frozen=True)
class RecipeSetting:
    size: str
    steps: int
    sequences: int
    length: int
    dtype: str
    micro_batch_tokens: int

    def run_config(self, recipe: str) -> dict[str, Any]:
        return {
            "model": {"dtype": self.dtype},
            "engine": {"micro_batch_tokens": self.micro_batch_tokens, "fp8": {"recipe": recipe}},
            "optimizer": {"lr": 1e-5},
        }


@dataclass(frozen=True)
class RecipeMeasurement:
    """Lists have one entry per step. ``logprobs``: mean over response tokens, before the step."""

    recipe: str
    platform: str
    logprobs: list[float]
    grad_norms: list[float]
    score_s: list[float]
    update_s: list[float]
    peak_bytes: int

    @property
    def seconds(self) -> float:
        """Median seconds of scoring and update, after the warm-up."""
        steps = [a + b for a, b in zip(self.score_s, self.update_s, strict=True)]
        return statistics.median(steps[WARM_UP:] or steps)

    def drift(self, other: RecipeMeasurement) -> float:
        """Largest difference of the mean log-probs over all steps, in nats per token."""
        return max(abs(a - b) for a, b in zip(self.logprobs, other.logprobs, strict=True))


OURS = "tepo_megatron"
OLDER = "tepo_megatron before"
PACKED = "Megatron-Core, packed, our attention"
ROWS = "Megatron-Core, padded rows"


@dataclass(frozen=True)
class StepSetting:
    """``layouts`` such as tp2; ``ratios`` of the longest sequence over the mean."""

    layouts: tuple[str, ...]
    ratios: tuple[float, ...]
    size: str
    sequences: int
    mean_length: int
    """Mean tokens of a sequence, with prompt."""
    micro_batch_tokens: int
    repeats: int


@dataclass(frozen=True)
class StepMeasurement:
    """Lists have one entry per repeat, each of its slowest rank."""

    layout: str
    ratio: float
    method: str
    tokens: int
    score_s: list[float]
    """Seconds to compute the old policy's log-probs (ours: and entropies)."""
    update_s: list[float]
    losses: list[float]
    """Mean negative log-prob of response tokens."""
    peak_bytes: int
    """Most bytes of a rank beyond those held between steps (weights, gradients, optimizer states)."""

    @property
    def both_s(self) -> list[float]:
        return [score + update for score, update in zip(self.score_s, self.update_s, strict=True)]
