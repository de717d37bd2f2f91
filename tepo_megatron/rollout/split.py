"""Whether vLLM can split a model as the run asks: checked before a server starts, which takes half a minute to refuse it."""

from __future__ import annotations

from tepo_megatron.bridge.architecture import ModelSpec
from tepo_megatron.bridge.layouts import check_vllm_parallel
from tepo_megatron.config.rollout import ServerConfig


def check_server_split(config: ServerConfig, spec: ModelSpec) -> None:
    """Raises ValueError where a server cannot split the model over ``rollout.server.tp`` workers, with every reason."""
    try:
        check_vllm_parallel(spec, tp=config.tp, pp=1)
    except ValueError as error:
        raise ValueError(f"rollout.server.tp = {config.tp} does not fit this model: {error}") from None
