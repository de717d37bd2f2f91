from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tepo_megatron.config import RunConfig
from tepo_megatron.core.rollout import TOP_TOKEN, Rollout, SamplingMask, not_recorded
from tepo_megatron.core.types import Batch
from tepo_megatron.weights.architecture import ModelSpec


def pack(
    rollouts: Sequence[Rollout],
    *,
    mask_truncated: bool = False,
    routes: bool = True,
    sampling_masks: bool = True,
    top_tokens: bool = True,
    reward_parts: bool = True,
    cut_episodes: bool = False,
) -> Batch:
    """Packs on the CPU. The label at t is token t + 1. Raises ValueError that names an unsuitable rollout.

    With ``mask_truncated`` a truncated response is outside the loss mask; its reward still counts for its group.
    """
    for rollout in rollouts:
        if fault := _fault(rollout):
            raise ValueError(f"rollout of problem {rollout.problem_id} {fault}")
    prompts = np.array([rollout.prompt_ids.size for rollout in rollouts], dtype=np.int64)
    ends = np.cumsum(prompts + [rollout.response_ids.size for rollout in rollouts])
    starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    tokens = np.concatenate(
        [np.zeros(0, np.int64), *(ids for rollout in rollouts for ids in (rollout.prompt_ids, rollout.response_ids))],
        dtype=np.int64,
    )
    labels = np.empty_like(tokens)
    labels[:-1] = tokens[1:]
    labels[ends - 1] = 0  # the last token of a sequence has none
    mask = np.zeros(tokens.size, dtype=np.bool_)
    logprobs, judged = np.zeros(tokens.size, dtype=np.float32), np.zeros(tokens.size, dtype=np.float32)
    for rollout, first, end in zip(rollouts, (starts + prompts - 1).tolist(), ends.tolist(), strict=True):
        # from the last prompt token, which predicts the first of the response
        if not (mask_truncated and rollout.finish_reason == "length"):
            mask[first : end - 1] = True if rollout.loss_mask is None else rollout.loss_mask
        logprobs[first : end - 1] = rollout.sampler_logprobs
        if rollout.teacher_logprobs is not None:
            judged[first : end - 1] = rollout.teacher_logprobs
    top_ids_TK, top_logprobs_TK = _pack_top(rollouts if top_tokens else (), tokens.size, (starts + prompts - 1).tolist())
    return Batch(
        tokens_T=torch.from_numpy(tokens),
        labels_T=torch.from_numpy(labels),
        loss_mask_T=torch.from_numpy(mask),
        cu_seqlens=torch.from_numpy(np.concatenate([[0], ends])),
        sampler_logprobs_T=torch.from_numpy(logprobs),
        teacher_logprobs_T=torch.from_numpy(judged) if any(r.teacher_logprobs is not None for r in rollouts) else None,
        top_ids_TK=top_ids_TK,
        top_logprobs_TK=top_logprobs_TK,
        rewards_S=torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float32),
        groups_S=torch.tensor([rollout.group for rollout in rollouts], dtype=torch.int64),
        routed_experts_T=_pack_routes(rollouts) if routes else None,
        sampling_mask_T=_pack_masks(rollouts) if sampling_masks else None,
        reward_parts_SK=_reward_parts_SK(rollouts, cut_episodes) if reward_parts else None,
    )


def _reward_parts_SK(rollouts: Sequence[Rollout], cut_episodes: bool) -> Tensor | None:
    names = max((list(rollout.reward_parts) for rollout in rollouts if rollout.reward_parts), key=len, default=[])
    if not names:
        return None
    rows = []
    for rollout in rollouts:
        # A failed response that counts as reward.failed_reward does so in every component.
        parts = rollout.reward_parts or dict.fromkeys(names, rollout.reward)
        if cut_episodes:  # a limit may end an episode before all of it is rated
            parts = {**dict.fromkeys(names, 0.0), **parts}
        if set(parts) != set(names):
            raise ValueError(
                f"rollout of problem {rollout.problem_id} has the reward's components {', '.join(parts)}, others of the step "
                f"{', '.join(names)}; a verifier must return the same for every response"
            )
        rows.append([parts[name] for name in names])
    return torch.tensor(rows, dtype=torch.float32)


def _fault(rollout: Rollout) -> str | None:
    mask, tokens, logprobs = rollout.loss_mask, rollout.response_ids.size, rollout.sampler_logprobs
    if not rollout.prompt_ids.size:
        return "has an empty prompt; the tokenizer made no token of it"
    if not tokens:
        return "has an empty response; a sampler must return at least the end token"
    if logprobs.size != tokens:
        return f"has {tokens} response tokens but {logprobs.size} log-probs"
    if (judged := rollout.teacher_logprobs) is not None and judged.size != tokens:
        return f"has {tokens} response tokens but {judged.size} log-probs of its teacher"
    if mask is not None and not mask.any():
        return "has no token that the model wrote; leave it out of the step"
    if mask is not None and logprobs[~mask].any():
        return "has a log-prob other than 0 at a token that the model did not write"
    return "has no reward; leave it out of the step" if rollout.reward is None else None


def _pack_routes(rollouts: Sequence[Rollout]) -> Tensor | None:
    first = next((rollout.routed_experts for rollout in rollouts if rollout.routed_experts is not None), None)
    if first is None:
        return None
    lengths = [rollout.prompt_ids.size + rollout.response_ids.size for rollout in rollouts]
    packed = np.full((sum(lengths), *first.shape[1:]), not_recorded(first.itemsize), first.dtype)
    offset = 0
    for rollout, length in zip(rollouts, lengths, strict=True):
        record = rollout.routed_experts
        if record is None or record.shape != (length - 1, *first.shape[1:]) or record.dtype != first.dtype:
            has = "none" if record is None else f"{record.dtype} of {record.shape}"
            raise ValueError(
                f"rollout of problem {rollout.problem_id} should have a routing record, {first.dtype} of "
                f"{(length - 1, *first.shape[1:])}, but has {has}; it is of another model or another length"
            )
        packed[offset : offset + length - 1] = record
        offset += length
    return torch.from_numpy(packed)


def _pack_top(rollouts: Sequence[Rollout], tokens: int, starts: Sequence[int]) -> tuple[Tensor | None, Tensor | None]:
    first = next((rollout.teacher_top for rollout in rollouts if rollout.teacher_top is not None), None)
    if first is None:
        return None, None
    packed = np.zeros((tokens, first.shape[1]), TOP_TOKEN)
    for rollout, start in zip(rollouts, starts, strict=True):
        top, shape = rollout.teacher_top, (rollout.response_ids.size, first.shape[1])
        if top is None or top.shape != shape:
            raise ValueError(
                f"rollout of problem {rollout.problem_id} should have its teacher's top tokens, {shape}, but has "
                f"{'none' if top is None else top.shape}; all of a step are judged with one objective.distill.k"
            )
        packed[start : start + len(top)] = top
    return torch.from_numpy(packed["id"].copy()), torch.from_numpy(packed["logprob"].copy())


def _pack_masks(rollouts: Sequence[Rollout]) -> SamplingMask | None:
    if all(rollout.sampling_mask is None for rollout in rollouts):
        return None
    parts = []
    for rollout in rollouts:
        mask, tokens = rollout.sampling_mask, rollout.response_ids.size
        if mask is None or len(mask) != tokens:
            has = "none" if mask is None else f"one of {len(mask)}"
            raise ValueError(
                f"rollout of problem {rollout.problem_id} should have a sampling mask of {tokens} tokens, but has {has}; it is "
                "of another response, or of a run without top_k"
            )
        parts += [SamplingMask.empty(rollout.prompt_ids.size - 1), mask, SamplingMask.empty(1)]
    return SamplingMask.joined(parts)


def check_judged(rollouts: Sequence[Rollout], numbers: Sequence[int] | None, config: RunConfig) -> None:
    """Raises ValueError if a served teacher's log-probs are missing. ``numbers``: as of `Trainer.batch_from_root`."""
    named, k = list(config.teachers.items()), config.objective.teacher_top_k
    for index, rollout in enumerate(rollouts if named else ()):
        name, teacher = named[0 if numbers is None else numbers[index]]
        if teacher.place == "server" and rollout.teacher_logprobs is None:
            raise ValueError(
                f"rollout of problem {rollout.problem_id} has no log-probs of teachers.{name}, which is served; record it "
                "again with it, leave rewards to reward.verifier in rollout.collect, or set place = ranks"
            )
        recorded = 0 if rollout.teacher_top is None else rollout.teacher_top.shape[1]
        if k and recorded != k:
            raise ValueError(
                f"rollout of problem {rollout.problem_id} has {f'the top {recorded}' if recorded else 'no top tokens'} of "
                f"teachers.{name}, and objective.distill.of = top_k needs {k}; record it again with that, or set distill."
                f"{f'k = {recorded}' if recorded else 'of = sampled'}"
            )


def check_recorded(rollouts: Sequence[Rollout], *, routes_of: ModelSpec | None, sampling_masks: bool) -> None:
    """Raises ValueError that names a rollout without the experts or mask that the config needs."""
    for rollout in rollouts:
        where = f"rollout of problem {rollout.problem_id}"
        tokens = rollout.prompt_ids.size + rollout.response_ids.size
        if routes_of is not None and (fault := routes_of.routes_fault(rollout.routed_experts, tokens)):
            raise ValueError(
                f"{where} {fault}; record the step again with rollout.server.routing_replay = true, or set it to false"
            )
        if sampling_masks and rollout.sampling_mask is None:
            raise ValueError(
                f"{where} has no sampling mask, but rollout.sampling.top_k says that its tokens were drawn from a part of the "
                "vocabulary; record the step again with these settings, or leave top_k out"
            )
