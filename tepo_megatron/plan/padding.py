"""Tokens that only pad: micro-batches have their own lengths, but in steps. docs/reference/plan.md has the formulas."""

from __future__ import annotations

import math

from tepo_megatron.config import RunConfig

FP8_TOKENS = {"none": 1, "delayed": 16, "tensorwise": 16, "blockwise": 128, "mxfp8": 32}
"""A rank's tokens in FP8 layers must be a multiple of this (``trainer/megatron/model/fp8.py``)."""


def token_multiple(config: RunConfig) -> int:
    """The number whose multiples micro-batches are padded to, with the tokens of all context-parallel ranks."""
    parallel = config.engine.parallel
    share = (parallel.tp if parallel.sequence_parallel else 1) * FP8_TOKENS[config.engine.fp8.recipe]
    return parallel.cp * math.lcm(2, share) if parallel.cp > 1 else share


def padded_tokens(config: RunConfig, tokens: int) -> int:
    """``tokens`` of a micro-batch, padded; with context parallelism also each sequence, to two equal chunks for each rank."""
    multiple = token_multiple(config)
    return -(-tokens // multiple) * multiple


def padding_share(config: RunConfig, mean_length: float) -> float:
    """By how much padding adds to the tokens that are computed, on average: half a step for each micro-batch, and with context
    parallelism half of 2 · cp for each sequence."""
    parallel = config.engine.parallel
    of_sequences = (2 * parallel.cp - 1) / 2 / mean_length if parallel.cp > 1 else 0.0
    tokens = max(config.engine.micro_batch_tokens, mean_length)
    return of_sequences + (token_multiple(config) - 1) / 2 / tokens
