"""What each of the Adams that Megatron builds holds for a tensor: its fp32 master and both moments, read and written in fp32.

- torch's, apex' and Transformer Engine's: the tensor in Adam's groups is the master.
- Transformer Engine's with states in fewer bits (Megatron's precision-aware optimizer): the tensor is the weight itself, and
  Adam has its master, or the 16 bits that the bfloat16 weight lacks of it.
- Megatron's hybrid one, with states on the host: the tensor is the weight, and another Adam has a copy of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from torch import Tensor

from tepo_megatron.trainer.megatron.optimizer.reduced_states import join_remainder, split_remainder

STATES = ("master", "exp_avg", "exp_avg_sq")


def read(adam: Any, held: Tensor, state: str) -> Tensor:
    """Returns a state of ``held``, a tensor in Adam's groups, as a flat fp32 one; before the first step moments are zeros."""
    adam, held = _inner(adam, held)
    own = adam.state.get(held, {})
    if _keeps_masters(adam, held):
        return _read_kept(adam, held, own, state)
    value = held if state == "master" else own.get(state)
    if value is None:  # no update yet
        value = torch.zeros_like(held, dtype=torch.float32)
    return value.detach().float().view(-1)


def write(adam: Any, held: Tensor, values: Mapping[str, Tensor], *, updates: int) -> None:
    """Sets the states of ``held`` from flat fp32 tensors, and the weight where it is ``held`` itself.

    ``updates``: how many Adam has made, where it counts them for each tensor; :func:`set_count` where it counts in all.
    """
    weight = held
    adam, held = _inner(adam, held)
    given = {state: values[state].to(held.device).view_as(held) for state in STATES}
    if _keeps_masters(adam, held):
        _write_kept(adam, held, given)
        return
    with torch.no_grad():
        held.copy_(given["master"])
        if weight is not held:
            weight.copy_(given["master"])
    own: dict[str, Any] = {state: given[state].clone() for state in STATES[1:]}
    if counts_per_tensor(adam):
        own["step"] = torch.tensor(float(updates))
    adam.state[held] = own


def counts_per_tensor(adam: Any) -> bool:
    """Whether steps are counted for each tensor, as torch does; fused Adams count per group, from 1 where there is no count."""
    return isinstance(adam, (torch.optim.Adam, torch.optim.AdamW))


def set_count(adam: Any, updates: int) -> None:
    """Sets the number of updates that were made, where it is counted per group."""
    for each in adam.sub_optimizers if isinstance(adam, HybridDeviceOptimizer) else [adam]:
        if not counts_per_tensor(each):
            for group in each.param_groups:
                group["step"] = updates


def tensors(adam: Any) -> Iterator[Tensor]:
    """Yields every tensor that Adam works on or keeps, wherever it lies."""
    for each in adam.sub_optimizers if isinstance(adam, HybridDeviceOptimizer) else [adam]:
        for group in each.param_groups:
            yield from (param.detach() for param in group["params"])
        for state in each.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def _inner(adam: Any, held: Tensor) -> tuple[Any, Tensor]:
    """Returns the Adam that makes the steps of ``held``, and the tensor that it makes them on."""
    if not isinstance(adam, HybridDeviceOptimizer):
        return adam, held
    inner = adam.param_to_inner_param[held]
    groups = ((each, group) for each in adam.sub_optimizers for group in each.param_groups)
    return next(each for each, group in groups if any(param is inner for param in group["params"])), inner


# -- Transformer Engine's Adam, with masters of its own ------------------------------------------------------------------------


def _keeps_masters(adam: Any, held: Tensor) -> bool:
    return getattr(adam, "master_weights", False) and held.dtype != torch.float32


def _stores_remainders(adam: Any, held: Tensor) -> bool:
    return bool(adam.store_param_remainders) and held.dtype == torch.bfloat16


def _read_kept(adam: Any, held: Tensor, own: Mapping[str, Tensor], state: str) -> Tensor:
    if not own:  # no update yet
        value = held.float() if state == "master" else torch.zeros_like(held, dtype=torch.float32)
    elif state != "master":
        value = adam.get_unscaled_state(held, state)
    elif _stores_remainders(adam, held):
        value = join_remainder(held, own["master_param"])
    else:
        value = adam.get_unscaled_state(held, "master_param")
    return value.detach().float().view(-1)


@torch.no_grad()
def _write_kept(adam: Any, held: Tensor, given: Mapping[str, Tensor]) -> None:
    remainders = _stores_remainders(adam, held)
    adam.state[held] = {}
    adam.initialize_state(held, remainders)
    if remainders:
        weight, low = split_remainder(given["master"])
        held.copy_(weight)
        adam.state[held]["master_param"].copy_(low)
    else:
        held.copy_(given["master"])
        adam.set_scaled_state(held, "master_param", given["master"].clone())
    for state in STATES[1:]:
        if given[state].any():  # it is 0 already, and FP8 would divide by the largest value
            adam.set_scaled_state(held, state, given[state].clone())
