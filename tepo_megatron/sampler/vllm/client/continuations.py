"""Joins parts of a response: what was aborted or answered by an environment, and what went on behind it."""

from __future__ import annotations

import numpy as np

from tepo_megatron.core.types import LossMask, Response, Routes, SamplingMask, TokenIds


def joined(part: Response | None, rest: Response) -> Response:
    """A response that went on behind a part of it."""
    if part is None:
        return rest
    start = part.response_ids.size
    spans = [(start + at, each) for at, each in rest.versions]
    if not part.versions:  # an environment alone wrote it
        spans[0] = (0, spans[0][1])
    elif spans[0][1] == part.versions[-1][1]:
        del spans[0]
    return Response(
        np.concatenate([part.response_ids, rest.response_ids]),
        np.concatenate([part.logprobs, rest.logprobs]),
        rest.finish_reason,
        (*part.versions, *spans),
        _joined_routes(part, rest),
        _joined_masks(part, rest),
        _joined_sampling_masks(part, rest),
    )


def observed(part: Response | None, ids: TokenIds) -> Response:
    """``part`` of a response, None before its first token, with an environment's tokens behind it, to be gone on with.

    They have log-probs of 0, are outside the loss mask, and count to the weights before them.
    """
    silent = np.zeros(ids.size, np.float32)
    if part is None:
        return Response(ids, silent, "abort", (), None, np.zeros(ids.size, np.bool_))
    return Response(
        np.concatenate([part.response_ids, ids]),
        np.concatenate([part.logprobs, silent]),
        "abort",
        part.versions,
        part.routed_experts,
        np.concatenate([_mask_of(part), np.zeros(ids.size, np.bool_)]),
        None if part.sampling_mask is None else SamplingMask.joined([part.sampling_mask, SamplingMask.empty(ids.size)]),
    )


def _joined_masks(part: Response, rest: Response) -> LossMask | None:
    if part.loss_mask is None and rest.loss_mask is None:
        return None
    return np.concatenate([_mask_of(part), _mask_of(rest)])


def _mask_of(response: Response) -> LossMask:
    return np.ones(response.response_ids.size, np.bool_) if response.loss_mask is None else response.loss_mask


def _joined_routes(part: Response, rest: Response) -> Routes | None:
    """The experts that the part's tokens passed when they were drawn, then the rest's. The rest's record begins with the part
    again, which was computed anew, maybe by newer weights.
    """
    before, after = part.routed_experts, rest.routed_experts
    if after is None or (before is None and part.versions):
        return None
    return after if before is None else np.concatenate([before, after[len(before) :]])


def _joined_sampling_masks(part: Response, rest: Response) -> SamplingMask | None:
    """As for experts; nobody drew an environment's tokens."""
    before, after = part.sampling_mask, rest.sampling_mask
    if after is None or (before is None and part.versions):
        return None
    return SamplingMask.joined([SamplingMask.empty(part.response_ids.size) if before is None else before, after])
