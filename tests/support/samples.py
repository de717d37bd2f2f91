"""Answers of a stand-in server, in the frames in which responses travel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tepo_megatron.core.rollout import Response, WeightsVersion
from tepo_megatron.sampler.sampling import Sample as Request
from tepo_megatron.sampler.sampling import Sampling
from tepo_megatron.sampler.vllm.client import Client
from tepo_megatron.sampler.vllm.wire import head_frame, response_frame

Sample = dict[str, Any]
"""A response as a test writes it: sample, ids, logprobs, finish_reason, versions."""


def response(
    sample: int,
    ids: Sequence[int],
    logprobs: Sequence[float],
    finish_reason: str | None = "stop",
    versions: Sequence[tuple[int, str]] = ((0, "default"),),
) -> Sample:
    return {"sample": sample, "ids": ids, "logprobs": logprobs, "finish_reason": finish_reason, "versions": versions}


def answer(samples: Sequence[Mapping[str, Any]]) -> bytes:
    """All of them, and the end."""
    return b"".join(response_frame(**sample) for sample in samples) + head_frame({"end": len(samples)})


def draw_group(
    client: Client,
    prompt: Sequence[int],
    *,
    n: int,
    temperature: float,
    max_new_tokens: int,
    seed: int | None,
    stop_token_ids: Sequence[int],
    version: WeightsVersion,
) -> list[Response]:
    """Sample j has the seed ``seed`` + j."""
    samples = [Request(j, None if seed is None else seed + j, max_new_tokens) for j in range(n)]
    sampling = Sampling(temperature, max_new_tokens, tuple(stop_token_ids))
    drawn = dict(client.draw("", prompt, samples, sampling, lambda: (version,)))
    return [drawn[j] for j in range(n)]
