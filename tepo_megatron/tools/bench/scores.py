"""Time and memory of log-prob and entropy over a sharded vocabulary, by method (``tepo bench scores``)."""

from __future__ import annotations

import functools
import os
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from types import ModuleType
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from tepo_megatron.core.scores import logprob_and_entropy
from tepo_megatron.core.scores.backend import Backend, BackendName, get_backend
from tepo_megatron.core.scores.shard import Gradients, Logits, RowScores, Scoring, combine
from tepo_megatron.tools.bench.divergences import (
    DIVERGENCES,
    FUSED,
    PEERS,
    PRODUCTS,
    TOP_K,
    Method,
    Outputs,
    part_of,
    teacher_methods,
    whole,
)
from tepo_megatron.tools.bench.step_rank import peak_bytes
from tepo_megatron.tools.results import Report, Table, in_processes

R = TypeVar("R")
_DENSE = "dense torch log_softmax"
MEGATRON = "Megatron-Core cross-entropy (log-prob only)"
_AREAL = "AReaL, both scores"
_VERL = "verl, both scores"
FLOOR = "floor: read, then read and write"
SLOPE = ", with the entropy's slope"  # suffix of methods that also give TokenScores.entropy_slope

DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"tp": 2, "tokens": "1024,4096", "vocab": "32000,128256", "dtype": "bf16,fp32"},
    "cuda": {"tp": 1, "tokens": "8192", "vocab": "16032,32064,64128,128256", "dtype": "bf16"},
}
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_CPU_COPY_BYTES = 2**28
_SCRATCH_BYTES = 2**30  # written before timing on a GPU: empties its cache
_AHEAD_CYCLES = 20_000_000  # then about 10 ms of waiting, in which the CPU launches everything


@dataclass(frozen=True)
class ScoreSetting:
    tp: int
    device: str
    repeats: int
    teacher: bool = False
    """Measure divergences from a teacher instead."""

    def run(self, tokens: int, vocab: int, dtype: str) -> list[ScoreMeasurement]:
        """Raises ValueError for an impossible setting."""
        if self.device == "cuda" and torch.cuda.device_count() < self.tp:
            gpus = torch.cuda.device_count()
            raise ValueError(f"--device cuda --tp {self.tp} needs {self.tp} GPUs, torch sees {gpus}; lower --tp")
        if self.device == "cuda":
            get_backend("triton", torch.device("cuda"))
        if dtype not in _DTYPES:
            raise ValueError(f"--dtype {dtype} is unknown; give bf16, fp32 or both")
        if vocab % self.tp:
            raise ValueError(f"--vocab {vocab} cannot be split into {self.tp} equal shards; give a multiple of --tp")
        backend = "gloo" if self.device == "cpu" else "nccl"
        return [ScoreMeasurement(**row) for row in in_processes(_measure, self.tp, self, tokens, vocab, dtype, backend=backend)]

    def report(self, results: Sequence[ScoreMeasurement]) -> Report:
        rows = [_cells(row, [peer for peer in results if peer.shape == row.shape]) for row in results]
        record: dict[str, Any] = {"arguments": asdict(self), "results": [asdict(row) for row in results]}
        note = f"best of {self.repeats}"
        if self.device == "cuda":
            record["gpu"] = torch.cuda.get_device_name()
            note = f"{record['gpu']} · {note}"
        name = "teacher" if self.teacher else "scores"
        return Report(f"{name}-{self.device}-tp{self.tp}", record, [Table.of(rows)], note)


@dataclass(frozen=True)
class ScoreMeasurement:
    tokens: int
    vocab: int
    dtype: str
    method: str
    forward_ms: float
    backward_ms: float
    peak_extra: float  # of peak memory beyond the logits, over one logits shard
    forward_collectives: int
    backward_collectives: int
    shard_bytes: int
    copy_gbps: float  # of a large copy in the same run, 1e9 bytes/s read and written

    @property
    def shape(self) -> str:
        return f"T {self.tokens}, V {self.vocab}, {self.dtype}"

    @property
    def total_ms(self) -> float:
        return self.forward_ms + self.backward_ms

    @property
    def gbps(self) -> tuple[float, float]:
        """Of one read forward, one read and write backward."""
        return self.shard_bytes / self.forward_ms / 1e6, 2 * self.shard_bytes / self.backward_ms / 1e6


def _measure(_: int, setting: ScoreSetting, tokens: int, vocab: int, dtype: str) -> list[dict[str, Any]]:
    warnings.simplefilter("ignore")  # Megatron's, about accelerators that are not measured here
    os.environ["KINETO_LOG_LEVEL"] = "99"
    from megatron.core import parallel_state

    tp, device, repeats = setting.tp, setting.device, setting.repeats
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    # There, since a CPU draws a billion numbers longer than a GPU takes for everything else.
    drawn: dict[str, Any] = {"generator": torch.Generator(device).manual_seed(0), "device": device}
    logits = (3 * torch.randn(tokens, vocab // tp, **drawn)).to(_DTYPES[dtype])
    labels = torch.randint(0, vocab, (tokens,), **drawn)
    gradients = torch.randn(2, tokens, **drawn)
    copy_gbps = _copy_gbps(repeats, device)
    chosen = {**teacher_methods(logits), FLOOR: _Floor.apply} if setting.teacher else methods(device, logits, labels)
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    if tokens * vocab * 4 * 5 * tp > free / 2:  # about five fp32 copies of the whole logits on each rank
        chosen.pop(_DENSE, None)
    rows: dict[str, dict[str, Any]] = {}
    for name, method in chosen.items():
        peak = _peak_extra(method, logits, labels, gradients)
        forward, backward = _count_collectives(method, logits, labels, gradients)
        rows[name] = {
            **{"tokens": tokens, "vocab": vocab, "dtype": dtype, "method": name},
            **{"forward_ms": float("inf"), "backward_ms": float("inf"), "peak_extra": round(peak / logits.nbytes, 3)},
            **{"forward_collectives": forward, "backward_collectives": backward},
            **{"shard_bytes": logits.nbytes, "copy_gbps": copy_gbps},
        }
    for _ in range(repeats):  # all methods in turn, so that a busy moment of the machine affects all of them
        for name, method in chosen.items():
            times = torch.tensor(_run(method, logits, labels, gradients), device=device)
            dist.all_reduce(times, op=dist.ReduceOp.MAX)
            forward_ms, backward_ms = (1e3 * times).tolist()
            if forward_ms + backward_ms < rows[name]["forward_ms"] + rows[name]["backward_ms"]:
                rows[name].update(forward_ms=round(forward_ms, 4), backward_ms=round(backward_ms, 4))
    return list(rows.values())


def _run(method: Method, logits: Tensor, labels: Tensor, gradients: Tensor) -> tuple[float, float]:
    leaf = logits.clone().requires_grad_()
    view = leaf.view_as(leaf)
    _settle(logits)
    outputs, forward = _timed(lambda: method(view, labels), logits.device)
    chosen = _of_outputs(gradients, outputs)
    _, backward = _timed(lambda: torch.autograd.backward(outputs, chosen), logits.device)
    return forward, backward


def _of_outputs(gradients: Tensor, outputs: Outputs) -> list[Tensor]:
    return [grad.to(out.dtype) for grad, out in zip(gradients, outputs, strict=False)]


def _timed(work: Callable[[], R], device: torch.device) -> tuple[R, float]:
    if device.type == "cpu":
        start = time.perf_counter()
        return work(), time.perf_counter() - start
    _scratch().zero_()
    torch.cuda._sleep(_AHEAD_CYCLES)
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    result = work()
    after.record()
    after.synchronize()
    return result, before.elapsed_time(after) / 1e3


@functools.cache
def _scratch() -> Tensor:
    return torch.empty(_SCRATCH_BYTES, dtype=torch.uint8, device="cuda")


def _copy_gbps(repeats: int, device: str) -> float:
    """On a CPU all ranks copy at once; the slowest counts."""
    source = torch.randint(0, 2**31, ((_SCRATCH_BYTES if device == "cuda" else _CPU_COPY_BYTES) // 8,), device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(max(repeats, 10)):
        _settle(source)
        seconds = torch.tensor(_timed(lambda: target.copy_(source), source.device)[1], device=device)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        best = min(best, float(seconds))
    return round(2 * source.nbytes / best / 1e9, 1)


def _settle(like: Tensor) -> None:
    if like.is_cuda:
        torch.cuda.synchronize()
    dist.barrier()


def _peak_extra(method: Method, logits: Tensor, labels: Tensor, gradients: Tensor) -> int:
    if not logits.is_cuda:
        return peak_bytes(lambda: _run(method, logits, labels, gradients)) - logits.nbytes
    _scratch()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    _run(method, logits, labels, gradients)
    return torch.cuda.max_memory_allocated() - before - logits.nbytes


def _count_collectives(method: Method, logits: Tensor, labels: Tensor, gradients: Tensor) -> tuple[int, int]:
    names = [name for name in dir(dist) if name.startswith(("all_", "reduce_scatter", "broadcast"))]
    with ExitStack() as stack:
        collectives = [stack.enter_context(mock.patch.object(dist, name, wraps=getattr(dist, name))) for name in names]
        outputs = method((leaf := logits.clone().requires_grad_()).view_as(leaf), labels)
        forward = sum(collective.call_count for collective in collectives)
        torch.autograd.backward(outputs, _of_outputs(gradients, outputs))
        return forward, sum(collective.call_count for collective in collectives) - forward


def _cells(row: ScoreMeasurement, peers: Sequence[ScoreMeasurement]) -> dict[str, str]:
    def times(*names: str, more: float = 0) -> str:
        reference = min((peer.total_ms + more for peer in peers if peer.method in names), default=None)
        return "–" if reference is None else f"{row.total_ms / reference:.2f}"

    def ms(value: float) -> str:
        return f"{value:.1f}" if value >= 10 else f"{value:.3f}"

    *_, kind = row.method.split(", ")
    rivals = [f"{peer}, {kind}" for peer in PEERS] if kind in (*DIVERGENCES, TOP_K) else [_AREAL, _VERL]
    products = sum(peer.total_ms for peer in peers if peer.method == PRODUCTS and row.method.startswith(FUSED))
    return {
        "shape": row.shape if row is peers[0] else "",
        "method": row.method,
        "forward ms": ms(row.forward_ms),
        "backward ms": ms(row.backward_ms),
        "total ms": ms(row.total_ms),
        "× Megatron": times(MEGATRON),
        "× best peer": times(*rivals, more=products),
        "× floor": times(FLOOR),
        "× without slope": times(row.method.removesuffix(SLOPE)) if row.method.endswith(SLOPE) else "",
        "peak extra": f"{row.peak_extra:.3f}",
        "collectives": f"{row.forward_collectives} + {row.backward_collectives}",
        "GB/s forward / backward": " / ".join(f"{x:.0f}" if x >= 10 else f"{x:.1f}" for x in row.gbps),
        "of a copy's": " / ".join(f"{x / row.copy_gbps:.0%}" for x in row.gbps),
    }


def methods(device: str, logits: Tensor, labels: Tensor) -> dict[str, Method]:
    if device == "cpu":
        result: dict[str, Method] = {
            "tepo_megatron": partial(_ours, backend="torch"),
            **_with_and_without_slope("tepo_megatron, in place", "torch"),
            **_with_and_without_slope("tepo_megatron, in place, C++", "cpp"),
        }
    else:
        result = {
            "tepo_megatron, torch": partial(_ours, backend="torch"),
            "tepo_megatron, torch, in place": partial(_ours, backend="torch", inplace_backward=True),
            "tepo_megatron, Triton": partial(_ours, backend="triton"),
            **_with_and_without_slope("tepo_megatron, Triton, in place", "triton"),
            "Triton's kernels alone, in place": _kernels(logits, labels),
            "Triton's kernels alone, in place" + SLOPE: _kernels(logits, labels, entropy_slope=True),
        }
    if areal := part_of("areal/utils/functional/vocab_parallel.py", "_VocabParallelLogProbsEntropy"):
        result[_AREAL] = lambda logits, labels: areal._VocabParallelLogProbsEntropy.apply(logits, labels, dist.group.WORLD)
    of_verl = ("_VocabParallelEntropy", "vocab_parallel_entropy", "vocab_parallel_log_probs_from_logits")
    if verl := part_of("verl/utils/megatron/tensor_parallel.py", *of_verl):
        result[_VERL] = partial(_verl, verl)
    return {**result, MEGATRON: _megatron, _DENSE: _dense, FLOOR: _Floor.apply}


def _with_and_without_slope(name: str, backend: BackendName) -> dict[str, Method]:
    options: dict[str, Any] = {"backend": backend, "inplace_backward": True}
    return {name: partial(_ours, **options), name + SLOPE: partial(_ours, entropy_slope=True, **options)}


def _ours(logits: Tensor, labels: Tensor, **options: Any) -> Outputs:
    scores = logprob_and_entropy(logits, labels, tp_group=dist.group.WORLD, **options)
    return scores.logprob, scores.entropy


def _kernels(logits: Tensor, labels: Tensor, *, entropy_slope: bool = False) -> Method:
    group, backend = dist.group.WORLD, get_backend("triton", logits.device)
    tokens, width = logits.shape
    options: dict[str, Any] = {"temperature": 1.0, "vocab_size": None, "mask_T": None, "entropy_slope": entropy_slope}
    scoring = Scoring.plan(labels, tokens=tokens, width=width, tp_group=group, **options)
    stats = torch.empty(tokens, scoring.statistics, device=logits.device)
    backend.statistics(Logits(logits), scoring, stats)
    scores, _ = combine(scoring.gather(stats), scoring)
    return lambda logits, labels: _Kernels.apply(logits, scoring, scores, backend)


class _Kernels(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, scoring: Scoring, scores: RowScores, backend: Backend) -> Outputs:
        stats = torch.empty(logits.shape[0], scoring.statistics, device=logits.device)
        backend.statistics(Logits(logits), scoring, stats)
        ctx.scoring, ctx.scores, ctx.backend = scoring, scores, backend
        ctx.save_for_backward(logits)
        return stats[:, 1], stats[:, 2]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (logits,) = ctx.saved_tensors
        ctx.backend.gradient(Logits(logits), ctx.scoring, ctx.scores, Gradients(*gradients), logits.detach())
        return logits.detach(), None, None, None


def _megatron(logits: Tensor, labels: Tensor) -> Outputs:
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    return (vocab_parallel_cross_entropy(logits.unsqueeze(1), labels.unsqueeze(1)).squeeze(1),)


def _dense(logits: Tensor, labels: Tensor) -> Outputs:
    logprob = whole(logits).log_softmax(-1, dtype=torch.float32)
    return logprob.gather(1, labels.unsqueeze(1)).squeeze(1), -(logprob.exp() * logprob).sum(-1)


class _Floor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Outputs:
        ctx.save_for_backward(logits)
        return (logits.view(torch.int64).sum(1).float() * 0,)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (logits,) = ctx.saved_tensors
        logits.detach().view(torch.int64).bitwise_xor_(1)
        return logits.detach(), None


def _verl(module: ModuleType, logits: Tensor, labels: Tensor) -> Outputs:
    """Copies, since Megatron's cross-entropy overwrites its input."""
    retained = logits.clone()
    entropy = module.vocab_parallel_entropy(logits)
    logprob = module.vocab_parallel_log_probs_from_logits(retained.unsqueeze(1), labels.unsqueeze(1)).squeeze(1)
    return logprob, entropy
