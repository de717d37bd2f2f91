"""Megatron's optimizer with states on the host, where there is no GPU to take them from.

The device and the host are then one memory: what would be copied from a GPU is copied all the same, and Adam works on the
copies, so that gradients, steps, states and the way back are Megatron's own code.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer


class HybridOnCpu(HybridDeviceOptimizer):  # type: ignore[misc] # Megatron has no types
    """Offloads tensors that are on the CPU; Megatron's own looks for CUDA tensors, finds none, and then misses their copies."""

    def _get_sub_optimizer_param_groups(self, offload_fraction: float) -> tuple[Any, ...]:
        """As Megatron's, which fills the host up to the fraction, in the order of the groups; copies are not pinned."""
        total = sum(param.numel() for group in self.param_groups for param in group["params"])
        host_groups, device_groups, copies, masters, offloaded = [], [], {}, {}, 0
        for group in self.param_groups:
            on_host: list[torch.Tensor] = []
            on_device: list[torch.Tensor] = []
            for param in group["params"]:
                inner = param
                if moves := offloaded < total * offload_fraction:
                    inner = param.detach().clone()
                    offloaded += param.numel()
                if self.param_update_in_fp32 and inner.dtype != torch.float32:
                    inner = inner.detach().clone().float()
                    masters[param] = inner
                if moves:
                    copies[param] = inner
                (on_host if moves else on_device).append(inner)
            host_groups += [{**group, "params": on_host}] if on_host else []
            device_groups += [{**group, "params": on_device}] if on_device else []
        return host_groups, device_groups, copies, {inner: param for param, inner in copies.items()}, masters


class HostStream:
    """Stands for a CUDA stream and its events; on a CPU everything is done in order."""

    def wait_stream(self, _: object) -> None:
        """Returns at once."""

    def record_event(self) -> HostStream:
        """Returns an event."""
        return self

    def wait(self, _: object) -> None:
        """Returns at once."""

    def synchronize(self) -> None:
        """Returns at once."""
