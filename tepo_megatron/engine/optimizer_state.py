"""Reads and writes Adam's states in the shape of their parameters, whichever optimizer holds them.

Megatron keeps states per parameter or, with the distributed optimizer, as flat ranges over the data-parallel ranks. Both become
tensors of a parameter's local shape here, so that a checkpoint does not depend on the optimizer.
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


def _is_parallel_expert(param: torch.nn.Parameter) -> bool:
    """Whether the copies of the parameter are on the expert-data-parallel ranks, by Megatron's mark on it."""
    return not getattr(param, "allreduce", True)


def _optimizer_of(optimizer: MegatronOptimizer, param: torch.nn.Parameter) -> MegatronOptimizer:
    """Returns the parameter's optimizer: Megatron chains one for dense weights and, under expert parallelism, another."""
    if isinstance(optimizer, ChainedOptimizer):
        return optimizer.chained_optimizers[1 if _is_parallel_expert(param) else 0]
    return optimizer


def _held(optimizer: MegatronOptimizer, param: torch.nn.Parameter) -> tuple[Tensor, slice]:
    """Returns the fp32 tensor that Adam updates for this parameter, and the flat range of the parameter that it is.

    The range is empty on a rank that holds none of it.
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
    dense = parallel_state.get_data_parallel_group(with_context_parallel=True)
    experts = parallel_state.get_expert_data_parallel_group()
    for name, param in params.items():
        inner = _optimizer_of(optimizer, param)
        main, owned = _held(inner, param)
        adam = inner.optimizer.state.get(main, {})
        for state in STATES:
            full = torch.zeros(param.numel(), dtype=torch.float32, device=param.device)
            value = main if state == "master" else adam.get(state)
            if value is not None and owned.stop > owned.start:
                full[owned] = value.detach().float().view(-1)
            if isinstance(inner, DistributedOptimizer):
                # The ranks' ranges do not overlap and the rest is 0, so that the sum is the whole tensor, exactly.
                dist.all_reduce(full, group=experts if _is_parallel_expert(param) else dense)
            yield name, state, full.view(param.shape)


def restore(optimizer: MegatronOptimizer, param: torch.nn.Parameter, values: dict[str, Tensor], *, updates: int) -> None:
    """Writes the states (in the parameter's local shape) back, and the parameter itself. No communication."""
    inner = _optimizer_of(optimizer, param)
    counts_per_param = isinstance(inner.optimizer, (torch.optim.Adam, torch.optim.AdamW))
    with torch.no_grad():
        param.copy_(values["master"].to(param.dtype))
        set_master(optimizer, param, values["master"])
        main, owned = _held(inner, param)
        if owned.stop == owned.start:
            return
        adam = {state: values[state].view(-1)[owned].view_as(main).clone() for state in STATES[1:]}
        if counts_per_param:
            adam["step"] = torch.tensor(float(updates))
        inner.optimizer.state[main] = adam
    if not counts_per_param:  # fused Adams count per group, and begin with 1 where there is no count
        for group in inner.optimizer.param_groups:
            group["step"] = updates


def set_master(optimizer: MegatronOptimizer, param: torch.nn.Parameter, value: Tensor) -> None:
    """Sets the tensor that Adam updates for this parameter to ``value`` (in its local shape), on the ranks that hold it."""
    main, owned = _held(_optimizer_of(optimizer, param), param)
    if owned.stop > owned.start:
        with torch.no_grad():
            main.view(-1).copy_(value.reshape(-1)[owned])
