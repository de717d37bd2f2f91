"""Random steps for tests, and the two ways to run an objective on them: as a whole, and cut into micro-batches."""

from functools import partial

import torch
from hypothesis import strategies as st

from tepo_megatron.types import Batch, TokenScores

VALUES = (
    "tokens_T",
    "labels_T",
    "loss_mask_T",
    "sampler_logprobs_T",
    "old_logprobs_T",
    "old_entropy_T",
    "reference_logprobs_T",
)


def make_batch(masks, *, seed=0, spread=0.3, rewards=None, groups=None):
    """A step in fp64 whose sequence i has ``len(masks[i])`` tokens, and scores of a policy ``spread`` away from the old."""
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
        # as a reward and a bonus that is seldom given; where a test sets the rewards they are the only ones
        reward_parts_SK=None
        if rewards is not None
        else torch.randint(0, 3, (count, 2), generator=generator).clamp(min=1) - 1.0,
    )
    logprob = (old + spread * noise[2]).requires_grad_()
    entropy = (batch.old_entropy_T + 0.1 * noise[3]).requires_grad_()
    return batch, TokenScores(logprob, entropy, torch.randn(total, generator=generator, dtype=torch.float64))


def masks(min_sequences=1, max_sequences=6):
    """Loss masks of a step with at least one response token: prompts, responses, holes, and sequences without any."""
    sequence = st.lists(st.booleans(), min_size=1, max_size=7)
    return st.lists(sequence, min_size=min_sequences, max_size=max_sequences).filter(lambda rows: any(map(any, rows)))


def whole(objective, batch, scores):
    """Loss, gradients and metrics of a step in one piece; the batch gets its advantages."""
    batch = batch.with_(advantages_S=objective.advantages(batch))
    output = objective(scores, batch, objective.prepare(batch))
    return summary([output], scores)


def summary(outputs, scores):
    loss = sum(output.numerator / output.denominator for output in outputs)
    gradients = torch.autograd.grad(loss, (scores.logprob, scores.entropy), allow_unused=True, materialize_grads=True)
    names = outputs[0].metrics
    metrics = {name: torch.stack([torch.stack(output.metrics[name]) for output in outputs]).sum(0) for name in names}
    extrema = {
        name: getattr(torch.stack([output.extrema[name] for output in outputs]), name.rpartition("/")[2])()
        for name in outputs[0].extrema
    }
    return loss.detach(), gradients, metrics, extrema


def pick(batch, scores, sequences):
    """The sequences of a step, in this order, with their scores."""
    offsets = batch.cu_seqlens.tolist()
    at = torch.cat([torch.arange(offsets[s], offsets[s + 1]) for s in sequences])
    return batch.select(sequences), TokenScores(scores.logprob[at], scores.entropy[at], scores.entropy_slope[at])


def assert_same(left, right, rtol=1e-9):
    for a, b in zip(left, right, strict=True):
        if isinstance(a, dict):
            assert a.keys() == b.keys()
            for name in a:
                torch.testing.assert_close(a[name], b[name], rtol=rtol, atol=1e-12, msg=partial("{}: {}".format, name))
        elif isinstance(a, tuple):
            assert_same(a, b, rtol)
        else:
            torch.testing.assert_close(a, b, rtol=rtol, atol=1e-12)
