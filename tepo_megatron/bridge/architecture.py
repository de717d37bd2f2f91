"""A Hugging Face ``config.json`` read into the few numbers that layouts and engine need."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KNOWN_ARCHITECTURES = ("LlamaForCausalLM",)


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's frequency scaling; Megatron-Core has the other three constants built in, so they are checked, not carried."""

    factor: float


@dataclass(frozen=True)
class ModelSpec:
    """The shape of a dense decoder, in Hugging Face's terms."""

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    tied_embeddings: bool
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_positions: int

    def padded_vocab_size(self, tp: int) -> int:
        """Rows of the embedding and the head in Megatron: the next multiple of tp."""
        return -(-self.vocab_size // tp) * tp

    def check_parallel(self, *, tp: int, pp: int) -> None:
        """Raises ValueError where Megatron could not split this model so."""
        for name, size in (
            ("attention heads", self.num_heads),
            ("key/value heads", self.num_kv_heads),
            ("MLP size", self.ffn_size),
        ):
            if size % tp:
                raise ValueError(
                    f"engine.parallel.tp = {tp} does not divide the model's {size} {name}; use a divisor of {size}"
                )
        if self.num_layers % pp:
            raise ValueError(
                f"engine.parallel.pp = {pp} does not divide the model's {self.num_layers} layers; "
                f"use a divisor of {self.num_layers}"
            )


def read_model_spec(folder: Path) -> ModelSpec:
    """Reads ``folder/config.json``.

    Raises ValueError for a missing or damaged file, an unknown architecture (with the known ones), or a feature of a known
    one that the engine does not carry; a silently ignored feature would be a wrong model.
    """
    path = folder / "config.json"
    try:
        raw: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"model.path {folder} has no config.json; give a Hugging Face model folder") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: not JSON ({error.msg}); the model folder is damaged") from None
    architecture = (raw.get("architectures") or ["<none>"])[0]
    if architecture not in KNOWN_ARCHITECTURES:
        raise ValueError(f"{path}: architecture {architecture} is not known; known: {', '.join(KNOWN_ARCHITECTURES)}")
    _refuse_unsupported(raw, path)
    try:
        heads = raw["num_attention_heads"]
        rope_theta, rope_scaling = _rope(raw, path)
        return ModelSpec(
            architecture=architecture,
            num_layers=raw["num_hidden_layers"],
            hidden_size=raw["hidden_size"],
            num_heads=heads,
            num_kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            ffn_size=raw["intermediate_size"],
            vocab_size=raw["vocab_size"],
            tied_embeddings=raw.get("tie_word_embeddings", False),
            norm_eps=raw.get("rms_norm_eps", 1e-6),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            max_positions=raw.get("max_position_embeddings", 2048),
        )
    except KeyError as error:
        raise ValueError(f"{path} lacks {error}; the model folder is damaged") from None


def _refuse_unsupported(raw: dict[str, Any], path: Path) -> None:
    expected = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    for key, value in expected.items():
        if raw.get(key, value) != value:
            raise ValueError(f"{path}: {key} = {raw[key]!r} is not supported yet (only {value!r})")


def _rope(raw: dict[str, Any], path: Path) -> tuple[float, RopeScaling | None]:
    """Transformers 5 keeps ``rope_parameters``; older folders ``rope_theta`` and ``rope_scaling``."""
    parameters = raw.get("rope_parameters") or {"rope_theta": raw.get("rope_theta", 10000.0), **(raw.get("rope_scaling") or {})}
    theta = float(parameters.get("rope_theta", 10000.0))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return theta, None
    constants = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    if kind != "llama3" or any(parameters.get(key) != value for key, value in constants.items()):
        raise ValueError(f"{path}: rope scaling {parameters} is not supported; known: default, llama3 with {constants}")
    return theta, RopeScaling(factor=float(parameters["factor"]))
