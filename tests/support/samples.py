"""Answers of a stand-in server, in the frames in which responses travel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tepo_megatron.sampler.vllm.wire import end_frame, response_frame

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
    return b"".join(response_frame(**sample) for sample in samples) + end_frame(len(samples))
