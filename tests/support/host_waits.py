"""Counts where the host would wait for a GPU. A CPU waits for nothing, but the operations are the same."""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tepo_megatron

PACKAGE = Path(tepo_megatron.__file__).parent
_WAIT = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "bincount", "_unique2", "unique_dim", "unique_consecutive"}
_INDEX = {"index", "index_put", "index_put_"}


class HostWaits(TorchDispatchMode):
    """``places``: how often the host asked for a value on the device, or for a size that depends on values, by file and
    function of the package. ``numpy`` is for tensors of the host alone, since others refuse it, and does not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[str] = Counter()
        self._patches = ExitStack()

    def __enter__(self) -> HostWaits:
        for name in ("tolist", "cpu"):  # they copy, where there is something to copy
            original = getattr(torch.Tensor, name)

            def spy(tensor: torch.Tensor, *args: Any, name: str = name, original: Any = original, **kwargs: Any) -> Any:
                self._note(name)
                return original(tensor, *args, **kwargs)

            self._patches.enter_context(mock.patch.object(torch.Tensor, name, spy))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        by_mask = name in _INDEX and any(index is not None and index.dtype == torch.bool for index in args[1])
        if by_mask and name != "index":
            by_mask = args[2].numel() != 1  # one value is filled in by the mask
        unknown_size = name == "repeat_interleave" and kwargs.get("output_size") is None
        if name in _WAIT or by_mask or unknown_size:
            self._note(name)
        return func(*args, **kwargs)

    def _note(self, operation: str) -> None:
        frame = sys._getframe(1)
        while frame.f_back is not None and not self._is_caller(frame):
            frame = frame.f_back
        self.places[f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name} {operation}"] += 1

    @staticmethod
    def _is_caller(frame: FrameType) -> bool:
        return PACKAGE in Path(frame.f_code.co_filename).parents and frame.f_code.co_name != "__torch_function__"
