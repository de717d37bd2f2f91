"""Checks before a server starts, which would take half a minute to refuse a model."""

from __future__ import annotations

import json
from pathlib import Path

from tepo_megatron.config.rollout_server import ServerConfig, SpeculativeConfig
from tepo_megatron.weights.architecture import ModelSpec
from tepo_megatron.weights.layouts import check_vllm_parallel


def check_server_split(config: ServerConfig, spec: ModelSpec) -> None:
    """Raises ValueError with every reason."""
    try:
        check_vllm_parallel(spec, tp=config.tp, pp=1)
    except ValueError as error:
        raise ValueError(f"rollout.server.tp = {config.tp} does not fit this model: {error}") from None


CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Those of vLLM's ``CPUAttentionBackend``; any other ends the server at its first request."""


def check_head_size(spec: ModelSpec, *, on_gpu: bool) -> None:
    """Raises ValueError if vLLM's CPU attention lacks the head size."""
    if not on_gpu and spec.head_dim not in CPU_HEAD_SIZES:
        raise ValueError(
            f"the model's attention heads have {spec.head_dim} dimensions (head_dim, or hidden_size / num_attention_heads, in "
            f"config.json); on a CPU vLLM takes {', '.join(map(str, CPU_HEAD_SIZES))}. Give a model with such heads"
        )


def check_machine_serves(config: ServerConfig, spec: ModelSpec) -> None:
    """Raises ValueError if this machine's servers cannot compute the model or its quantization."""
    import torch

    check_quantization(config.quantization)
    check_head_size(spec, on_gpu=torch.cuda.device_count() > 0)


FP8_CAPABILITY = (8, 9)
"""Ada and Hopper."""


def check_quantization(quantization: str) -> None:
    """Raises ValueError if vLLM (0.32) cannot serve ``rollout.server.quantization`` here."""
    reason = None if quantization == "none" else _obstacle(quantization)
    if reason is not None:
        raise ValueError(f"rollout.server.quantization = {quantization} cannot be served on this machine: {reason}")


def _obstacle(quantization: str) -> str | None:
    import torch  # a login node's doctor loads this file without torch

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


def vllm_options(config: SpeculativeConfig, tp: int) -> str:
    """The value of ``--speculative-config``; a draft model shares the server's ``tp``."""
    guesses = {"num_speculative_tokens": config.num_speculative_tokens}
    if config.draft_model is not None:
        draft = {"method": "draft_model", "model": str(config.draft_model), "draft_tensor_parallel_size": tp}
        return json.dumps(draft | guesses)
    lengths = {"prompt_lookup_min": config.prompt_lookup_min, "prompt_lookup_max": config.prompt_lookup_max}
    return json.dumps({"method": "ngram"} | guesses | lengths)


def check_draft(config: SpeculativeConfig | None, model_dir: Path) -> None:
    """Raises ValueError if the draft model is missing, or its vocabulary differs from that of the model in ``model_dir``."""
    if config is None or config.draft_model is None:
        return
    field = f"rollout.server.speculative.draft_model = {config.draft_model}"
    if not (config.draft_model / "config.json").is_file():
        raise ValueError(f"{field} is no folder with a model: it has no config.json; name one in Hugging Face's format")
    own, drafts = read_vocab_size(model_dir), read_vocab_size(config.draft_model)
    if own != drafts:
        raise ValueError(
            f"{field} has a vocabulary of {drafts} tokens, and the model in {model_dir} one of {own}: its guesses would be "
            "other tokens; name a model with the same tokenizer"
        )


def read_vocab_size(model_dir: Path) -> int | None:
    """None if the folder's config has no vocabulary size."""
    try:
        raw = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    size = raw.get("vocab_size") if isinstance(raw, dict) else None
    return size if isinstance(size, int) and size > 0 else None
