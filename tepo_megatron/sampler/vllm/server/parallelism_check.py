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
