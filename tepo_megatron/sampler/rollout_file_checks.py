"""Whether rollouts that were read from a file are what a step is trained on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from tepo_megatron.core.types import Rollout

_ROUNDING = 1e-3
"""Nats by which a log-prob may be above 0."""


def check_rollouts(
    path: Path,
    rollouts: Sequence[Rollout],
    *,
    step: int,
    prompts: int,
    samples: int,
    vocab_size: int | None = None,
    stalest: int = 0,
) -> None:
    """Raises ValueError with ``path``, line and fault where these are not what a step is trained on: ``samples`` responses to
    each of ``prompts`` prompts, group by group, drawn by the weights of the step, or of up to ``stalest`` steps
    before, with a finite log-prob for every token and a finite reward, or None for one that could not be scored.
    """
    for number, rollout in enumerate(rollouts):
        for fault in _faults(rollout, step, stalest, vocab_size):
            raise ValueError(f"{path}, line {number + 2}: {fault}; record the step again")
        first = rollouts[number - number % samples]
        for fault in _group_faults(rollout, first, number // samples, samples):
            raise ValueError(f"{path}, line {number + 2}: {fault}; record the step again")
    if len(rollouts) != prompts * samples:
        raise ValueError(
            f"{path}, line {len(rollouts) + 1}: the file ends after {len(rollouts)} rollouts, but rollout.prompts_per_step = "
            f"{prompts} × rollout.samples_per_prompt = {samples} are {prompts * samples}; set what recorded it"
        )


def rollout_fault(rollout: Rollout, step: int, *, vocab_size: int) -> str | None:
    """Why a rollout that was just drawn by the weights of ``step`` cannot be trained on; None: it can."""
    stale = [version.step for _, version in rollout.versions if version.step != step]
    if stale:
        return f"drawn by the weights of step {stale[0]}, not of step {step}"
    return next(_faults(rollout, step, 0, vocab_size), None)


def _faults(rollout: Rollout, step: int, stalest: int, vocab_size: int | None) -> Iterator[str]:
    """What is wrong with a rollout by itself."""
    for drawn in (version.step for _, version in rollout.versions):
        if not step - stalest <= drawn <= step:
            before = f", nor of one of the {stalest} before it" if stalest else ""
            yield f"drawn by the weights of step {drawn}, not of step {step}, for which the file is{before}"
    starts = [start for start, _ in rollout.versions]
    trained = rollout.reward is not None
    if starts[:1] != [0] or starts != sorted(set(starts)) or starts[-1] >= max(1, len(rollout.response_ids)):
        yield f"the weights are said to change at response tokens {starts}, which are not places in order from 0"
    if not rollout.prompt_ids.size or (trained and not rollout.response_ids.size):
        yield "the prompt or the response has no token"
    logprobs = rollout.sampler_logprobs
    if logprobs.size != rollout.response_ids.size:
        yield f"{logprobs.size} log-probs for {rollout.response_ids.size} response tokens"
    kept = rollout.sampling_mask
    if kept is not None and len(kept) != rollout.response_ids.size:
        yield f"a sampling mask of {len(kept)} tokens for {rollout.response_ids.size} response tokens"
    for at in np.flatnonzero(~((logprobs > -math.inf) & (logprobs <= _ROUNDING))):  # nan is no number that fits, either
        yield f"the log-prob of response token {at} is {logprobs[at]}, not a finite number of at most 0"
    if (mask := rollout.loss_mask) is not None:
        if trained and not mask.any():
            yield "the model wrote none of the response tokens"
        for at in np.flatnonzero(~mask & (logprobs != 0) if logprobs.size == mask.size else ()):
            yield f"response token {at} has the log-prob {logprobs[at]}, not 0, and the model did not write it"
    if rollout.reward is not None and not math.isfinite(rollout.reward):
        yield f"the reward is {rollout.reward}, not a finite number"
    for name, part in rollout.reward_parts.items():
        if not math.isfinite(part):
            yield f"the reward's component {name!r} is {part}, not a finite number"
    if vocab_size is not None:
        for ids in (rollout.prompt_ids, rollout.response_ids, *(() if kept is None else (kept.ids,))):
            for token in ids[(ids < 0) | (ids >= vocab_size)]:
                yield f"token {token} is not one of the model's {vocab_size}"


def _group_faults(rollout: Rollout, first: Rollout, group: int, samples: int) -> Iterator[str]:
    """What is wrong with its place, where ``first`` is the first rollout of the group that belongs there."""
    if rollout.group != group:
        yield (
            f"group {rollout.group} where group {group} is due; the groups of a step come in order from 0, each with "
            f"rollout.samples_per_prompt = {samples} rollouts"
        )
    if rollout.problem_id != first.problem_id or not np.array_equal(rollout.prompt_ids, first.prompt_ids):
        yield f"another problem or prompt than the first rollout of group {group} has"
