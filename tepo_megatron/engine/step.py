"""One optimizer step: the only place where Megatron's own scaling of losses and gradients is decided.

Megatron would divide the loss by the number of micro-batches and the gradient by the number of data-parallel ranks, which
is the mean of means that this field trips over. With ``calculate_per_token_loss`` (set in ``engine/model.py``) it does
neither: it sums over micro-batches and ranks, and would divide by a token count at the very end, in
``finalize_model_grads``. That last division is left out too (``finalize_gradients``), since the objective's numerator is
divided here, once, by the denominator of the whole step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from tepo_megatron.engine.collectives import broadcast_json
from tepo_megatron.engine.forward import Forward
from tepo_megatron.types import Batch, ObjectiveOutput, TokenScores


class StepObjective(Protocol):
    """What an optimizer step needs of an objective; ``tepo_megatron.objective.Objective`` is one."""

    @property
    def needs_reference(self) -> bool: ...
    @property
    def needs_entropy_slope(self) -> bool: ...
    def advantages(self, batch: Batch) -> Tensor: ...
    def prepare(self, batch: Batch) -> Any: ...
    def __call__(self, scores: TokenScores, batch: Batch, context: Any) -> ObjectiveOutput: ...


@dataclass(frozen=True)
class UpdateResult:
    """One optimizer step, the same on every rank. ``sums`` maps a name to (sum, count), ``extrema`` a ``…/min`` or
    ``…/max``.
    """

    loss: float
    grad_norm: float
    lr: float
    sums: Mapping[str, tuple[float, float]]
    extrema: Mapping[str, float]


def finalize_gradients(model: list[torch.nn.Module], num_tokens: Tensor | None, **kwargs: Any) -> None:
    """Megatron's reductions over data-parallel, sequence-parallel and tied-embedding ranks, without its division."""
    del num_tokens
    finalize_model_grads(model, None, **kwargs)


def update(
    forward: Forward,
    ddp: DistributedDataParallel,
    optimizer: MegatronOptimizer,
    schedule: OptimizerParamScheduler,
    objective: StepObjective,
    batch: Batch,
) -> UpdateResult:
    """One optimizer step on the whole mini-batch, of which this rank computes its share. Every rank calls.

    ``batch`` carries advantages, old log-probs and old entropies. Raises RuntimeError if the gradient is not finite; the
    weights are then as they were.
    """
    context = objective.prepare(batch)

    def loss(scores: TokenScores, micro: Batch) -> tuple[Tensor, dict[str, Any]]:
        output = objective(scores, micro, context)
        value = output.numerator / output.denominator
        return value, {"loss": value.detach(), "metrics": output.metrics, "extrema": output.extrema}

    ddp.zero_grad_buffer()
    optimizer.zero_grad()
    kept = forward.run(ddp, batch, forward.micro_batches(batch), loss, train=True)
    with forward.platform.megatron():
        optimizer.prepare_grads()
        grad_norm = float(optimizer.get_grad_norm())
        if not math.isfinite(grad_norm):
            raise RuntimeError(
                f"the gradient norm is {grad_norm}; the weights were left as they were. Look at ratio/max and the log-probs "
                "of the last rows of metrics.jsonl, and lower optimizer.lr"
            )
        schedule.step(increment=1)
        optimizer.step()
    total, sums, extrema = _reduce(kept, forward)
    return UpdateResult(total, grad_norm, optimizer.param_groups[0]["lr"], sums, extrema)


def _reduce(
    kept: Sequence[Mapping[str, Any]], forward: Forward
) -> tuple[float, dict[str, tuple[float, float]], dict[str, float]]:
    """Adds up micro-batches and data-parallel ranks on the last stage, and tells every rank."""
    ranks, device = forward.ranks, forward.platform.device
    report: Any = None
    if ranks.is_last_stage:
        names = list(kept[0]["metrics"])
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
