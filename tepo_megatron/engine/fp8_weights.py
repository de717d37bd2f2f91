"""Weights that Transformer Engine keeps in FP8 (``engine.fp8.params``), for the bridge, which reads and writes plain tensors.

Such a parameter says that it is bfloat16, holds FP8 and scales, and can only be read and written whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from megatron.core.fp8_utils import dequantize_fp8_tensor, is_float8tensor
from torch import Tensor

from tepo_megatron.bridge.geometry import ShardLayout
from tepo_megatron.bridge.storage.files import load_into


class PlainWeights(Mapping[str, Tensor]):
    """Parameters as plain tensors, to be read: those in FP8 as the values that they stand for, made anew at each access."""

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        self._params = params

    def __getitem__(self, name: str) -> Tensor:
        param = self._params[name]
        return dequantize_fp8_tensor(param.detach()) if is_float8tensor(param) else param

    def __iter__(self) -> Iterator[str]:
        return iter(self._params)

    def __len__(self) -> int:
        return len(self._params)


def load_weights(folder: Path, layout: ShardLayout, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``bridge.storage.files.load_into``, also for parameters in FP8. Returns for these, on the CPU, the values
    before the rounding to FP8: what their masters must start from.
    """
    unrounded = {name: torch.empty(param.shape, dtype=param.dtype) for name, param in params.items() if is_float8tensor(param)}
    load_into(folder, layout, {**params, **unrounded})
    with torch.no_grad():
        for name, values in unrounded.items():
            params[name].copy_(values)
    return unrounded
