"""One optimizer step. Only this file decides how losses and gradients are scaled.

Megatron would divide the loss by the number of micro-batches and the gradient by the number of data-parallel ranks, which
is a mean of means, the common error in this field. With ``calculate_per_token_loss`` (set in ``model/model.py``) it does
neither: it sums over micro-batches and ranks, and would divide by a token count at the very end, in
``finalize_model_grads``. That last division is left out too (``finalize_gradients`` in ``policy/policy.py``), since the
objective's numerator is divided here, once, by the denominator of the whole step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from tepo_megatron.core.types import Batch, ObjectiveOutput, TokenScores
from tepo_megatron.errors import NotFiniteError
from tepo_megatron.trainer.megatron.platform.collectives import broadcast_json
from tepo_megatron.trainer.megatron.policy.policy import Policy
from tepo_megatron.trainer.megatron.step.forward import Forward
from tepo_megatron.trainer.megatron.step.not_finite import find_not_finite, first_cause
from tepo_megatron.trainer.megatron.step.token_values import gather_recorded, keep_recorded
from tepo_megatron.trainer.protocol import UpdateResult


class StepObjective(Protocol):
    """The part of an objective that an optimizer step uses; ``tepo_megatron.core.objective.Objective`` is one."""

    @property
    def needs_reference(self) -> bool: ...
    @property
    def needs_entropy_slope(self) -> bool: ...
    def advantages(self, batch: Batch) -> Tensor: ...
    def prepare(self, batch: Batch, *, entropy_noise: float) -> Any: ...
    def __call__(self, scores: TokenScores, batch: Batch, context: Any) -> ObjectiveOutput: ...


def update(
    forward: Forward, policy: Policy, objective: StepObjective, batch: Batch, *, entropy_noise: float = 0.0
) -> UpdateResult:
    """Makes one optimizer step on the whole mini-batch, of which this rank computes its share. Every rank calls.

    ``batch`` carries advantages, old log-probs and old entropies; ``entropy_noise`` is what rounding alone may change an
    entropy by, in nats. If a loss, a gradient or the gradient norm of any rank is not finite, no rank makes the step.
    """
    optimizer = policy.optimizer
    try:
        context = objective.prepare(batch, entropy_noise=entropy_noise)
    except NotFiniteError as error:  # every rank has the whole mini-batch, and ends up here alike
        return UpdateResult(math.nan, math.nan, optimizer.param_groups[0]["lr"], {}, {}, skipped=str(error))

    def loss(scores: TokenScores, micro: Batch) -> tuple[Tensor, dict[str, Any]]:
        output = objective(scores, micro, context)
        value = output.numerator / output.denominator  # of the whole mini-batch, on every rank and micro-batch the same
        kept = {"loss": value.detach(), "metrics": output.metrics, "extrema": output.extrema}
        return value, kept | keep_recorded(output, micro)

    for ddp in policy.ddp:
        ddp.zero_grad_buffer()
    optimizer.zero_grad()
    biases = {name: bias.clone() for name, bias in policy.expert_biases.items()}
    micro_batches = forward.micro_batches(batch)
    kept = forward.run(policy.ddp, batch, micro_batches, loss, train=True)
    with forward.platform.megatron():
        # The norm is computed before step(), which would scale by it: a NaN must not reach the weights.
        optimizer.prepare_grads()
        grad_norm = float(optimizer.get_grad_norm())
        found = find_not_finite(forward.ranks, policy, kept, grad_norm, forward.platform.device)
        if found:  # neither optimizer nor schedule steps, as in Megatron's own loop after an overflow
            for name, bias in policy.expert_biases.items():  # which Megatron moves with the gradients' reduction
                bias.copy_(biases[name])
            cause, lr = first_cause(found, grad_norm), optimizer.param_groups[0]["lr"]
            return UpdateResult(math.nan, grad_norm, lr, {}, {}, skipped=cause, not_finite=found)
        policy.schedule.step(increment=1)
        optimizer.step()
        policy.param_gather.after_step()
    total, sums, extrema = _reduce(kept, forward)
    recorded = gather_recorded(forward, batch, micro_batches, kept)
    return UpdateResult(total, grad_norm, optimizer.param_groups[0]["lr"], sums, extrema, token_values=recorded)


def _reduce(
    kept: Sequence[Mapping[str, Any]], forward: Forward
) -> tuple[float, dict[str, tuple[float, float]], dict[str, float]]:
    """Adds up micro-batches and data-parallel ranks on the last stage, and sends the result to every rank."""
    ranks, device = forward.ranks, forward.platform.device
    report: Any = None
    if ranks.is_last_stage:
        names = list(kept[0]["metrics"])
        # One tensor of (sum, count) pairs for one collective; the loss is put in twice. Tensor-parallel ranks agree already,
        # so only the data-parallel ranks are summed.
        pairs = [pair for micro in kept for pair in [(micro["loss"], micro["loss"]), *micro["metrics"].values()]]
        values = torch.stack([torch.stack([torch.as_tensor(x, dtype=torch.float64) for x in pair]) for pair in pairs])
        values = values.view(len(kept), 1 + len(names), 2).sum(0).to(device)
        group = parallel_state.get_data_parallel_group()
        dist.all_reduce(values, group=group)
        extrema = {}
        for name in kept[0]["extrema"]:
            largest = name.endswith("/max")
            own = torch.stack([torch.as_tensor(micro["extrema"][name]) for micro in kept])
            value = own.max() if largest else own.min()
            dist.all_reduce(value, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.MIN, group=group)
            extrema[name] = float(value)
        report = [float(values[0, 0]), dict(zip(names, values[1:].tolist(), strict=True)), extrema]
    total, sums, extrema = broadcast_json(report, source=ranks.last_stage_root, device=device)
    return total, {name: (pair[0], pair[1]) for name, pair in sums.items()}, extrema
