"""Memory of a GPU that another process sees, by handles that are JSON."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from tepo_megatron.weights.transfer.group_membership import host_name


class Handles(Protocol):
    """Makes memory of a GPU visible to another process, by handles that are JSON."""

    def location(self, device: torch.device) -> dict[str, str]:
        """Returns unique names of the host and of the GPU, which must be the same on both sides."""

    def export(self, slots: Tensor) -> dict[str, Any]:
        """Returns a handle of a tensor's whole storage, which must stay alive."""

    def open(self, handle: dict[str, Any], device: torch.device) -> torch.UntypedStorage:
        """Returns the same memory in the process that has the handle."""

    def synchronize(self, device: torch.device) -> None:
        """Returns when all copies that were started have been made, so that another process may read them."""


class CudaHandles:
    """CUDA's IPC handles, made by the functions that torch.multiprocessing uses, without its pickle."""

    _BYTES = ("handle", "counter", "event")

    def location(self, device: torch.device) -> dict[str, str]:
        return {"host": host_name(), "gpu": str(torch.cuda.get_device_properties(device).uuid)}

    def export(self, slots: Tensor) -> dict[str, Any]:
        _, handle, size, offset, counter, counter_offset, event, must_sync = slots.untyped_storage()._share_cuda_()
        raw = dict(zip(self._BYTES, (bytes(part).hex() for part in (handle, counter, event)), strict=True))
        return raw | {"size": size, "offset": offset, "counter_offset": counter_offset, "must_sync": bool(must_sync)}

    def open(self, handle: dict[str, Any], device: torch.device) -> torch.UntypedStorage:
        raw, counter, event = (bytes.fromhex(handle[name]) for name in self._BYTES)
        return torch.UntypedStorage._new_shared_cuda(
            device.index, raw, handle["size"], handle["offset"], counter, handle["counter_offset"], event, handle["must_sync"]
        )

    def synchronize(self, device: torch.device) -> None:
        torch.cuda.current_stream(device).synchronize()
