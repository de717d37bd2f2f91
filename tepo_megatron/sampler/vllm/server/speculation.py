"""Speculative decoding as vLLM is told of it, and whether a draft model can guess for a policy."""

from __future__ import annotations

import json
from pathlib import Path

from tepo_megatron.config.rollout_server import SpeculativeConfig


def vllm_options(config: SpeculativeConfig, tp: int) -> str:
    """vLLM's ``--speculative-config``; ``tp``: the server's, which a draft model shares."""
    guesses = {"num_speculative_tokens": config.num_speculative_tokens}
    if config.draft_model is not None:
        draft = {"method": "draft_model", "model": str(config.draft_model), "draft_tensor_parallel_size": tp}
        return json.dumps(draft | guesses)
    lengths = {"prompt_lookup_min": config.prompt_lookup_min, "prompt_lookup_max": config.prompt_lookup_max}
    return json.dumps({"method": "ngram"} | guesses | lengths)


def check_draft(config: SpeculativeConfig | None, model_dir: Path) -> None:
    """Raises ValueError where the draft model is none, or of another vocabulary than the model in ``model_dir``."""
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
    """How many tokens the model in this folder has; None where its config does not say, which the server then refuses."""
    try:
        raw = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    size = raw.get("vocab_size") if isinstance(raw, dict) else None
    return size if isinstance(size, int) and size > 0 else None
