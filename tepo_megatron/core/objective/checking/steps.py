"""Random optimizer steps in float64."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from tepo_megatron.core.types import Batch, ObjectiveOutput, TokenScores

if TYPE_CHECKING:
    from tepo_megatron.core.objective.compose import Objective


class StepOutcome(NamedTuple):
    loss: Tensor
    gradients: tuple[Tensor, ...]
    """By log-probs and by entropies: [T] each."""
    metrics: Mapping[str, Tensor]
    """(sum, count) by name, [2]."""
    extrema: Mapping[str, Tensor]


def make_step(
    masks: Sequence[Sequence[bool]],
    *,
    seed: int = 0,
    spread: float = 0.3,
    rewards: Sequence[float] | None = None,
    groups: Sequence[int] | None = None,
    parts: int = 2,
) -> tuple[Batch, TokenScores]:
    """Makes a step in which sequence i has ``len(masks[i])`` tokens, and scores of a policy ``spread`` away from the old."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([len(mask) for mask in masks])
    total, count = int(lengths.sum()), len(masks)
    cu = torch.zeros(count + 1, dtype=torch.int32)
    cu[1:] = lengths.cumsum(0)
    old = -2 * torch.rand(total, generator=generator, dtype=torch.float64) - 0.01
    noise = torch.randn(4, total, generator=generator, dtype=torch.float64)
    mask = torch.tensor([value for row in masks for value in row], dtype=torch.bool)
    batch = Batch(
        tokens_T=torch.zeros(total, dtype=torch.int64),
        labels_T=torch.randint(0, 1000, (total,), generator=generator),
        loss_mask_T=mask,
        cu_seqlens=cu,
        sampler_logprobs_T=torch.where(mask, old + 0.2 * noise[0], 0.0),
        rewards_S=torch.rand(count, generator=generator) if rewards is None else torch.tensor(rewards),
        groups_S=torch.arange(count) // 2 if groups is None else torch.tensor(groups),
        old_logprobs_T=old,
        old_entropy_T=torch.rand(total, generator=generator, dtype=torch.float64),
        reference_logprobs_T=old + 0.3 * noise[1],
        # as a reward and bonuses that are seldom given; where the rewards are set they are the only ones
        reward_parts_SK=None
        if rewards is not None
        else torch.randint(0, 3, (count, parts), generator=generator).clamp(min=1) - 1.0,
    )
    assert batch.old_entropy_T is not None
    logprob = (old + spread * noise[2]).requires_grad_()
    entropy = (batch.old_entropy_T + 0.1 * noise[3]).requires_grad_()
    return batch, TokenScores(logprob, entropy, torch.randn(total, generator=generator, dtype=torch.float64))


def random_steps(count: int, *, parts: int = 2) -> Iterator[tuple[Batch, TokenScores]]:
    """Yields steps with holes and sequences without a response; always the same."""
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        sizes = torch.randint(1, 8, (2 + seed % 5,), generator=generator).tolist()
        rows = [(torch.rand(size, generator=generator) < 0.7).tolist() for size in sizes]
        rows[0][-1] = rows[1][-1] = True  # a step has response tokens
        yield make_step(rows, seed=seed, spread=(0.3, 1e-3, 1.0)[seed % 3], parts=parts)


def telling_steps(*, parts: int = 2) -> list[tuple[Batch, TokenScores]]:
    """Makes steps near and far from the old policy: any field of an objective changes one of them."""
    rows = [[True] * 6, [True, False, True, True], [False] + [True] * 4, [True], [False, False], [True] * 3, [True, True]]
    made = []
    for seed, spread, scale in ((0, 1e-3, 6), (1, 0.3, 6), (2, 1.0, 6), (4, 0.3, 6), (7, 0.6, 1)):
        batch, scores = make_step(rows, seed=seed, groups=[0, 0, 0, 1, 1, 2, 2], rewards=[1.0, 0.0, 0.25, 1.0, 0.0, 0.5, 0.25])
        assert batch.old_logprobs_T is not None
        assert batch.reference_logprobs_T is not None
        old = scale * batch.old_logprobs_T
        sampler = torch.where(batch.loss_mask_T, old + 6 * (batch.sampler_logprobs_T - batch.old_logprobs_T), 0.0)
        logprob = (old + spread * (scores.logprob - batch.old_logprobs_T) / 0.3).detach().requires_grad_()
        reference = old + batch.reference_logprobs_T - batch.old_logprobs_T
        components = [batch.rewards_S, batch.rewards_S.flip(0), *(batch.rewards_S.roll(shift) for shift in range(2, parts))]
        columns = torch.stack(components[:parts], 1)
        changed = batch.with_(
            old_logprobs_T=old, sampler_logprobs_T=sampler, reference_logprobs_T=reference, reward_parts_SK=columns
        )
        made.append((changed, TokenScores(logprob, scores.entropy, scores.entropy_slope)))
    return made


def whole(objective: Objective, batch: Batch, scores: TokenScores) -> StepOutcome:
    batch = batch.with_(advantages_S=objective.advantages(batch))
    return summary([objective(scores, batch, objective.prepare(batch))], scores)


def summary(outputs: Sequence[ObjectiveOutput], scores: TokenScores) -> StepOutcome:
    loss = torch.stack([output.numerator / output.denominator for output in outputs]).sum()
    gradients = torch.autograd.grad(loss, (scores.logprob, scores.entropy), allow_unused=True, materialize_grads=True)
    names = outputs[0].metrics
    metrics = {name: torch.stack([torch.stack(output.metrics[name]) for output in outputs]).sum(0) for name in names}
    extrema = {
        name: getattr(torch.stack([output.extrema[name] for output in outputs]), name.rpartition("/")[2])()
        for name in outputs[0].extrema
    }
    return StepOutcome(loss.detach(), gradients, metrics, extrema)


def pick(batch: Batch, scores: TokenScores, sequences: Sequence[int]) -> tuple[Batch, TokenScores]:
    at_T = batch.token_index(sequences)
    slope = scores.entropy_slope
    return batch.select(sequences), TokenScores(
        scores.logprob[at_T], scores.entropy[at_T], None if slope is None else slope[at_T]
    )
