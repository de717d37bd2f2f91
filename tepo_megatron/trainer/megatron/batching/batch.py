"""Packs rollouts into one batch, the same on every rank, and pads what is cut from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from tepo_megatron.core.rollout import Rollout, not_recorded
from tepo_megatron.core.sampling_mask import SamplingMask
from tepo_megatron.core.types import Batch
from tepo_megatron.trainer.megatron.batching.routing_replay import RouteSizes, broadcast_routes, pack_routes, sizes_of
from tepo_megatron.trainer.megatron.batching.sampling_masks import broadcast_mask, pack_masks, size_of


def pack(
    rollouts: Sequence[Rollout], *, mask_truncated: bool = False, routes: bool = True, sampling_masks: bool = True
) -> Batch:
    """Packs all rollouts on the CPU, each prompt followed by its response. The label at t is the token at t + 1.

    The loss mask has the tokens that the model wrote: T_i is their number, and what an environment wrote is context alone.

    ``mask_truncated``: no token of a response that was cut is in the loss mask. It stays in the batch, since its reward counts
    for the advantages of its group. ``routes``, ``sampling_masks``: with the experts, and the tokens that could have been
    drawn, as the sampler recorded them, where it did.

    Raises ValueError for a rollout with an empty response, or one without a token of the model's, with log-probs or routes of
    another length, without a reward or with other components of it than the others, naming it.
    """
    for rollout in rollouts:
        _check(rollout)
    prompts = np.array([rollout.prompt_ids.size for rollout in rollouts], dtype=np.int64)
    ends = np.cumsum(prompts + [rollout.response_ids.size for rollout in rollouts])
    starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    tokens = np.concatenate(
        [np.zeros(0, np.int64), *(ids for each in rollouts for ids in (each.prompt_ids, each.response_ids))], dtype=np.int64
    )
    labels = np.empty_like(tokens)
    labels[:-1] = tokens[1:]
    labels[ends - 1] = 0  # the last token of a sequence has none
    mask = np.zeros(tokens.size, dtype=np.bool_)
    logprobs = np.zeros(tokens.size, dtype=np.float32)
    for rollout, first, end in zip(rollouts, (starts + prompts - 1).tolist(), ends.tolist(), strict=True):
        # from the last prompt token, which predicts the first of the response
        if not (mask_truncated and rollout.finish_reason == "length"):
            mask[first : end - 1] = True if rollout.loss_mask is None else rollout.loss_mask
        logprobs[first : end - 1] = rollout.sampler_logprobs
    return Batch(
        tokens_T=torch.from_numpy(tokens),
        labels_T=torch.from_numpy(labels),
        loss_mask_T=torch.from_numpy(mask),
        cu_seqlens=torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32)),
        sampler_logprobs_T=torch.from_numpy(logprobs),
        rewards_S=torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float32),
        groups_S=torch.tensor([rollout.group for rollout in rollouts], dtype=torch.int64),
        routed_experts_T=pack_routes(rollouts) if routes else None,
        sampling_mask_T=pack_masks(rollouts) if sampling_masks else None,
        reward_parts_SK=_reward_parts_SK(rollouts),
    )


def _reward_parts_SK(rollouts: Sequence[Rollout]) -> Tensor | None:
    """The components in the order of the first rollout that has some; None where none has."""
    names = next((list(rollout.reward_parts) for rollout in rollouts if rollout.reward_parts), None)
    if names is None:
        return None
    rows = []
    for rollout in rollouts:
        # A response that failed and counts as reward.failed_reward counts as that in every component.
        parts = rollout.reward_parts or dict.fromkeys(names, rollout.reward)
        if set(parts) != set(names):
            raise ValueError(
                f"rollout of problem {rollout.problem_id} has the reward's components {', '.join(parts)}, others of the step "
                f"{', '.join(names)}; a verifier must return the same for every response"
            )
        rows.append([parts[name] for name in names])
    return torch.tensor(rows, dtype=torch.float32)


def _check(rollout: Rollout) -> None:
    where = f"rollout of problem {rollout.problem_id}"
    if not rollout.prompt_ids.size:
        raise ValueError(f"{where} has an empty prompt; the tokenizer made no token of it")
    if not rollout.response_ids.size:
        raise ValueError(f"{where} has an empty response; a sampler must return at least the end token")
    if rollout.sampler_logprobs.size != rollout.response_ids.size:
        raise ValueError(
            f"{where} has {rollout.response_ids.size} response tokens but {rollout.sampler_logprobs.size} log-probs"
        )
    if rollout.loss_mask is not None:
        if not rollout.loss_mask.any():
            raise ValueError(f"{where} has no token that the model wrote; leave it out of the step")
        if rollout.sampler_logprobs[~rollout.loss_mask].any():
            raise ValueError(f"{where} has a log-prob other than 0 at a token that the model did not write")
    if rollout.reward is None:
        raise ValueError(f"{where} has no reward; leave it out of the step")


def broadcast(batch: Batch | None, device: torch.device) -> Batch:
    """Sends rank 0's packed batch to every rank's ``device``. Every rank calls; only rank 0's argument is read.

    Nine bytes a token travel, as flat tensors without pickle: labels are the next tokens, and are not sent. Recorded routes
    and sampling masks come apart, in pieces, and stay in the host's memory.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        assert batch is not None
        return batch.to(device)
    sizes = torch.zeros(7, dtype=torch.int64)
    if batch is not None:
        components = 0 if batch.reward_parts_SK is None else batch.reward_parts_SK.shape[1]
        recorded = [size_of(batch.sampling_mask_T), *sizes_of(batch.routed_experts_T)]
        sizes = torch.tensor([batch.num_sequences, batch.num_tokens, components, *recorded])
    sizes = sizes.to(device)
    dist.broadcast(sizes, src=0)
    sequences, tokens, components, kept, *routes = sizes.tolist()
    if batch is not None:
        tokens_T, mask_T = batch.tokens_T.int().to(device), batch.loss_mask_T.to(torch.uint8).to(device)
        sampler_logprobs_T = batch.sampler_logprobs_T.to(device)
        values = [batch.cu_seqlens, batch.groups_S, batch.rewards_S]
        values += [] if batch.reward_parts_SK is None else [batch.reward_parts_SK.flatten()]
        of_sequences = torch.cat([each.double() for each in values]).to(device)
    else:
        tokens_T, mask_T = (torch.empty(tokens, dtype=dtype, device=device) for dtype in (torch.int32, torch.uint8))
        sampler_logprobs_T = torch.empty(tokens, dtype=torch.float32, device=device)
        of_sequences = torch.empty((3 + components) * sequences + 1, dtype=torch.float64, device=device)
    for tensor in (of_sequences, tokens_T, mask_T, sampler_logprobs_T):
        dist.broadcast(tensor, src=0)
    lengths = [sequences + 1, sequences, sequences, components * sequences]
    cu_seqlens, groups_S, rewards_S, parts = of_sequences.split(lengths)
    cu_seqlens = cu_seqlens.int()
    labels_T = torch.cat([tokens_T[1:], tokens_T.new_zeros(1)]).long()
    labels_T[cu_seqlens[1:].long() - 1] = 0
    return Batch(
        tokens_T.long(),
        labels_T,
        mask_T.bool(),
        cu_seqlens,
        sampler_logprobs_T,
        rewards_S.float(),
        groups_S.long(),
        routed_experts_T=broadcast_routes(batch.routed_experts_T if batch else None, tokens, RouteSizes(*routes), device),
        reward_parts_SK=parts.float().view(sequences, components) if components else None,
        sampling_mask_T=broadcast_mask(batch.sampling_mask_T if batch else None, tokens, kept, device),
    )


def pad_to(batch: Batch, num_tokens: int) -> Batch:
    """Adds sequences at the end, outside every loss mask, so that the batch has ``num_tokens`` tokens.

    They are beginnings of the longest sequence: under causal attention equal beginnings have equal activations, so that the
    largest value of a tensor, by which FP8 may scale it, is never the padding's.
    """
    missing = num_tokens - batch.num_tokens
    if missing == 0:
        return batch
    longest_T = batch.tokens_T[batch.token_index([int(batch.lengths_S.argmax())])]
    lengths = [min(longest_T.numel(), missing - at) for at in range(0, missing, longest_T.numel())]
    changes: dict[str, Any] = {"tokens_T": torch.cat([batch.tokens_T, *(longest_T[:length] for length in lengths)])}
    for f in fields(batch):
        value = getattr(batch, f.name)
        if isinstance(value, SamplingMask):
            changes[f.name] = SamplingMask.joined([value, SamplingMask.empty(missing)])
        elif value is not None and f.name not in ("tokens_T", "cu_seqlens", "expert_load_LE"):
            extra = missing if f.name.endswith("_T") else len(lengths)
            changes[f.name] = torch.cat([value, value.new_full((extra, *value.shape[1:]), _filler(f.name, value))])
    ends = batch.num_tokens + torch.tensor(lengths).cumsum(0).to(batch.cu_seqlens)
    return batch.with_(cu_seqlens=torch.cat([batch.cu_seqlens, ends]), **changes)


def pad_sequences(batch: Batch, multiple: int) -> Batch:
    """Repeats the last token of each sequence, outside the loss mask, until all lengths are multiples of ``multiple``.

    Causal attention shows no token what follows it, so that nothing changes for the others. But the added tokens see the whole
    sequence, unlike those of :func:`pad_to`: their activations are their own, and could be the largest of a tensor.
    """
    lengths_S = batch.lengths_S
    padded_S = (lengths_S + multiple - 1) // multiple * multiple
    if torch.equal(padded_S, lengths_S):
        return batch
    cu_seqlens = torch.cat([batch.cu_seqlens[:1], padded_S.cumsum(0).to(batch.cu_seqlens)])
    index_T = torch.repeat_interleave(torch.arange(batch.num_sequences, device=padded_S.device), padded_S)
    position_T = torch.arange(index_T.numel(), device=padded_S.device) - cu_seqlens.long()[index_T]
    added_T = position_T >= lengths_S[index_T]
    source_T = batch.cu_seqlens.long()[index_T] + position_T.minimum(lengths_S[index_T] - 1)
    changes: dict[str, Any] = {"tokens_T": batch.tokens_T[source_T]}
    for f in fields(batch):
        value = getattr(batch, f.name)
        if isinstance(value, SamplingMask):
            changes[f.name] = _with_none(value, source_T.cpu().numpy(), added_T.cpu().numpy())
        elif value is not None and f.name.endswith("_T") and f.name != "tokens_T":
            source, added = source_T.to(value.device), added_T.to(value.device)
            added = added.view(-1, *[1] * (value.dim() - 1))
            changes[f.name] = value[source].masked_fill(added, _filler(f.name, value))
    return batch.with_(cu_seqlens=cu_seqlens, **changes)


def _with_none(mask: SamplingMask, source: NDArray[np.int64], added: NDArray[np.bool_]) -> SamplingMask:
    """The mask at the places ``source`` [T], and none where a token was added."""
    end = SamplingMask.joined([mask, SamplingMask.empty(1)])
    return end[np.where(added, len(mask), source)]


def _filler(name: str, value: Tensor) -> int:
    """What padding has of a field."""
    if name == "recorded_S":
        return -1
    return not_recorded(value.itemsize) if name == "routed_experts_T" else 0
