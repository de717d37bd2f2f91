"""Responses of training steps for people to read, as ``samples.jsonl`` has those of evaluations. Rank 0 only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from tepo_megatron.core.problem import Problem
from tepo_megatron.core.rollout import LossMask, Rollout, TokenIds

Decode = Callable[[Sequence[int]], str]


def train_samples(
    rollouts: Sequence[Rollout], problems: Mapping[str, Problem], responses: int, decode: Decode
) -> list[dict[str, Any]]:
    """Rows for the first ``responses`` rollouts of a step, so that those of a group stay together.

    ``problems`` by their id; of a replayed rollout whose problem is not among them prompt and answer are None. A response that
    could not be scored has no reward. ``decode`` makes text of token ids, for responses of several turns.
    """
    return [_row(rollout, problems.get(rollout.problem_id), decode) for rollout in rollouts[:responses]]


def turns(ids: TokenIds, loss_mask: LossMask, decode: Decode) -> list[dict[str, str]]:
    """What model and environment wrote in turn, each as ``{"by": "model" or "environment", "text": …}``, in their order."""
    found, at = [], 0
    for own, run in groupby(loss_mask.tolist()):
        end = at + len(list(run))
        found.append({"by": "model" if own else "environment", "text": decode(ids[at:end].tolist())})
        at = end
    return found


def _row(rollout: Rollout, problem: Problem | None, decode: Decode) -> dict[str, Any]:
    components = {"components": dict(rollout.reward_parts)} if rollout.reward_parts else {}
    mask = rollout.loss_mask
    several = {} if mask is None else {"turns": turns(rollout.response_ids, mask, decode), "model_tokens": rollout.model_tokens}
    return {
        "problem": rollout.problem_id,
        **({"source": problem.source} if problem is not None and problem.source else {}),
        "prompt": None if problem is None else problem.prompt,
        "answer": None if problem is None else problem.answer,
        "group": rollout.group,
        "response": rollout.text,
        **several,
        "reward": rollout.reward,
        **components,
        "tokens": len(rollout.response_ids),
        "finish_reason": rollout.finish_reason,
        "weights_version": rollout.weights_version.step,
    }
