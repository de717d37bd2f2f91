"""Reads and writes Adam's states as flat ranges of parameters, for any optimizer.

Adam's groups have the fp32 master; or the weight, with its master or 16 remaining bits in Adam (precision-aware), or a copy in
another Adam on the host (hybrid).
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
)
from torch import Tensor

STATES = ("master", "exp_avg", "exp_avg_sq")

_TIE = 0x8000  # last 17 bits of an fp32 number halfway between an even and the next odd bfloat16 number


class OptimizerStates:
    def __init__(self, optimizer: MegatronOptimizer) -> None:
        chained = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
        # without those that have nothing to train: the dense weights', if adapters are on experts only
        self.inner = [inner for inner in chained if inner.optimizer is not None]
        self.distributed = isinstance(self.inner[0], DistributedOptimizer)

    @staticmethod
    def is_parallel_expert(param: torch.nn.Parameter) -> bool:
        return not getattr(param, "allreduce", True)

    def range_of(self, param: torch.nn.Parameter) -> slice:
        return self._held(param)[2]

    def collect(self, params: Mapping[str, torch.nn.Parameter]) -> Iterator[tuple[str, str, Tensor]]:
        """Yields (parameter, state, fp32 [local elements])."""
        for name, param in params.items():
            adam, main, local = self._held(param)
            if local.start != local.stop:
                for state in STATES:
                    yield name, state, _read(adam, main, state)

    def restore(self, param: torch.nn.Parameter, values: dict[str, Tensor], *, updates: int) -> None:
        """Call `Policy.spread` afterwards. ``values`` are fp32 [local elements]."""
        adam, main, local = self._held(param)
        if local.start != local.stop:
            _write(adam, main, values, updates=updates)
        for inner in _sub_optimizers(adam):
            if not _counts_per_tensor(inner):
                for group in inner.param_groups:
                    group["step"] = updates

    def copy_masters(self) -> None:
        """Copies them to where a gather reads: into parameters, or for MXFP8 beside them."""
        for inner in self.inner:
            if isinstance(inner, FP32Optimizer):  # its masters are the parameters
                continue
            if inner.config.reuse_grad_buf_for_mxfp8_param_ag:
                inner._copy_main_params_to_param_buffer()
            else:
                inner._copy_main_params_to_model_params()

    def set_master(self, param: torch.nn.Parameter, value: Tensor) -> None:
        _, main, local = self._held(param)
        if local.stop > local.start:
            with torch.no_grad():
                main.view(-1).copy_(value.reshape(-1)[local])

    @staticmethod
    def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
        """Splits fp32 into bfloat16 weights and int16 remainders, as Transformer Engine's Adam.

        At a tie the kernel rounds up; the remainder is that of the next fp32 number towards zero.
        """
        bits = master.contiguous().view(torch.int32)
        bits = torch.where((bits & 0x1FFFF) == _TIE, bits - 1, bits)
        low = (bits & 0xFFFF).to(torch.int16)
        high = (bits >> 16) + (low < 0)
        return high.to(torch.int16).view(torch.bfloat16), low

    @staticmethod
    def join_master(weight: Tensor, low: Tensor) -> Tensor:
        """Returns the next fp32 number if the kernel rounded a tie up."""
        high = weight.contiguous().view(torch.int16).to(torch.int32) - (low < 0).to(torch.int32)
        bits = (high << 16) | (low.to(torch.int32) & 0xFFFF)
        return torch.where((bits & 0x1FFFF) == _TIE, bits + 1, bits).view(torch.float32)

    def _held(self, param: torch.nn.Parameter) -> tuple[Any, Tensor, slice]:
        # Megatron chains an optimizer for dense weights and, under expert parallelism, another.
        optimizer = self.inner[self.is_parallel_expert(param) if len(self.inner) > 1 else 0]
        if isinstance(optimizer, DistributedOptimizer):
            if param not in optimizer.model_param_group_index_map:
                return optimizer.optimizer, param.new_zeros(0, dtype=torch.float32), slice(0, 0)
            group, order = optimizer.model_param_group_index_map[param]
            local = optimizer._get_model_param_range_map(param)["param"]
            main = optimizer.optimizer.param_groups[group]["params"][order]
            return optimizer.optimizer, main, slice(local.start, local.end)
        main = param
        if isinstance(optimizer, Float16OptimizerWithFloat16Params):
            main = getattr(param, "main_param")  # noqa: B009 (Megatron hangs it there)
        else:
            assert isinstance(optimizer, FP32Optimizer)
        return optimizer.optimizer, main, slice(0, param.numel())


def _read(adam: Any, held: Tensor, state: str) -> Tensor:
    adam, held = _inner(adam, held)
    states = adam.state.get(held, {})  # empty before the first update
    if not _keeps_masters(adam, held):
        value = held if state == "master" else states.get(state)
    elif not states:
        value = held if state == "master" else None
    elif state == "master" and _stores_remainders(adam, held):
        value = OptimizerStates.join_master(held, states["master_param"])
    else:
        value = adam.get_unscaled_state(held, "master_param" if state == "master" else state)
    if value is None:
        value = torch.zeros_like(held, dtype=torch.float32)
    return value.detach().float().view(-1)


def _write(adam: Any, held: Tensor, values: Mapping[str, Tensor], *, updates: int) -> None:
    weight = held
    adam, held = _inner(adam, held)
    local = {state: values[state].to(held.device).view_as(held) for state in STATES}
    if _keeps_masters(adam, held):
        _write_kept(adam, held, local)
        return
    with torch.no_grad():
        held.copy_(local["master"])
        if weight is not held:
            weight.copy_(local["master"])
    moments: dict[str, Any] = {state: local[state].clone() for state in STATES[1:]}
    if _counts_per_tensor(adam):
        fused = adam.param_groups[0].get("fused")  # its kernel reads the count on the device
        moments["step"] = torch.tensor(float(updates), device=held.device if fused else "cpu")
    adam.state[held] = moments


def _counts_per_tensor(adam: Any) -> bool:
    # torch counts steps per tensor; fused Adams per group
    return isinstance(adam, (torch.optim.Adam, torch.optim.AdamW))


def _sub_optimizers(adam: Any) -> list[Any]:
    return list(adam.sub_optimizers) if isinstance(adam, HybridDeviceOptimizer) else [adam]


def adam_tensors(adam: Any) -> Iterator[Tensor]:
    for inner in _sub_optimizers(adam):
        for group in inner.param_groups:
            yield from (param.detach() for param in group["params"])
        for state in inner.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def _inner(adam: Any, held: Tensor) -> tuple[Any, Tensor]:
    if not isinstance(adam, HybridDeviceOptimizer):
        return adam, held
    inner = adam.param_to_inner_param[held]
    groups = ((sub, group) for sub in adam.sub_optimizers for group in sub.param_groups)
    return next(sub for sub, group in groups if any(param is inner for param in group["params"])), inner


# -- Transformer Engine's Adam, with masters of its own ------------------------------------------------------------------------


def _keeps_masters(adam: Any, held: Tensor) -> bool:
    return getattr(adam, "master_weights", False) and held.dtype != torch.float32


def _stores_remainders(adam: Any, held: Tensor) -> bool:
    return bool(adam.store_param_remainders) and held.dtype == torch.bfloat16


@torch.no_grad()
def _write_kept(adam: Any, held: Tensor, states: Mapping[str, Tensor]) -> None:
    remainders = _stores_remainders(adam, held)
    adam.state[held] = {}
    adam.initialize_state(held, remainders)
    if remainders:
        weight, low = OptimizerStates.split_master(states["master"])
        held.copy_(weight)
        adam.state[held]["master_param"].copy_(low)
    else:
        held.copy_(states["master"])
        adam.set_scaled_state(held, "master_param", states["master"].clone())
    for state in STATES[1:]:
        if states[state].any():  # it is 0 already, and FP8 would divide by the largest value
            adam.set_scaled_state(held, state, states[state].clone())
