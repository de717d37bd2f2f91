"""Finds out, on all ranks alike, whether an update met a NaN or an infinite number, where, and of which micro-batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tepo_megatron.trainer.megatron.platform.collectives import broadcast_json
from tepo_megatron.trainer.megatron.platform.parallel import Ranks
from tepo_megatron.trainer.megatron.policy.policy import Policy

NOT_FINITE = "not_finite"
"""Key of a micro-batch's kept values under which ``Forward`` says why it has no loss."""

_MOST_NAMES = 8
"""Parameters and ranks that are named; a NaN spreads, and the first few say as much as all."""

Found = dict[str, Any]
"""What one rank found: ``rank``, ``place`` (its coordinates), ``micro_batches`` (why they have no loss), ``losses`` (numbers of
micro-batches whose loss is not finite), ``gradients`` (names of parameters) and ``more_gradients`` (how many more)."""


def find_not_finite(
    ranks: Ranks, policy: Policy, kept: Sequence[Mapping[str, Any]], grad_norm: float, device: torch.device
) -> list[Found]:
    """What was not finite in an update before its optimizer step, by rank; empty where all was finite. Every rank calls, and
    gets the same.

    ``kept``: what the forward kept of this rank's micro-batches; ``grad_norm``: the norm over all ranks. It leaves out copies
    of parameters on other tensor-parallel ranks, so that every rank looks at its own gradients too.
    """
    own = torch.zeros(ranks.world, dtype=torch.int32, device=device)
    own[ranks.rank] = not (math.isfinite(grad_norm) and _losses_are_finite(kept) and _gradients_are_finite(policy))
    dist.all_reduce(own)
    bad = own.nonzero().flatten().tolist()[:_MOST_NAMES]
    details = _details(ranks, policy, kept) if ranks.rank in bad else None
    return [broadcast_json(details, source=rank, device=device) for rank in bad]


def first_cause(found: Sequence[Found], grad_norm: float) -> str:
    """One sentence. What lies nearest to the origin is named: logits before losses, and these before gradients."""
    for kind in ("micro_batches", "losses", "gradients"):
        for one in found:
            if one[kind]:
                return f"rank {one['rank']} ({one['place']}): {_describe(one, kind)}"
    return f"the gradient norm is {grad_norm}, although every gradient is finite"


def _describe(one: Found, kind: str) -> str:
    first = one[kind][0]
    if kind == "micro_batches":
        return str(first)
    if kind == "losses":
        return f"the loss of micro-batch {first} is not finite"
    more = len(one["gradients"]) - 1 + one["more_gradients"]
    return f"the gradient of {first}" + (f" and of {more} more parameters" if more else "") + " is not finite"


def _losses_are_finite(kept: Sequence[Mapping[str, Any]]) -> bool:
    if any(NOT_FINITE in micro for micro in kept):
        return False
    return not kept or bool(torch.stack([torch.as_tensor(micro["loss"]) for micro in kept]).isfinite().all())


def _gradients_are_finite(policy: Policy) -> bool:
    """One pass over the gradient buffers, without memory of their size: the largest magnitude carries a NaN along."""
    held = [buffer for ddp in policy.ddp for buffer in (*ddp.buffers, *ddp.expert_parallel_buffers)]
    buffers = [buffer.grad_data for buffer in held if buffer.grad_data.numel()]
    return not buffers or bool(torch.stack([torch.linalg.vector_norm(b, math.inf) for b in buffers]).isfinite().all())


def _details(ranks: Ranks, policy: Policy, kept: Sequence[Mapping[str, Any]]) -> Found:
    trained = policy.trained.items()
    names = [name for name, param in trained if not param.main_grad.isfinite().all()]  # type: ignore[attr-defined]
    place = {"tp": ranks.tp_rank, "pp": ranks.pp_rank, "cp": ranks.cp_rank, "dp": ranks.dp_rank}
    if ranks.cp == 1:
        del place["cp"]
    return {
        "rank": ranks.rank,
        "place": ", ".join(f"{name} {at}" for name, at in place.items()),
        "micro_batches": [micro[NOT_FINITE] for micro in kept if NOT_FINITE in micro],
        "losses": [at for at, micro in enumerate(kept) if NOT_FINITE not in micro and not math.isfinite(float(micro["loss"]))],
        "gradients": names[:_MOST_NAMES],
        "more_gradients": max(0, len(names) - _MOST_NAMES),
    }
