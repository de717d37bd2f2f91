"""The processes of ``tepo bench scores``: each tensor-parallel rank measures the methods in turn."""

from __future__ import annotations

import functools
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tepo_megatron.tools.bench.scores.methods import methods
from tepo_megatron.tools.bench.scores.peers import Method, Outputs
from tepo_megatron.tools.bench.settings import DENSE
from tepo_megatron.tools.bench.step.step_rank import peak_bytes
from tepo_megatron.weights.transfer.transport import connect

R = TypeVar("R")
HOST, TIMEOUT_S = "127.0.0.1", 120.0
_CPU_COPY_BYTES = 2**28
_SCRATCH_BYTES = 2**30
"""Bytes written before timing on a GPU: this empties its cache, and lets the CPU launch kernels ahead."""


def worker(
    rank: int, tp: int, place: str, device: str, shapes: Sequence[tuple[int, int, str]], repeats: int, inbox: Any
) -> None:
    warnings.simplefilter("ignore")  # Megatron's, about accelerators that are not measured here
    os.environ["KINETO_LOG_LEVEL"] = "99"
    if device == "cpu":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform.startswith("linux") else "lo0"
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(rank)
    store = connect(HOST, place, TIMEOUT_S)
    dist.init_process_group("gloo" if device == "cpu" else "nccl", store=store, rank=rank, world_size=tp)
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    rows = [row for shape in shapes for row in _measure_shape(shape, tp, device, repeats)]
    if rank == 0:
        inbox.put(json.dumps(rows))
    dist.destroy_process_group()


def _measure_shape(shape: tuple[int, int, str], tp: int, device: str, repeats: int) -> list[dict[str, Any]]:
    tokens, vocab, dtype = shape
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(tokens, vocab // tp, generator=generator)).to(
        {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    )
    labels = torch.randint(0, vocab, (tokens,), generator=generator).to(device)
    gradients = torch.randn(2, tokens, generator=generator).to(device)
    logits = logits.to(device)
    copy_gbps = _copy_gbps(repeats, device)
    chosen = methods(device, logits, labels)
    if tokens * vocab * 4 * 5 * tp > _memory(device) / 2:  # about five fp32 copies of the whole logits on each rank
        del chosen[DENSE]
    rows: dict[str, dict[str, Any]] = {}
    for name, method in chosen.items():
        peak = _peak_extra(method, logits, labels, gradients)
        forward, backward = _count_collectives(method, logits, labels, gradients)
        rows[name] = {
            "tokens": tokens,
            "vocab": vocab,
            "dtype": dtype,
            "method": name,
            "forward_ms": float("inf"),
            "backward_ms": float("inf"),
            "peak_extra": round(peak / (logits.numel() * logits.element_size()), 3),
            "forward_collectives": forward,
            "backward_collectives": backward,
            "shard_bytes": logits.numel() * logits.element_size(),
            "copy_gbps": copy_gbps,
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
    given = leaf.view_as(leaf)
    _settle(logits)
    outputs, forward = _timed(lambda: method(given, labels), logits.device)
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
    """Best bandwidth of a large copy, 10⁹ bytes/s read and written, of at least 10 repeats. On a CPU all ranks copy at once,
    as they compute at once, and the slowest counts."""
    source = torch.randint(0, 2**31, ((_SCRATCH_BYTES if device == "cuda" else _CPU_COPY_BYTES) // 8,), device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(max(repeats, 10)):
        _settle(source)
        seconds = torch.tensor(_timed(lambda: target.copy_(source), source.device)[1], device=device)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        best = min(best, float(seconds))
    return round(2 * source.numel() * source.element_size() / best / 1e9, 1)


def _settle(like: Tensor) -> None:
    if like.is_cuda:
        torch.cuda.synchronize()
    dist.barrier()


def _peak_extra(method: Method, logits: Tensor, labels: Tensor, gradients: Tensor) -> int:
    copy = logits.numel() * logits.element_size()
    if logits.is_cuda:
        _scratch()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        _run(method, logits, labels, gradients)
        return torch.cuda.max_memory_allocated() - before - copy
    return peak_bytes(lambda: _run(method, logits, labels, gradients)) - copy


def _count_collectives(method: Method, logits: Tensor, labels: Tensor, gradients: Tensor) -> tuple[int, int]:
    originals = {name: getattr(dist, name) for name in dir(dist) if name.startswith(("all_", "reduce_scatter", "broadcast"))}
    count = 0

    def counting(original: Callable[..., Any]) -> Callable[..., Any]:
        def collective(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            return original(*args, **kwargs)

        return collective

    for name, original in originals.items():
        setattr(dist, name, counting(original))
    try:
        outputs = method((given := logits.clone().requires_grad_()).view_as(given), labels)
        forward = count
        torch.autograd.backward(outputs, _of_outputs(gradients, outputs))
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    return forward, count - forward


def _memory(device: str) -> int:
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
