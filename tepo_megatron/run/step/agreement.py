"""The rollouts as a canary: the sampler's log-probs of every token that a step trains on, against the trainer's own scores.

Both are there anyway, so this costs next to nothing, and it sees what a fixed prompt cannot: every layer, head and expert that
the samples use, the run's temperature, and the servers' prefix cache. It runs before the step's first update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tepo_megatron.core.types import Batch


@dataclass(frozen=True)
class Agreement:
    """How far the two sides' log-probs are apart, in nats, over the response tokens of one group of samples."""

    group: int
    tokens: int
    mean: float
    largest: float


def agreements(parts: Sequence[Batch], fresh: Sequence[Tensor] | None = None) -> list[Agreement]:
    """One for each group of a step that ``parts``, its scored mini-batches, hold; a sampler's log-prob that is no finite number
    is inf away. Tokens for which the trainer's is none are left out: it looks for the cause itself, and skips the update.

    ``fresh``: of each part the tokens that the trainer's present weights drew, bool [T]; None: all.
    """
    gaps, groups = [], []
    for at, part in enumerate(parts):
        assert part.old_logprobs_T is not None
        gap_T = (part.old_logprobs_T - part.sampler_logprobs_T).abs().nan_to_num(nan=torch.inf)
        counted_T = part.loss_mask_T & part.old_logprobs_T.isfinite()
        if fresh is not None:
            counted_T &= fresh[at]
        gaps.append(gap_T[counted_T].double())
        groups.append(part.groups_S[part.sequence_index_T][counted_T])
    gap, (names, at) = torch.cat(gaps), torch.cat(groups).unique(return_inverse=True)
    zeros = gap.new_zeros(names.numel())
    tokens = zeros.index_add(0, at, torch.ones_like(gap))
    mean = zeros.index_add(0, at, gap) / tokens
    largest = zeros.scatter_reduce(0, at, gap, "amax")
    columns: list[Tensor] = [names, tokens, mean, largest]
    return [
        Agreement(int(name), int(count), average, most)
        for name, count, average, most in zip(*(column.tolist() for column in columns), strict=True)
    ]


def check_agreement(
    step: int, parts: Sequence[Batch], *, tolerance: float, token_tolerance: float, fresh: Sequence[Tensor] | None = None
) -> dict[str, float]:
    """Metrics of the agreement between the servers that sampled a step and the trainer; ``parts``: its scored mini-batches. Of
    older weights the trainer cannot say what they would give: ``fresh`` as for :func:`agreements`.

    A group's mean difference may be ``tolerance`` nats, and ``token_tolerance`` more over its number of tokens, so that one
    rare token of a short response is no alarm. Raises RuntimeError that names the worst group where it is more: one server's
    samples are enough, however many others there are.
    """
    found = agreements(parts, fresh)
    if not found:
        return {}
    worst = max(found, key=lambda each: each.mean - token_tolerance / each.tokens)
    if not worst.mean <= tolerance + token_tolerance / worst.tokens:
        wrong = sum(not each.mean <= tolerance + token_tolerance / each.tokens for each in found)
        raise RuntimeError(
            f"step {step}: {wrong} of {len(found)} groups of rollouts were not drawn from the trainer's policy: in group "
            f"{worst.group} the log-probs of {worst.tokens} tokens differ by {worst.mean:.3g} nats on average, "
            f"{worst.largest:.3g} at most (rollout.canary.rollouts_tolerance = {tolerance:g}). The servers' weights, "
            "temperature or cache are not what this run gave them; nothing was trained on these rollouts. Start again with "
            "--resume, which starts new servers"
        )
    total = sum(each.tokens for each in found)
    return {
        "canary/rollouts_mean_gap": sum(each.mean * each.tokens for each in found) / total,
        "canary/rollouts_worst_group": max(each.mean for each in found),
        "canary/rollouts_max_gap": max(each.largest for each in found),
    }
