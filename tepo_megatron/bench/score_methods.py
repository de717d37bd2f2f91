"""The methods that ``tepo bench scores`` compares, and the process of one tensor-parallel rank that measures them."""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tepo_megatron.vocab_parallel import logprob_and_entropy

Outputs = tuple[Tensor, ...]
Method = Callable[[Tensor, Tensor], Outputs]
"""Logits shard [T, V/p] and labels [T] to the outputs [T] that a backward starts from."""


def worker(
    rank: int, tp: int, port: int, device: str, shapes: Sequence[tuple[int, int, str]], repeats: int, inbox: Any
) -> None:
    """One rank; rank 0 puts the measurements into ``inbox`` as JSON."""
    warnings.simplefilter("ignore")  # Megatron's, about accelerators that are not measured here
    os.environ["KINETO_LOG_LEVEL"] = "99"
    if device == "cpu":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform.startswith("linux") else "lo0"
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(rank)
    store = TCPStore("127.0.0.1", port, tp + 1, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo" if device == "cpu" else "nccl", store=store, rank=rank, world_size=tp)
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    rows = [row for shape in shapes for row in _measure_shape(shape, tp, device, repeats)]
    if rank == 0:
        inbox.put(json.dumps(rows))
    dist.destroy_process_group()


def _methods() -> dict[str, Method]:
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    group = dist.group.WORLD

    def own(logits: Tensor, labels: Tensor, **options: Any) -> Outputs:
        scores = logprob_and_entropy(logits, labels, tp_group=group, **options)
        return scores.logprob, scores.entropy

    def megatron(logits: Tensor, labels: Tensor) -> Outputs:
        return (vocab_parallel_cross_entropy(logits.unsqueeze(1), labels.unsqueeze(1)).squeeze(1),)

    return {
        "tepo_megatron": own,
        "tepo_megatron, in place": lambda logits, labels: own(logits, labels, inplace_backward=True),
        "tepo_megatron, in place, C++": lambda logits, labels: own(logits, labels, inplace_backward=True, backend="cpp"),
        "Megatron-Core cross-entropy (log-prob only)": megatron,
        "dense torch log_softmax": _dense,
        "floor: read, then read and write": _Floor.apply,
    }


def _dense(logits: Tensor, labels: Tensor) -> Outputs:
    """Gathers the whole vocabulary on every rank."""
    whole = torch.cat(list(_GatherColumns.apply(logits)), 1)
    logprob = whole.log_softmax(-1, dtype=torch.float32)
    return logprob.gather(1, labels.unsqueeze(1)).squeeze(1), -(logprob.exp() * logprob).sum(-1)


class _GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Outputs:
        ctx.rank = dist.get_rank()
        shards = [torch.empty_like(logits) for _ in range(dist.get_world_size())]
        dist.all_gather(shards, logits.contiguous())
        return tuple(shards)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[ctx.rank]  # every rank computes the whole loss, so its own columns' gradient is complete


class _Floor(torch.autograd.Function):
    """No mathematics: the memory traffic that any method has."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Outputs:
        ctx.save_for_backward(logits)
        return (logits.view(torch.int64).sum(1).float() * 0,)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (logits,) = ctx.saved_tensors
        logits.detach().view(torch.int64).bitwise_xor_(1)
        return logits.detach(), None


def _measure_shape(shape: tuple[int, int, str], tp: int, device: str, repeats: int) -> list[dict[str, Any]]:
    tokens, vocab, dtype = shape
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(tokens, vocab // tp, generator=generator)).to(
        {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    )
    labels = torch.randint(0, vocab, (tokens,), generator=generator).to(device)
    gradients = torch.randn(2, tokens, generator=generator).to(device)
    logits = logits.to(device)
    methods = _methods()
    if device == "cuda":
        del methods["tepo_megatron, in place, C++"]
    if tokens * vocab * 4 * 5 * tp > _memory(device) / 2:  # about five fp32 copies of the whole logits on each rank
        del methods["dense torch log_softmax"]
    rows: dict[str, dict[str, Any]] = {}
    for name, method in methods.items():
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
        }
    for _ in range(repeats):  # all methods in turn, so that a busy moment of the machine does not hit one alone
        for name, method in methods.items():
            times = torch.tensor(_time(method, logits, labels, gradients), device=device)
            dist.all_reduce(times, op=dist.ReduceOp.MAX)
            forward_ms, backward_ms = (1e3 * times).tolist()
            if forward_ms + backward_ms < rows[name]["forward_ms"] + rows[name]["backward_ms"]:
                rows[name].update(forward_ms=round(forward_ms, 2), backward_ms=round(backward_ms, 2))
    return list(rows.values())


def _run(method: Method, logits: Tensor, labels: Tensor, gradients: Tensor) -> tuple[float, float, float]:
    """Forward and backward on a copy that may be overwritten; the moments of start, middle and end."""
    leaf = logits.clone().requires_grad_()
    given = leaf.view_as(leaf)
    _settle(logits)
    start = time.perf_counter()
    outputs = method(given, labels)
    _settle(logits, barrier=False)
    middle = time.perf_counter()
    torch.autograd.backward(outputs, [grad.to(out.dtype) for grad, out in zip(gradients, outputs, strict=False)])
    _settle(logits, barrier=False)
    return start, middle, time.perf_counter()


def _settle(like: Tensor, *, barrier: bool = True) -> None:
    if like.is_cuda:
        torch.cuda.synchronize()
    if barrier:
        dist.barrier()


def _time(method: Method, logits: Tensor, labels: Tensor, gradients: Tensor) -> tuple[float, float]:
    start, middle, end = _run(method, logits, labels, gradients)
    return middle - start, end - middle


def _peak_extra(method: Method, logits: Tensor, labels: Tensor, gradients: Tensor) -> int:
    """Bytes held beyond the logits, at most."""
    copy = logits.numel() * logits.element_size()
    if logits.is_cuda:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        _run(method, logits, labels, gradients)
        return torch.cuda.max_memory_allocated() - before - copy
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        _run(method, logits, labels, gradients)
    held, peak = 0, 0
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak - copy


def _count_collectives(method: Method, logits: Tensor, labels: Tensor, gradients: Tensor) -> tuple[int, int]:
    """How many collectives a forward and a backward start."""
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
        torch.autograd.backward(outputs, [grad.to(out.dtype) for grad, out in zip(gradients, outputs, strict=False)])
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    return forward, count - forward


def _memory(device: str) -> int:
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
