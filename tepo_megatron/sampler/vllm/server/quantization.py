"""Whether this machine can serve quantised weights: asked before a server is started, which would find out a minute later."""

from __future__ import annotations

FP8_CAPABILITY = (8, 9)
"""Ada and Hopper: the first GPUs that multiply FP8 matrices."""


def check_quantization(quantization: str) -> None:
    """Raises ValueError where vLLM (0.32) cannot serve ``rollout.server.quantization`` on this machine, with the reason."""
    reason = None if quantization == "none" else _obstacle(quantization)
    if reason is not None:
        raise ValueError(f"rollout.server.quantization = {quantization} cannot be served on this machine: {reason}")


def _obstacle(quantization: str) -> str | None:
    import torch  # the doctor of a login node, where there is none, loads this file

    if not torch.cuda.is_available():
        return _obstacle_on_cpu(quantization)
    capability = torch.cuda.get_device_capability()
    if capability < FP8_CAPABILITY:
        found, needed = (".".join(map(str, pair)) for pair in (capability, FP8_CAPABILITY))
        name = torch.cuda.get_device_name()
        return f"{name} has no FP8 arithmetic (compute capability {found}, {needed} is needed); set it to none"
    return None


def _obstacle_on_cpu(quantization: str) -> str | None:
    import torch

    if quantization == "fp8_per_tensor":
        return "vLLM has no such quantiser for a CPU; set fp8_per_channel, or none"
    if quantization == "fp8_per_block" and not torch.cpu._is_amx_tile_supported():
        return "vLLM needs a CPU with AMX tiles for it, and this one has none; set fp8_per_channel, or none"
    return None
