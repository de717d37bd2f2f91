"""Token values of a step's responses (``log.token_samples``). Rank 0 only."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tepo_megatron.core.problem import Problem
from tepo_megatron.core.rollout import Rollout
from tepo_megatron.core.types import Batch
from tepo_megatron.run.metrics import TokenPrompt, TokenSamples
from tepo_megatron.tasks.data.tokenizer import Tokenizer
from tepo_megatron.trainer.protocol import UpdateResult

_Values = NDArray[Any]


def token_samples(
    step: int,
    rollouts: Sequence[Rollout],
    parts: Sequence[Batch],
    updates: Sequence[UpdateResult],
    count: int,
    problems: Mapping[str, Problem],
    tokenizer: Tokenizer,
) -> TokenSamples:
    """Values of the first ``count`` groups. ``rollouts`` are in batch order; ``step`` is its row's number."""
    groups = sorted({rollout.group for rollout in rollouts})[:count]
    places = [place for place, rollout in enumerate(rollouts) if rollout.group in groups]
    chosen = [rollouts[place] for place in places]
    trained: dict[int, dict[str, _Values]] = {}
    for number, (part, update) in enumerate(zip(parts, updates, strict=True), start=1):
        trained |= _values_of(part, update, number)
    arrays = [_response(rollout, trained.get(place, {})) for place, rollout in zip(places, chosen, strict=True)]
    first_of = {rollout.group: rollout for rollout in reversed(chosen)}
    prompts = []
    for rollout in (first_of[group] for group in groups):
        problem = problems.get(rollout.problem_id)
        answer, source = (None, "") if problem is None else (problem.answer, problem.source)
        prompts.append(TokenPrompt(tokenizer.show(rollout.prompt_ids.tolist()), answer, source, rollout.problem_id))
    joined = {name: np.concatenate([values[name] for values in arrays]) for name in arrays[0]}
    pieces = {token: tokenizer.piece(token) for token in np.unique(joined["ids"]).tolist()}
    prompt = np.array([groups.index(rollout.group) for rollout in chosen], dtype=np.int32)
    return TokenSamples(step=step, prompts=tuple(prompts), pieces=pieces, prompt=prompt, **joined)


_FROM_TRAINER = ("logprob_trainer", "logprob_update", "entropy", "entropy_change", "advantage", "ratio", "divergence", "masked")


def _values_of(part: Batch, update: UpdateResult, number: int) -> dict[int, dict[str, _Values]]:
    """Recorded sequence → its *labels'* values, NaN outside the loss mask. ``number``: the mini-batch's."""
    assert part.recorded_S is not None
    assert part.advantages_S is not None
    assert part.old_logprobs_T is not None
    assert part.old_entropy_T is not None
    recorded_S, index_T = part.recorded_S >= 0, part.sequence_index_T
    at_R = recorded_S[index_T].nonzero()[:, 0]
    values = {
        "logprob_trainer": part.old_logprobs_T[at_R],
        "entropy": part.old_entropy_T[at_R],
        "advantage": part.advantages_S[index_T[at_R]],
        **update.token_values,
    }
    mask_R = part.loss_mask_T[at_R]
    arrays = {name: torch.where(mask_R, value_R.float(), torch.nan).cpu().numpy() for name, value_R in values.items()}
    places, lengths = part.recorded_S[recorded_S].tolist(), part.lengths_S[recorded_S].tolist()
    starts = np.cumsum([0, *lengths]).tolist()
    return {
        place: {"update": np.array([number]), **{name: array[start : start + length] for name, array in arrays.items()}}
        for place, start, length in zip(places, starts, lengths, strict=False)
    }


def _response(rollout: Rollout, trained: Mapping[str, _Values]) -> dict[str, _Values]:
    length = rollout.response_ids.size
    labels = slice(rollout.prompt_ids.size - 1, rollout.prompt_ids.size - 1 + length)
    unknown = np.full(length, np.nan, dtype=np.float32)
    values = {name: trained[name][labels] if name in trained else unknown for name in _FROM_TRAINER}
    mask = np.ones(length, dtype=np.bool_) if rollout.loss_mask is None else rollout.loss_mask
    starts, versions = zip(*rollout.versions, strict=True)
    return {
        **values,
        "masked": values["masked"] == 1,
        "lengths": np.array([length], dtype=np.int32),
        "group": np.array([rollout.group], dtype=np.int32),
        "update": trained.get("update", np.array([0])).astype(np.int32),
        "reward": np.array([rollout.reward], dtype=np.float32),
        "truncated": np.array([rollout.finish_reason == "length"]),
        "ids": rollout.response_ids,
        "loss_mask": mask,
        "version": np.repeat([version.step for version in versions], np.diff([*starts, length])).astype(np.int32),
        "logprob_sampler": np.where(mask, rollout.sampler_logprobs, np.float32(np.nan)),
    }


def train_samples(
    rollouts: Sequence[Rollout], problems: Mapping[str, Problem], responses: int, decode: Callable[[Sequence[int]], str]
) -> list[dict[str, Any]]:
    """Replayed rollouts may lack prompt and answer (None), unscored ones the reward."""
    rows = []
    for rollout in rollouts[:responses]:
        problem = problems.get(rollout.problem_id)
        row: dict[str, Any] = {
            "problem": rollout.problem_id,
            **({"source": problem.source} if problem is not None and problem.source else {}),
            "prompt": None if problem is None else problem.prompt,
            "answer": None if problem is None else problem.answer,
            "group": rollout.group,
            "response": rollout.text,
        }
        if turns := rollout.turns(decode):
            row |= {"turns": turns, "model_tokens": rollout.model_tokens}
        row["reward"] = rollout.reward
        if rollout.reward_parts:
            row["components"] = dict(rollout.reward_parts)
        row["tokens"], row["finish_reason"] = len(rollout.response_ids), rollout.finish_reason
        rows.append(row | {"weights_version": rollout.weights_version.step})
    return rows
