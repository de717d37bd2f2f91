"""The settings that a measurement passes to its processes, and the figures that come back."""

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
"""Behind the name of a method of ``tepo bench scores`` that also gives `TokenScores.entropy_slope`."""


@dataclass(frozen=True)
class ScoreMeasurement:
    """The figures of one method on one shape; times are the best of the repeats, each the slowest rank's."""

    tokens: int
    vocab: int
    dtype: str
    method: str
    forward_ms: float
    backward_ms: float
    peak_extra: float
    """Peak memory beyond the logits, forward and backward, as a multiple of one logits shard."""
    forward_collectives: int
    backward_collectives: int
    shard_bytes: int
    copy_gbps: float
    """Bandwidth of a large copy within the same memory in the same run, in 10⁹ bytes/s read and written."""

    @property
    def total_ms(self) -> float:
        return self.forward_ms + self.backward_ms

    @property
    def gbps(self) -> tuple[float, float]:
        """Bandwidth forward and backward in 10⁹ bytes/s, of the bytes that must move: the shard is read once forward, read and
        written once backward.
        """
        return self.shard_bytes / self.forward_ms / 1e6, 2 * self.shard_bytes / self.backward_ms / 1e6


@dataclass(frozen=True)
class ReshardMeasurement:
    """The figures of one method of moving weights: the best of the repeats, each as long as its slowest rank."""

    method: str
    seconds: float
    wire_bytes: int
    """Bytes that all ranks together receive from other ranks."""
    largest_link: int
    """Bytes that the busiest rank receives."""
    peak_source: int | None
    """The most bytes that a trainer rank needed beyond its shards; None where the system does not report them."""
    peak_destination: int | None
    digest_seconds: float
    """Processor time that the busiest rank spends on digests (the least of the repeats)."""


@dataclass(frozen=True)
class ReshardSetting:
    """The two splits between which weights move. The model is a Llama of ``layers`` layers, 1024 wide, with 32 000 tokens."""

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
"""The first steps, whose time does not count: they compile, allocate, and fill FP8's history."""


@dataclass(frozen=True)
class RecipeSetting:
    """The model and the data of a measurement: ``sequences`` responses of ``length`` tokens."""

    size: str
    steps: int
    sequences: int
    length: int
    dtype: str
    micro_batch_tokens: int

    def run_config(self, recipe: str) -> dict[str, Any]:
        """Returns the run's configuration as a mapping, as YAML would give it."""
        return {
            "model": {"dtype": self.dtype},
            "engine": {"micro_batch_tokens": self.micro_batch_tokens, "fp8": {"recipe": recipe}},
            "optimizer": {"lr": 1e-5},
        }


@dataclass(frozen=True)
class RecipeMeasurement:
    """The figures of one recipe, in lists with an entry for each step. ``logprobs``: mean over response tokens, before it."""

    recipe: str
    platform: str
    logprobs: list[float]
    grad_norms: list[float]
    score_s: list[float]
    update_s: list[float]
    peak_bytes: int

    @property
    def seconds(self) -> float:
        """Median seconds of scoring and update, without the first steps."""
        steps = [a + b for a, b in zip(self.score_s, self.update_s, strict=True)]
        return statistics.median(steps[WARM_UP:] or steps)

    def drift(self, other: RecipeMeasurement) -> float:
        """The largest difference between the mean log-probs of the two, in nats per token, over all steps."""
        return max(abs(a - b) for a, b in zip(self.logprobs, other.logprobs, strict=True))


OURS = "tepo_megatron"
OLDER = "tepo_megatron before"
PACKED = "Megatron-Core, packed, our attention"
ROWS = "Megatron-Core, padded rows"


@dataclass(frozen=True)
class StepSetting:
    """What ``tepo bench step`` measures: ``layouts`` such as tp2, ``ratios`` of the longest sequence over the mean."""

    layouts: tuple[str, ...]
    ratios: tuple[float, ...]
    size: str
    sequences: int
    mean_length: int
    """Mean tokens of a sequence, prompt included."""
    micro_batch_tokens: int
    repeats: int


@dataclass(frozen=True)
class StepMeasurement:
    """The figures of one method in one layout on one ratio; lists have an entry for each repeat, each the slowest rank's."""

    layout: str
    ratio: float
    """The longest sequence over the mean, as it came out."""
    method: str
    tokens: int
    score_s: list[float]
    """Seconds of the log-probs of the old policy, and with ours its entropies: a forward pass of all micro-batches."""
    update_s: list[float]
    """Seconds of forward, backward and optimizer step."""
    losses: list[float]
    """The mean negative log-prob of the response tokens as the score pass found it."""
    peak_bytes: int
    """The most bytes that one rank held beyond what it holds between steps (weights, gradients, optimizer states)."""

    @property
    def both_s(self) -> list[float]:
        return [score + update for score, update in zip(self.score_s, self.update_s, strict=True)]
