"""Adam's states in the shape of their parameters, whatever the optimizer that holds them.

Megatron keeps them per parameter, or, with the distributed optimizer, as flat ranges over the data-parallel ranks. Here
both become tensors of a parameter's local shape, so that a checkpoint depends on neither.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
)
from torch import Tensor

STATES = ("master", "exp_avg", "exp_avg_sq")


def _single(optimizer: MegatronOptimizer) -> MegatronOptimizer:
    if isinstance(optimizer, ChainedOptimizer):
        assert len(optimizer.chained_optimizers) == 1, "dense models have one optimizer"
        return optimizer.chained_optimizers[0]
    return optimizer


def _held(optimizer: MegatronOptimizer, param: torch.nn.Parameter) -> tuple[Tensor, slice]:
    """The fp32 tensor that Adam updates for this parameter, and which flat range of it it is; an empty range if none is
    here.
    """
    if isinstance(optimizer, DistributedOptimizer):
        if param not in optimizer.model_param_group_index_map:
            return param.new_zeros(0, dtype=torch.float32), slice(0, 0)
        group, order = optimizer.model_param_group_index_map[param]
        owned = optimizer._get_model_param_range_map(param)["param"]
        return optimizer.optimizer.param_groups[group]["params"][order], slice(owned.start, owned.end)
    whole = slice(0, param.numel())
    if isinstance(optimizer, Float16OptimizerWithFloat16Params):
        return getattr(param, "main_param"), whole  # noqa: B009 (Megatron hangs it there)
    assert isinstance(optimizer, FP32Optimizer)
    return param, whole


def collect(optimizer: MegatronOptimizer, params: dict[str, torch.nn.Parameter]) -> Iterator[tuple[str, str, Tensor]]:
    """Yields (parameter, state, fp32 tensor in the parameter's local shape), one at a time.

    Every rank must exhaust it, in step: under the distributed optimizer each tensor is summed over the data-parallel ranks,
    of which each holds one range.
    """
    inner = _single(optimizer)
    sharded = isinstance(inner, DistributedOptimizer)
    for name, param in params.items():
        main, owned = _held(inner, param)
        adam = inner.optimizer.state.get(main, {})
        for state in STATES:
            full = torch.zeros(param.numel(), dtype=torch.float32, device=param.device)
            value = main if state == "master" else adam.get(state)
            if value is not None and owned.stop > owned.start:
                full[owned] = value.detach().float().view(-1)
            if sharded:
                dist.all_reduce(full, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
            yield name, state, full.view_as(param)


def restore(optimizer: MegatronOptimizer, param: torch.nn.Parameter, values: dict[str, Tensor], *, updates: int) -> None:
    """Puts the states (in the parameter's local shape) back, the parameter itself included. No communication."""
    inner = _single(optimizer)
    with torch.no_grad():
        param.copy_(values["master"])
        main, owned = _held(inner, param)
        if owned.stop == owned.start:
            return
        main.view(-1).copy_(values["master"].view(-1)[owned])
        adam = {state: values[state].view(-1)[owned].view_as(main).clone() for state in STATES[1:]}
        inner.optimizer.state[main] = {"step": torch.tensor(float(updates)), **adam}
    for group in inner.optimizer.param_groups:
        if "step" in group:  # fused Adams count per group
            group["step"] = updates
