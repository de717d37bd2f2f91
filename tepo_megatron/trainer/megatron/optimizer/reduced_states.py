"""States in fewer bits than fp32, as Transformer Engine's Adam keeps them: where they can be, their bits, and steps on them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tepo_megatron.config import OptimizerConfig

PART_ELEMENTS = 2**26
"""How many elements' states are made fp32 at once in a step (or one tensor's, if it has more)."""


def check_states(config: OptimizerConfig, *, on_gpu: bool) -> None:
    """Raises ValueError where the optimizer is to keep states in fewer bits, and nothing here can."""
    if not config.precision_aware:
        return
    field = config.reduced_fields[0]
    wants = f"optimizer.{field} = {str(getattr(config, field)).lower()} needs Transformer Engine's Adam on a GPU"
    if not on_gpu:
        raise ValueError(f"{wants}, and the trainer runs on a CPU; leave it out, or use optimizer.offload_fraction")
    if importlib.util.find_spec("transformer_engine") is None:
        raise ValueError(f"{wants}, and it is not installed (docs/reference/gpu.md); install it, or leave {field} out")


_TIE = 0x8000
"""The last 17 bits of an fp32 number that lies halfway between an even bfloat16 number and the odd one after it."""


def split_remainder(master: Tensor) -> tuple[Tensor, Tensor]:
    """Returns an fp32 tensor as the bfloat16 weights and int16 remainders that Transformer Engine's Adam keeps of it.

    The weight is the nearest bfloat16 number, and the even one of two that are as near, as torch rounds. The kernel takes the
    larger of these two: there, one value in 2¹⁷, the remainder is that of the next fp32 number towards zero.
    """
    bits = master.contiguous().view(torch.int32)
    bits = torch.where((bits & 0x1FFFF) == _TIE, bits - 1, bits)
    low = (bits & 0xFFFF).to(torch.int16)
    high = (bits >> 16) + (low < 0)
    return high.to(torch.int16).view(torch.bfloat16), low


def join_remainder(weight: Tensor, low: Tensor) -> Tensor:
    """Returns the fp32 masters of :func:`split_remainder`'s weights and remainders, bit for bit, but where the kernel has
    rounded halfway up to an odd weight: there the next fp32 number, which torch rounds to that weight too.
    """
    high = weight.contiguous().view(torch.int16).to(torch.int32) - (low < 0).to(torch.int32)
    bits = (high << 16) | (low.to(torch.int32) & 0xFFFF)
    return torch.where((bits & 0x1FFFF) == _TIE, bits + 1, bits).view(torch.float32)


def step_in_parts(adam: Any, step: Callable[[], Any], most: int = PART_ELEMENTS) -> None:
    """Makes one step of Transformer Engine's Adam, a part of its tensors at a time.

    For a step it makes all states of a group fp32, which in one group would need more memory than fewer bits have saved. Each
    tensor's step is its own, so that the parts change nothing. ``step`` is Adam's own; ``most``: elements of a part.
    """
    whole = adam.param_groups
    try:
        for group in whole:
            for part in _parts(group["params"], most):
                adam.param_groups = [{**group, "params": part}]
                step()
            if group["params"]:
                group["step"] = adam.param_groups[0]["step"]
    finally:
        adam.param_groups = whole


def _parts(params: list[Tensor], most: int) -> Iterator[list[Tensor]]:
    part: list[Tensor] = []
    for param in params:
        if part and sum(each.numel() for each in part) + param.numel() > most:
            yield part
            part = []
        part.append(param)
    if part:
        yield part
