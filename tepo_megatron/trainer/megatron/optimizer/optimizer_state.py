"""Reads and writes Adam's states as flat ranges of their parameters, whichever optimizer holds them.

Megatron keeps states per parameter or, with the distributed optimizer, as flat ranges over the data-parallel ranks. A rank
reads and writes the range that it holds, so that nothing is communicated, and nothing is held twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
)
from torch import Tensor

from tepo_megatron.trainer.megatron.optimizer import adam_states
from tepo_megatron.trainer.megatron.optimizer.adam_states import STATES

__all__ = ["STATES", "collect", "is_distributed", "is_parallel_expert", "owned_range", "restore", "set_master", "spread"]


def is_parallel_expert(param: torch.nn.Parameter) -> bool:
    """Whether the copies of the parameter are on the expert-data-parallel ranks, by Megatron's mark on it."""
    return not getattr(param, "allreduce", True)


def _optimizer_of(optimizer: MegatronOptimizer, param: torch.nn.Parameter) -> MegatronOptimizer:
    """Returns the parameter's optimizer: Megatron chains one for dense weights and, under expert parallelism, another."""
    if isinstance(optimizer, ChainedOptimizer):
        return optimizer.chained_optimizers[1 if is_parallel_expert(param) else 0]
    return optimizer


def _held(optimizer: MegatronOptimizer, param: torch.nn.Parameter) -> tuple[Tensor, slice]:
    """Returns the tensor in Adam's groups for this parameter (:mod:`adam_states`), and the flat range of it that it is.

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


def is_distributed(optimizer: MegatronOptimizer) -> bool:
    """Whether the data-parallel ranks hold a part of the states each."""
    inner = optimizer.chained_optimizers[0] if isinstance(optimizer, ChainedOptimizer) else optimizer
    return isinstance(inner, DistributedOptimizer)


def owned_range(optimizer: MegatronOptimizer, param: torch.nn.Parameter) -> slice:
    """Returns the range of the parameter's elements, in row-major order, whose states this rank holds; it may be empty."""
    return _held(_optimizer_of(optimizer, param), param)[1]


def collect(optimizer: MegatronOptimizer, params: Mapping[str, torch.nn.Parameter]) -> Iterator[tuple[str, str, Tensor]]:
    """Yields (parameter, state, fp32 [elements of its owned range]), one at a time; nothing of a range that is empty."""
    for name, param in params.items():
        inner = _optimizer_of(optimizer, param)
        main, owned = _held(inner, param)
        if owned.start == owned.stop:
            continue
        for state in STATES:
            yield name, state, adam_states.read(inner.optimizer, main, state)


def restore(optimizer: MegatronOptimizer, param: torch.nn.Parameter, values: dict[str, Tensor], *, updates: int) -> None:
    """Writes the states of the owned range back, each fp32 [elements]; :func:`spread` then brings them into the parameters."""
    inner = _optimizer_of(optimizer, param)
    main, owned = _held(inner, param)
    if owned.start != owned.stop:
        adam_states.write(inner.optimizer, main, values, updates=updates)
    adam_states.set_count(inner.optimizer, updates)


def spread(optimizer: MegatronOptimizer, ddp: Sequence[DistributedDataParallel]) -> None:
    """Brings the masters into the parameters, as a step does: each rank its range, then from the ranks that hold a part to the
    others. Every rank calls.
    """
    inner_ones = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    for inner in inner_ones:
        if not isinstance(inner, FP32Optimizer):  # its masters are the parameters
            inner._copy_main_params_to_model_params()
    if is_distributed(optimizer):
        for chunk in ddp:
            chunk.start_param_sync(force_sync=True)


def set_master(optimizer: MegatronOptimizer, param: torch.nn.Parameter, value: Tensor) -> None:
    """Sets the tensor that Adam updates for this parameter to ``value`` (in its local shape), on the ranks that hold it."""
    main, owned = _held(_optimizer_of(optimizer, param), param)
    if owned.stop > owned.start:
        with torch.no_grad():
            main.view(-1).copy_(value.reshape(-1)[owned])
