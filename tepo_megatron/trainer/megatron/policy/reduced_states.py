"""Adam's states in fewer bits than fp32, as Transformer Engine keeps them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tepo_megatron.config import OptimizerConfig

PART_ELEMENTS = 2**26
"""Elements with fp32 states at once in a step, or those of one larger tensor."""


def check_states(config: OptimizerConfig, *, on_gpu: bool) -> None:
    """Raises ValueError if no package here can keep states in fewer bits."""
    if not config.precision_aware:
        return
    field = config.reduced_fields[0]
    wants = f"optimizer.{field} = {str(getattr(config, field)).lower()} needs Transformer Engine's Adam on a GPU"
    if not on_gpu:
        raise ValueError(f"{wants}, and the trainer runs on a CPU; leave it out, or use optimizer.offload_fraction")
    if importlib.util.find_spec("transformer_engine") is None:
        raise ValueError(f"{wants}, and it is not installed (docs/reference/gpu.md); install it, or leave {field} out")


_TIE = 0x8000
"""Last 17 bits of an fp32 number halfway between an even and the next odd bfloat16 number."""


def split_remainder(master: Tensor) -> tuple[Tensor, Tensor]:
    """Splits fp32 into bfloat16 weights and int16 remainders, as Transformer Engine's Adam.

    Weights round to nearest even, as in torch. At a tie the kernel rounds up, and the remainder is that of the next fp32 number
    towards zero.
    """
    bits = master.contiguous().view(torch.int32)
    bits = torch.where((bits & 0x1FFFF) == _TIE, bits - 1, bits)
    low = (bits & 0xFFFF).to(torch.int16)
    high = (bits >> 16) + (low < 0)
    return high.to(torch.int16).view(torch.bfloat16), low


def join_remainder(weight: Tensor, low: Tensor) -> Tensor:
    """Inverts :func:`split_remainder` bit for bit, or returns the next fp32 number if the kernel rounded a tie up."""
    high = weight.contiguous().view(torch.int16).to(torch.int32) - (low < 0).to(torch.int32)
    bits = (high << 16) | (low.to(torch.int32) & 0xFFFF)
    return torch.where((bits & 0x1FFFF) == _TIE, bits + 1, bits).view(torch.float32)


def step_in_parts(adam: Any, step: Callable[[], Any], most: int = PART_ELEMENTS) -> None:
    """Makes one step of Transformer Engine's Adam in parts of ``most`` elements.

    Adam makes all states of a group fp32, which would need more memory than fewer bits save.
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
        if part and sum(tensor.numel() for tensor in part) + param.numel() > most:
            yield part
            part = []
        part.append(param)
    if part:
        yield part
