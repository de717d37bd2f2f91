"""Responses that are cut or all but cut at ``rollout.sampling.max_new_tokens``: trained on, masked, or punished."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tepo_megatron.config import RolloutConfig, RunConfig
from tepo_megatron.config.sampling import OverlongConfig
from tepo_megatron.core.rollout import Rollout


def overlong_penalty(length: int, max_new_tokens: int, overlong: OverlongConfig) -> float:
    """What is added to the reward of a response of ``length`` tokens, from −``penalty`` to 0.

    DAPO's equation 13 (2503.14476): 0 up to ``max_new_tokens`` − ``buffer``, then falling along a line to −``penalty``.
    """
    beyond = length - (max_new_tokens - overlong.buffer)
    return -overlong.penalty * min(max(beyond, 0) / overlong.buffer, 1.0)


def trained(rollouts: Sequence[Rollout], config: RunConfig, step: int) -> tuple[list[Rollout], dict[str, float]]:
    """A step's rollouts with the rewards that are trained on, and figures of the cut ones for the step's row.

    Raises RuntimeError as :func:`check_enough`.
    """
    check_enough(rollouts, config, step)
    after = penalise(rollouts, config.rollout)
    return after, figures(rollouts, after)


def penalise(rollouts: Sequence[Rollout], config: RolloutConfig) -> list[Rollout]:
    """The rollouts with the rewards that are trained on; those that the verifier gave stay in the record."""
    if config.overlong is None:
        return list(rollouts)
    most = config.sampling.max_new_tokens
    penalties = [overlong_penalty(rollout.model_tokens, most, config.overlong) for rollout in rollouts]
    return [
        replace(rollout, reward=rollout.reward + penalty) if penalty and rollout.reward is not None else rollout
        for rollout, penalty in zip(rollouts, penalties, strict=True)
    ]


def trained_places(rollouts: Sequence[Rollout], config: RolloutConfig) -> list[int]:
    """Which of a step's rollouts its mini-batches are made of: with ``truncated: mask`` those that are whole."""
    masks = config.truncated == "mask"
    return [at for at, rollout in enumerate(rollouts) if not (masks and rollout.finish_reason == "length")]


def check_enough(rollouts: Sequence[Rollout], config: RunConfig, step: int) -> None:
    """Raises RuntimeError where ``truncated: mask`` leaves fewer responses than the step's mini-batches need."""
    whole = len(trained_places(rollouts, config.rollout))
    if whole < config.fewest_sequences and whole < len(rollouts):
        raise RuntimeError(
            f"{len(rollouts) - whole} of the {len(rollouts)} responses of step {step} were cut at "
            f"rollout.sampling.max_new_tokens = {config.rollout.sampling.max_new_tokens}, and rollout.truncated = mask trains "
            f"on none of them: the {whole} others are too few for train.minibatches = {config.train.minibatches} on "
            f"engine.parallel.dp = {config.engine.parallel.dp} ranks; raise max_new_tokens, or set rollout.truncated = train"
        )


def figures(rollouts: Sequence[Rollout], trained: Sequence[Rollout]) -> dict[str, float]:
    """For the step's row: how many responses were cut, and what the punishment took off on average. ``trained``: the same
    rollouts with the rewards that are trained on.
    """
    cut = sum(rollout.finish_reason == "length" for rollout in rollouts) / len(rollouts)
    row = {"response_len/truncated": cut}
    punished = [(after.reward or 0.0) - (before.reward or 0.0) for before, after in zip(rollouts, trained, strict=True)]
    if any(punished):
        row["reward/overlong"] = sum(punished) / len(punished)
    return row
