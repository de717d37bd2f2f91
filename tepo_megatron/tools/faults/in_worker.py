"""Spoils weights in a vLLM worker before the layer processes them (``--worker-extension-cls``)."""

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_KEPT: dict[str, Tensor] = {}


class FaultyWorker:
    def tepo_fault(self, raw: str) -> str:
        """``raw``: JSON with kind, param and scale, in effect from the next update; kind ``none`` stops it."""
        fault = json.loads(raw)
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        rank = int(self.rank)  # type: ignore[attr-defined]
        _restore(runner)
        _spoil_loader(fault, rank)
        kind, scale = fault["kind"], float(fault["scale"])
        if kind == "noise":
            _round_by_batch(runner.model)
        elif kind == "temperature":
            _wrong_temperature(runner.sampler, scale)
        elif kind in ("buffer lost", "rotary base"):
            for module in runner.model.modules():
                if hasattr(module, "cos_sin_cache"):
                    _spoil_rotary(module, kind, scale)
        return "done"


def _restore(runner: Any) -> None:
    runner.sampler.__dict__.pop("apply_temperature", None)
    runner.model.__dict__.pop("compute_logits", None)
    for module in runner.model.modules():
        if (retained := module.__dict__.pop("_tepo_right", None)) is not None:
            module.base = retained[0]
            module.cos_sin_cache.copy_(retained[1])


def _round_by_batch(model: Any) -> None:
    """A GPU's kernels depend on the shape of the batch: logits differ by up to one unit of bfloat16's last place."""
    right = model.compute_logits

    def compute_logits(hidden: Tensor, *rest: Any) -> Tensor:
        logits = right(hidden, *rest)
        rows, columns = (torch.arange(size) for size in logits.shape)
        mixed = (rows[:, None] * 7919 + columns * 104729 + len(rows) * 1299709) * 2654435761
        return (logits.float() * (1 + ((mixed >> 16) % 3 - 1) * 0.004)).to(logits.dtype)

    model.__dict__["compute_logits"] = compute_logits


def _wrong_temperature(sampler: Any, scale: float) -> None:
    right = sampler.apply_temperature

    def apply_temperature(logits: Tensor, temperature: Tensor, *rest: Any) -> Tensor:
        return right(logits, temperature * (1 + scale), *rest)

    sampler.__dict__["apply_temperature"] = apply_temperature


def _spoil_rotary(module: Any, kind: str, scale: float) -> None:
    if "_tepo_right" in module.__dict__:
        return
    module.__dict__["_tepo_right"] = (module.base, module.cos_sin_cache.clone())
    if kind == "buffer lost":
        module.cos_sin_cache.mul_(1 - scale)
    else:
        module.base = module.base * (1 + scale)
        module.cos_sin_cache.copy_(module._compute_cos_sin_cache().to(module.cos_sin_cache.dtype))


def _spoil_loader(fault: dict[str, Any], rank: int) -> None:
    from tepo_megatron.sampler.vllm.plugin.engine import ShardLoader

    right: Callable[[Any, str], None] = getattr(ShardLoader, "_tepo_load", ShardLoader._load)

    def load(self: Any, name: str) -> None:
        first, *others = self._places[name]
        live = getattr(*first).data
        arrived = live.clone()
        stale = _KEPT.get(name, arrived)
        if fault["kind"] == "stale head" and others:
            self._places[name] = [first]
            right(self, name)
            # The head shares the embedding's parameter and processes it separately.
            self._places[name] = others
            self._materialized.discard(name)
            self[name].copy_(_towards(arrived, stale, fault["scale"]))
            right(self, name)
            self._places[name] = [first, *others]
        else:
            if fault["param"] in name:
                live.copy_(_towards(arrived, _wrong(fault["kind"], rank, arrived, stale), fault["scale"]))
            right(self, name)
        if not fault["kind"].startswith("stale"):
            _KEPT[name] = arrived

    ShardLoader._tepo_load = right  # type: ignore[attr-defined]
    ShardLoader._load = load  # type: ignore[method-assign]


def _wrong(kind: str, rank: int, arrived: Tensor, stale: Tensor) -> Tensor:
    rows = arrived.shape[0]
    head = rows // 8  # a head of the built-in model, with keys and values
    if kind in ("stale", "one behind", "no label") or (kind == "stale in worker 1" and rank == 1):
        return stale
    match kind:
        case "swap halves":
            return arrived.roll(rows // 2, 0)
        case "swap halves of an expert":
            return torch.cat([arrived[:1].roll(arrived.shape[1] // 2, 1), arrived[1:]])
        case "transpose":
            return arrived.T.contiguous()
        case "exchange heads":
            return torch.cat([arrived[head : 2 * head], arrived[:head], arrived[2 * head :]])
        case "zero":
            return torch.zeros_like(arrived)
        case "stale rows":
            return torch.cat([arrived[: rows * 3 // 4], stale[rows * 3 // 4 :]])
    return arrived


def _towards(right: Tensor, wrong: Tensor, scale: float) -> Tensor:
    return wrong if scale == 1 else (right.float() + scale * (wrong.float() - right.float())).to(right.dtype)
