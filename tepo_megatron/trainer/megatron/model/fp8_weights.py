"""Gives the bridge plain tensors where Transformer Engine keeps weights in FP8 (``engine.fp8.params``).

The dtype of such a parameter is bfloat16, but it holds FP8 and scales, and can only be read and written as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from megatron.core.fp8_utils import dequantize_fp8_tensor, is_float8tensor
from torch import Tensor

from tepo_megatron.weights.geometry import ShardLayout
from tepo_megatron.weights.storage.hf_folder import load_into


class PlainWeights(Mapping[str, Tensor]):
    """A read-only view of parameters as plain tensors; those in FP8 are dequantised at each access."""

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
    """Loads weights as ``bridge.storage.files.load_into`` does, also into parameters in FP8.

    Returns, for the parameters in FP8, the values before rounding, on the CPU: their fp32 masters must start from these.
    """
    # The bridge writes parts of a parameter, and one in FP8 takes only the whole: it is read into a plain tensor first.
    unrounded = {name: torch.empty(param.shape, dtype=param.dtype) for name, param in params.items() if is_float8tensor(param)}
    load_into(folder, layout, {**params, **unrounded})
    with torch.no_grad():
        for name, values in unrounded.items():
            params[name].copy_(values)
    return unrounded
