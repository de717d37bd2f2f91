import math
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from statistics import fmean

import torch
from torch import Tensor

from tepo_megatron.config import LogConfig
from tepo_megatron.core.problem import Problem
from tepo_megatron.core.rollout import Rollout
from tepo_megatron.core.types import Batch
from tepo_megatron.trainer.protocol import UpdateResult


def minibatches(batch: Batch, count: int, *, seed: int, step: int) -> Iterator[Batch]:
    """The order depends only on (seed, step). Leaves out sequences without a loss token."""
    for part in members(batch.trained_sequences, count, seed=seed, step=step):
        yield batch.select(part)


def members(sequences: Sequence[int], count: int, *, seed: int, step: int) -> list[list[int]]:
    trained = torch.tensor(sequences, dtype=torch.int64)
    generator = torch.Generator().manual_seed(derive_seed(seed, step, "minibatches"))
    order = torch.randperm(trained.numel(), generator=generator)
    return [part.tolist() for part in trained[order].tensor_split(count)]


def mark_recorded(batch: Batch, log: LogConfig, step: int) -> Batch:
    """``step`` is the row's number. The same on every rank."""
    if not log.records_tokens(step):
        return batch
    groups_S = batch.groups_S
    numbers_S = torch.arange(groups_S.numel(), dtype=groups_S.dtype, device=groups_S.device)
    chosen_S = torch.isin(groups_S, groups_S.unique()[: log.token_samples])
    return batch.with_(recorded_S=numbers_S.where(chosen_S, -1))


def derive_seed(seed: int, step: int, purpose: str) -> int:
    return int.from_bytes(blake2b(f"{seed}/{step}/{purpose}".encode(), digest_size=4).digest()) & 0x7FFFFFFF


def summarize(batch: Batch, updates: Sequence[UpdateResult]) -> dict[str, float]:
    """Means over tokens, or over what a metric counts. Skipped steps count only in ``update/skipped``; if all were, loss
    and norm are NaN.
    """
    lr = updates[-1].lr
    count_skipped = sum(bool(update.skipped) for update in updates)
    sums = {number: update.sums for number, update in enumerate(updates, start=1)}
    shares = {number: of_update["clip/share"] for number, of_update in sums.items() if "clip/share" in of_update}
    updates = [update for update in updates if not update.skipped]
    row = {**_rollout_figures(batch), "update/skipped": float(count_skipped), "lr": lr, "loss": math.nan, "grad_norm": math.nan}
    if not updates:
        return row
    for name in updates[0].sums:
        total = sum(update.sums[name][0] for update in updates)
        count = sum(update.sums[name][1] for update in updates)
        row[name] = total / count if count else 0.0
    if "ratio/sigma" in row:
        row["ratio/sigma"] = math.sqrt(row["ratio/sigma"])  # the trainer's is a mean square
    row |= {f"clip/share_u{number}": total / count if count else 0.0 for number, (total, count) in shares.items()}
    for name in updates[0].extrema:
        pick = max if name.endswith("/max") else min
        row[name] = pick(update.extrema[name] for update in updates)
    row["loss"] = sum(update.loss for update in updates) / len(updates)
    row["grad_norm"] = sum(update.grad_norm for update in updates) / len(updates)
    return row


def _rollout_figures(batch: Batch) -> dict[str, float]:
    responses = int(batch.loss_mask_T.sum())
    groups, index = batch.groups_S.unique(return_inverse=True)
    highest = torch.full((groups.numel(),), -torch.inf, device=index.device).scatter_reduce(0, index, batch.rewards_S, "amax")
    lowest = torch.full((groups.numel(),), torch.inf, device=index.device).scatter_reduce(0, index, batch.rewards_S, "amin")
    figures = {
        "reward/mean": float(batch.rewards_S.mean()),
        "reward/std": float(batch.rewards_S.std(unbiased=False)),
        "response_len/mean": responses / max(1, len(batch.trained_sequences)),
        "response_tokens": responses,
        "groups/zero_variance": float((highest == lowest).float().mean()),
    }
    if (mask := batch.sampling_mask_T) is not None:
        possible = 1 + mask.counts[batch.loss_mask_T.cpu().numpy()]
        if possible.size:
            figures |= {"sampling/kept_mean": float(possible.mean()), "sampling/kept_max": float(possible.max())}
    return figures


def source_figures(
    names: Sequence[str], rollouts: Sequence[Rollout], problems: Mapping[str, Problem], parts: Sequence[Batch] = ()
) -> dict[str, float]:
    """Each named source's share of the groups, mean reward, and divergence from its teacher before the step (k3)."""
    source_of = {
        rollout.problem_id: problems[rollout.problem_id].source for rollout in rollouts if rollout.problem_id in problems
    }
    groups = {rollout.group: source_of.get(rollout.problem_id) for rollout in rollouts}
    figures: dict[str, float] = {}
    for name in names:
        rewards = [r.reward for r in rollouts if source_of.get(r.problem_id) == name and r.reward is not None]
        figures[f"source/{name}/share"] = list(groups.values()).count(name) / len(groups) if groups else 0.0
        figures |= {f"source/{name}/reward": fmean(rewards)} if rewards else {}
        values = [_from_teacher(part, [group for group, source in groups.items() if source == name]) for part in parts]
        judged = torch.cat([torch.zeros(0), *(value_R for value_R in values if value_R is not None)])
        figures |= {f"source/{name}/divergence": float(judged.mean())} if judged.numel() else {}
    return figures


def _from_teacher(part: Batch, groups: Sequence[int]) -> Tensor | None:
    """Returns k3 estimates of KL(π_old‖π_teacher) at the groups' tokens."""
    if part.teacher_logprobs_T is None or part.old_logprobs_T is None:
        return None
    chosen_S = torch.isin(part.groups_S, torch.tensor(groups, device=part.groups_S.device))
    behind_R = (part.teacher_logprobs_T - part.old_logprobs_T)[part.loss_mask_T & chosen_S[part.sequence_index_T]]
    return (behind_R.expm1() - behind_R).cpu()
