"""Makes one optimizer step. Only this file scales losses and gradients.

Megatron does not divide; the objective's numerator is divided here, once, by the mini-batch's denominator.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from tepo_megatron.config.objective.choices import ClipRange
from tepo_megatron.core.types import Batch, ObjectiveOutput, TokenScores
from tepo_megatron.errors import NotFiniteError
from tepo_megatron.trainer.megatron.forward import NOT_FINITE, Forward, MicroBatches
from tepo_megatron.trainer.megatron.parallel.collectives import broadcast_json
from tepo_megatron.trainer.megatron.parallel.platform import Ranks
from tepo_megatron.trainer.megatron.policy import Policy
from tepo_megatron.trainer.megatron.policy.checkpoints import Counters
from tepo_megatron.trainer.protocol import UpdateResult


class StepObjective(Protocol):
    @property
    def needs_reference(self) -> bool: ...
    @property
    def needs_entropy_slope(self) -> bool: ...
    def advantages(self, batch: Batch) -> Tensor: ...
    def prepare(self, batch: Batch, *, entropy_noise: float, clip_range: ClipRange | None) -> Any: ...
    def __call__(self, scores: TokenScores, batch: Batch, context: Any) -> ObjectiveOutput: ...


def update(forward: Forward, policy: Policy, objective: StepObjective, batch: Batch, counters: Counters) -> UpdateResult:
    """Every rank calls. If any loss, gradient or norm is not finite, no rank steps."""
    optimizer = policy.optimizer
    try:
        context = objective.prepare(batch, entropy_noise=counters.entropy_noise, clip_range=counters.clip_range)
    except NotFiniteError as error:  # every rank has the whole mini-batch, so all raise
        return UpdateResult(math.nan, math.nan, optimizer.param_groups[0]["lr"], {}, {}, skipped=str(error))

    def loss(scores: TokenScores, micro: Batch) -> tuple[Tensor, dict[str, Any]]:
        output = objective(scores, micro, context)
        value = output.numerator / output.denominator  # of the whole mini-batch, on every rank and micro-batch the same
        values = {"loss": value.detach(), "metrics": output.metrics, "extrema": output.extrema, "moves": output.moves}
        return value, values | _keep_recorded(output, micro)

    for ddp in policy.ddp:
        ddp.zero_grad_buffer()
    optimizer.zero_grad()
    biases = {name: bias.clone() for name, bias in policy.expert_biases.items()}
    micro_batches = forward.micro_batches(batch)
    results = forward.run(policy.ddp, batch, micro_batches, loss, train=True)
    with forward.platform.megatron():
        # The norm is computed before step(), which would scale by it: a NaN must not reach the weights.
        optimizer.prepare_grads()
        grad_norm = float(optimizer.get_grad_norm())
        reports = _find_not_finite(forward.ranks, policy, results, grad_norm, forward.platform.device)
        if reports:  # neither optimizer nor schedule steps, as in Megatron's own loop after an overflow
            for name, bias in policy.expert_biases.items():  # Megatron moved them with the gradients' reduction
                bias.copy_(biases[name])
            cause, lr = _first_cause(reports, grad_norm), optimizer.param_groups[0]["lr"]
            return UpdateResult(math.nan, grad_norm, lr, {}, {}, skipped=cause, not_finite=reports)
        policy.schedule.step(increment=1)
        optimizer.step()
        policy.gather_pending = policy.overlaps_gather
    total, sums, extrema, moves = _reduce(results, forward)
    recorded = _gather_recorded(forward, batch, micro_batches, results)
    return UpdateResult(total, grad_norm, optimizer.param_groups[0]["lr"], sums, extrema, token_values=recorded, moves=moves)


def _reduce(
    results: Sequence[Mapping[str, Any]], forward: Forward
) -> tuple[float, dict[str, tuple[float, float]], dict[str, float], Tensor | None]:
    ranks, device = forward.ranks, forward.platform.device
    report: Any = None
    if ranks.is_last_stage:
        names = list(results[0]["metrics"])
        # (sum, count) pairs; the loss is put in twice. Tensor- and context-parallel ranks agree already.
        pairs = [pair for micro in results for pair in [(micro["loss"], micro["loss"]), *micro["metrics"].values()]]
        values = torch.stack(
            [torch.stack([torch.as_tensor(x, dtype=torch.float64, device=device) for x in pair]) for pair in pairs]
        )
        values = values.view(len(results), 1 + len(names), 2).sum(0)
        group = parallel_state.get_data_parallel_group()
        dist.all_reduce(values, group=group)
        moves = None
        if results[0]["moves"] is not None:
            moves = torch.stack([micro["moves"] for micro in results]).sum(0).to(device)
            dist.all_reduce(moves, group=group)
        extrema = {}
        for name in results[0]["extrema"]:
            local = torch.stack([torch.as_tensor(micro["extrema"][name], device=device) for micro in results])
            value, op = (local.max(), dist.ReduceOp.MAX) if name.endswith("/max") else (local.min(), dist.ReduceOp.MIN)
            dist.all_reduce(value, op=op, group=group)
            extrema[name] = float(value)
        sums = dict(zip(names, values[1:].tolist(), strict=True))
        report = [float(values[0, 0]), sums, extrema, None if moves is None else moves.tolist()]
    last_stage = ranks.tp * ranks.cp * ranks.dp * (ranks.pp - 1)  # its first rank
    total, sums, extrema, counts = broadcast_json(report, source=last_stage, device=device)
    sums = {name: (pair[0], pair[1]) for name, pair in sums.items()}
    return total, sums, extrema, None if counts is None else torch.tensor(counts)


_MOST_NAMES = 8  # a NaN spreads: the first few parameters and ranks are enough

_RankReport = dict[str, Any]
"""``place``: coordinates; ``micro_batches``: why they have no loss; ``losses``: non-finite indices; ``gradients``: parameters'
names; ``more_gradients``: number of further ones.
"""


def _find_not_finite(
    ranks: Ranks, policy: Policy, results: Sequence[Mapping[str, Any]], grad_norm: float, device: torch.device
) -> list[_RankReport]:
    """Every rank calls. The norm omits copies on other tensor-parallel ranks, so gradients are checked too."""
    flags = torch.zeros(ranks.world, dtype=torch.int32, device=device)
    flags[ranks.rank] = not (math.isfinite(grad_norm) and _is_finite(policy, results))
    dist.all_reduce(flags)
    bad = flags.nonzero().flatten().tolist()[:_MOST_NAMES]
    details = _details(ranks, policy, results) if ranks.rank in bad else None
    return [broadcast_json(details, source=rank, device=device) for rank in bad]


def _is_finite(policy: Policy, results: Sequence[Mapping[str, Any]]) -> bool:
    if any(NOT_FINITE in micro for micro in results):
        return False
    # the largest magnitude carries a NaN along, without a copy of the gradients
    held = [buffer.grad_data for ddp in policy.ddp for buffer in (*ddp.buffers, *ddp.expert_parallel_buffers)]
    numbers = [torch.linalg.vector_norm(grads, math.inf) for grads in held if grads.numel()]
    numbers += [torch.as_tensor(micro["loss"]) for micro in results]
    return not numbers or bool(torch.stack([number.double() for number in numbers]).isfinite().all())


def _first_cause(reports: Sequence[_RankReport], grad_norm: float) -> str:
    for kind in ("micro_batches", "losses", "gradients"):
        for report in (report for report in reports if report[kind]):
            first, where = report[kind][0], f"rank {report['rank']} ({report['place']})"
            if kind == "micro_batches":
                return f"{where}: {first}"
            if kind == "losses":
                return f"{where}: the loss of micro-batch {first} is not finite"
            more = len(report["gradients"]) - 1 + report["more_gradients"]
            return f"{where}: the gradient of {first}" + (f" and of {more} more parameters" if more else "") + " is not finite"
    return f"the gradient norm is {grad_norm}, although every gradient is finite"


def _details(ranks: Ranks, policy: Policy, results: Sequence[Mapping[str, Any]]) -> _RankReport:
    trained = policy.trained.items()
    names = [name for name, param in trained if not param.main_grad.isfinite().all()]  # type: ignore[attr-defined]
    place = {"tp": ranks.tp_rank, "pp": ranks.pp_rank, "cp": ranks.cp_rank, "dp": ranks.dp_rank}
    if ranks.cp == 1:
        del place["cp"]
    return {
        "rank": ranks.rank,
        "place": ", ".join(f"{name} {index}" for name, index in place.items()),
        "micro_batches": [micro[NOT_FINITE] for micro in results if NOT_FINITE in micro],
        "losses": [
            index for index, micro in enumerate(results) if NOT_FINITE not in micro and not math.isfinite(float(micro["loss"]))
        ],
        "gradients": names[:_MOST_NAMES],
        "more_gradients": max(0, len(names) - _MOST_NAMES),
    }


# stages without a loss need them too
_TOKEN_VALUES = ("logprob_update", "entropy_change", "advantage", "ratio", "divergence", "masked")

_KEPT = "token_values"


def _keep_recorded(output: ObjectiveOutput, micro: Batch) -> dict[str, Tensor]:
    if micro.recorded_S is None:
        return {}
    nothing_T = torch.full_like(micro.sampler_logprobs_T, torch.nan)
    return {_KEPT: torch.stack([output.token_values.get(name, nothing_T).float() for name in _TOKEN_VALUES])}


def _gather_recorded(
    forward: Forward, batch: Batch, micro_batches: MicroBatches, results: Sequence[Mapping[str, Any]]
) -> dict[str, Tensor]:
    if batch.recorded_S is None:
        return {}
    offsets = batch.cu_seqlens.tolist()
    places = [batch.token_index(sequences, offsets) for sequences in micro_batches]
    rows = forward.on_every_rank(places, [micro[_KEPT] for micro in results], (len(_TOKEN_VALUES), batch.num_tokens))
    values = dict(zip(_TOKEN_VALUES, rows[:, (batch.recorded_S >= 0)[batch.sequence_index_T]], strict=True))
    return {**values, "masked": values["masked"] == 1}
