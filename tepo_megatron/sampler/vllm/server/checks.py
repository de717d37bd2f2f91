"""Whether vLLM can serve a model as the run asks: checked before a server starts, which takes half a minute to refuse it."""

from __future__ import annotations

from tepo_megatron.config.rollout_server import ServerConfig
from tepo_megatron.weights.architecture import ModelSpec
from tepo_megatron.weights.layouts import check_vllm_parallel


def check_server_split(config: ServerConfig, spec: ModelSpec) -> None:
    """Raises ValueError where a server cannot split the model over ``rollout.server.tp`` workers, with every reason."""
    try:
        check_vllm_parallel(spec, tp=config.tp, pp=1)
    except ValueError as error:
        raise ValueError(f"rollout.server.tp = {config.tp} does not fit this model: {error}") from None


CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""What vLLM's attention on CPUs computes (``CPUAttentionBackend``); any other ends the server at its first request."""


def check_head_size(spec: ModelSpec, *, on_gpu: bool) -> None:
    """Raises ValueError where vLLM has no attention on this machine's CPU for the model's heads."""
    if not on_gpu and spec.head_dim not in CPU_HEAD_SIZES:
        raise ValueError(
            f"the model's attention heads have {spec.head_dim} dimensions (head_dim, or hidden_size / num_attention_heads, in "
            f"config.json); on a CPU vLLM takes {', '.join(map(str, CPU_HEAD_SIZES))}. Give a model with such heads"
        )


def check_machine_serves(config: ServerConfig, spec: ModelSpec) -> None:
    """Raises ValueError if the servers of this machine cannot compute the model, or its quantization, as the run asks."""
    import torch

    check_quantization(config.quantization)
    check_head_size(spec, on_gpu=torch.cuda.device_count() > 0)


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
