from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tepo_megatron.runtime.text import parse_json


@dataclass(frozen=True)
class _Family:
    """Differences from a decoder with RMSNorm, RoPE, grouped queries, SwiGLU and no biases.

    ``qkv_bias``, ``qk_norm``, ``ffn_size`` may name a field. ``only``: fields with one supported value.
    """

    qkv_bias: bool | str = False
    qk_norm: bool | str = False
    experts: bool = False
    shared: bool = False
    ffn_size: str = "intermediate_size"
    rotary_fraction: float | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, Any] = field(default_factory=dict)


_QWEN = {"use_sliding_window": False, "dual_chunk_attention_config": None}

FAMILIES: Mapping[str, _Family] = {
    "LlamaForCausalLM": _Family(only={"attention_bias": False, "mlp_bias": False}),
    "MistralForCausalLM": _Family(
        defaults={"num_key_value_heads": 8, "sliding_window": 4096}, only={"sliding_window": None, "llama_4_scaling": None}
    ),
    "Qwen2ForCausalLM": _Family(qkv_bias=True, defaults={"num_key_value_heads": 32}, only=_QWEN),
    "Qwen3ForCausalLM": _Family(
        qk_norm=True, defaults={"num_key_value_heads": 32, "head_dim": 128}, only={"attention_bias": False, **_QWEN}
    ),
    "MixtralForCausalLM": _Family(
        experts=True,
        defaults={
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
        },
        only={"sliding_window": None, "norm_topk_prob": True, "router_jitter_noise": 0.0, "output_router_logits": False},
    ),
    "Qwen3MoeForCausalLM": _Family(
        qk_norm=True,
        experts=True,
        ffn_size="moe_intermediate_size",
        defaults={
            "num_key_value_heads": 4,
            "num_local_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
            "moe_intermediate_size": 768,
        },
        only={"attention_bias": False, **_QWEN, "decoder_sparse_step": 1, "mlp_only_layers": [], "output_router_logits": False},
    ),
    "Glm4MoeForCausalLM": _Family(
        qkv_bias="attention_bias",
        qk_norm="use_qk_norm",
        experts=True,
        shared=True,
        ffn_size="moe_intermediate_size",
        rotary_fraction=0.5,
        defaults={
            "attention_bias": False,
            "use_qk_norm": False,
            "num_key_value_heads": 8,
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "moe_intermediate_size": 1408,
            "n_shared_experts": 1,
            "routed_scaling_factor": 1.0,
            "first_k_dense_replace": 1,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
        },
        only={"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "output_router_logits": False},
    ),
}

_SUPPORTED = {
    "hidden_act": "silu",
    "is_causal": True,
    # Logits are the head's plain product. Other families scale, bound or shift them; vLLM reads the first for Llama too.
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "final_logit_softcapping": None,
    "lm_head_bias": False,
}

EXPERT_BIAS = "e_score_correction_bias"

LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def is_always_fp32(tensor: str) -> bool:
    return tensor.endswith(EXPERT_BIAS)


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's scaling; Megatron-Core hard-codes the constants of ``LLAMA3_ROPE``."""

    factor: float


@dataclass(frozen=True)
class Experts:
    """``renormalize``: chosen probabilities sum to 1. ``biased``: scores are sigmoids, with a bias per expert for the choice
    only, and chosen weights sum to ``scale``. ``shared_ffn_size``: an MLP for every token (0: none).
    """

    count: int
    per_token: int
    renormalize: bool
    biased: bool = False
    scale: float = 1.0
    shared_ffn_size: int = 0


@dataclass(frozen=True)
class ModelSpec:
    """Shape of a decoder in Hugging Face's terms.

    ``qkv_bias``: of query, key and value projections only. ``qk_norm``: an RMSNorm of ``head_dim`` weights before RoPE, which
    turns the first ``rotary_fraction`` of a head. With experts, the first ``dense_layers``
    layers have an MLP of ``dense_ffn_size``.
    """

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
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: Experts | None = None
    rotary_fraction: float = 1.0
    dense_layers: int = 0
    dense_ffn_size: int = 0

    @classmethod
    def of(cls, raw: Mapping[str, Any], where: str) -> ModelSpec:
        """``where`` names ``raw``, a parsed ``config.json``, in errors."""
        named = raw.get("architectures") or ["<none>"]
        architecture = str(named[0])[:60] if isinstance(named, list) else str(named)[:60]
        family = FAMILIES.get(architecture)
        if family is None:
            raise ValueError(f"{where}: architecture {architecture} is not known; known: {', '.join(FAMILIES)}")
        raw = {**family.defaults, **raw}
        try:
            _refuse_unsupported(raw, family, where)
            heads = _size(raw, "num_attention_heads", where)
            rope = {**raw, **_rope_parameters(raw)}
            rotary_fraction = rope.get("partial_rotary_factor", family.rotary_fraction) if family.rotary_fraction else 1.0
            rope_theta, rope_scaling = _rope(raw, where)
            spec = cls(
                architecture=architecture,
                num_layers=_size(raw, "num_hidden_layers", where),
                hidden_size=_size(raw, "hidden_size", where),
                num_heads=heads,
                num_kv_heads=_size({"num_key_value_heads": heads, **_without_nulls(raw)}, "num_key_value_heads", where),
                head_dim=_size({"head_dim": raw["hidden_size"] // heads, **_without_nulls(raw)}, "head_dim", where),
                ffn_size=_size(raw, family.ffn_size, where),
                vocab_size=_size(raw, "vocab_size", where),
                tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
                norm_eps=_number(raw.get("rms_norm_eps", 1e-6), "rms_norm_eps", where),
                rope_theta=rope_theta,
                rope_scaling=rope_scaling,
                max_positions=_size({"max_position_embeddings": 2048, **raw}, "max_position_embeddings", where),
                qkv_bias=_feature(raw, family.qkv_bias),
                qk_norm=_feature(raw, family.qk_norm),
                experts=_experts(raw, family, where) if family.experts else None,
                rotary_fraction=_number(rotary_fraction, "partial_rotary_factor", where),
                dense_layers=_size(raw, "first_k_dense_replace", where, smallest=0) if family.shared else 0,
                dense_ffn_size=_size(raw, "intermediate_size", where) if family.shared and raw["first_k_dense_replace"] else 0,
            )
        except KeyError as error:
            raise ValueError(f"{where} lacks {error}; the model folder is damaged") from None
        except (TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"{where} has a value of another kind ({error}); the model folder is damaged") from None
        _check_sizes(spec, where)
        return spec

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer >= self.dense_layers

    @property
    def mlp_sizes(self) -> dict[str, int]:
        """Sizes that tensor parallelism splits, by their names in errors."""
        if self.experts is None:
            return {"MLP size": self.ffn_size}
        sizes = {
            "MLP size of a dense layer": self.dense_ffn_size,
            "MLP size of the shared experts": self.experts.shared_ffn_size,
        }
        return {name: size for name, size in sizes.items() if size}

    @property
    def route_bytes(self) -> int:
        sizes = {"uint8": 1, "int16": 2}
        return 0 if self.experts is None else self.num_layers * self.experts.per_token * sizes[self.routes_dtype]

    @property
    def routes_dtype(self) -> str:
        """NumPy's name; the plan has no NumPy. One byte holds 255 experts and "unknown"."""
        assert self.experts is not None
        return "uint8" if self.experts.count <= 255 else "int16"

    def routes_fault(self, routes: Any, tokens: int) -> str | None:
        """Returns the end of a sentence, or None if the routing record, an array or None, can be replayed for ``tokens``."""
        if routes is None:
            return "has no routing record"
        if self.experts is None:
            return f"has a routing record, and {self.architecture} has no experts"
        expected = (tokens - 1, self.num_layers, self.experts.per_token)
        if routes.shape != expected:
            shape, of_model = (" × ".join(map(str, sizes)) for sizes in (routes.shape, expected))
            return (
                f"has a routing record of {shape}, and {tokens} tokens of this model make {of_model} (all but the last × "
                "layers × experts per token): it is of another model or another length"
            )
        if routes.size and not 0 <= int(routes.min()) <= int(routes.max()) < self.experts.count:
            worst = int(routes.min()) if routes.min() < 0 else int(routes.max())
            return f"has a routing record with expert {worst}, and this model has {self.experts.count}: it is of another model"
        return None

    def padded_vocab_size(self, tp: int) -> int:
        return -(-self.vocab_size // tp) * tp

    def check_parallel(self, *, tp: int, ep: int = 1, etp: int | None = None) -> None:
        splits = [("tp", tp, "attention heads", self.num_heads), ("tp", tp, "key/value heads", self.num_kv_heads)]
        if self.experts is None:
            if ep > 1 or etp is not None:
                setting = f"ep = {ep}" if ep > 1 else f"etp = {etp}"
                raise ValueError(f"engine.parallel.{setting} is for models with experts; unset it for {self.architecture}")
        else:
            splits.append(("ep", ep, "experts", self.experts.count))
            splits.append(("tp" if etp is None else "etp", etp or tp, "MLP size of an expert", self.ffn_size))
        splits += [("tp", tp, name, size) for name, size in self.mlp_sizes.items()]
        for field_name, parts, name, size in splits:
            if size % parts:
                raise ValueError(
                    f"engine.parallel.{field_name} = {parts} does not divide the model's {size} {name}; use a divisor of {size}"
                )

    def check_length(self, tokens: int, field: str) -> None:
        """``field`` names the fields that allow ``tokens``."""
        if tokens > self.max_positions:
            raise ValueError(
                f"{field} = {tokens} tokens are more than the {self.max_positions} positions of {self.architecture} "
                "(max_position_embeddings in its config.json); lower them"
            )

    def check_recompute(self, modules: Collection[str], *, transformer_engine: bool) -> None:
        has_experts, te_only = self.experts is not None, "which Megatron-Core has in Transformer Engine's layers alone"
        without = f"which is for models with experts, and {self.architecture} has none; name mlp instead"
        every = f"and every MLP of {self.architecture} is one of experts; name moe instead"
        fused = "but Transformer Engine computes the norms of a dense layer within its linears and keeps none; leave it out"
        refusals = (
            ("mlp", has_experts and not self.dense_layers, every),
            ("moe", not has_experts, without),
            ("moe_act", not has_experts, without),
            ("moe_act", not transformer_engine, f"{te_only} (engine.layers = te); name moe instead"),
            ("layernorm", not transformer_engine, f"{te_only}; leave it out, or set engine.layers = te"),
            ("layernorm", not has_experts, fused),
        )
        for name, refused, reason in refusals:
            if refused and name in modules:
                raise ValueError(f"engine.recompute_modules has {name}, {reason}")

    def check_balance(self, kind: str) -> None:
        if kind != "none" and self.experts is None:
            raise ValueError(
                f"engine.moe_balance.kind = {kind} balances experts, and {self.architecture} has none; leave "
                "engine.moe_balance out"
            )
        if kind == "expert_bias" and not (self.experts and self.experts.biased):
            raise ValueError(
                f"engine.moe_balance.kind = expert_bias moves a bias on each expert's score, and {self.architecture} has none, "
                "in the rollout servers neither; set kind = aux_loss, or none"
            )

    def check_routing_replay(self) -> None:
        if self.experts is None:
            raise ValueError(
                f"rollout.server.routing_replay = true replays the choice of experts, and {self.architecture} has none"
            )

    def check_served_adapters(self) -> None:
        if self.experts is not None:
            raise ValueError(
                "model.lora.serve = adapter is for dense models, and this one has experts; set model.lora.serve = merged"
            )


def read_model_spec(folder: Path) -> ModelSpec:
    """Raises ValueError for a bad ``config.json`` and unsupported architectures and features."""
    path = folder / "config.json"
    try:
        raw: dict[str, Any] = parse_json(path.read_bytes(), path, dict)
    except FileNotFoundError:
        raise ValueError(f"model.path {folder} has no config.json; give a Hugging Face model folder") from None
    return ModelSpec.of(raw, str(path))


TOKENIZER_FILES = (
    *("tokenizer.model", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "vocab.json", "merges.txt"),
)


def end_ids(path: Path) -> list[int]:
    """Reads ``eos_token_id`` of a file. Raises ValueError unless it is an id, several, or missing."""
    ids = read_object(path).get("eos_token_id")
    listed = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not all(type(token) is int and 0 <= token < 2**31 for token in listed):
        raise ValueError(
            f"{path}: eos_token_id = {repr(ids)[:60]} is no token id, nor a list of them; the model folder is damaged"
        )
    return listed


def read_object(path: Path) -> dict[str, Any]:
    """Returns {} if there is no file, or no object in it. Raises ValueError if it is not JSON."""
    try:
        value = parse_json(path.read_bytes(), path.name) if path.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{path} is damaged, copy it again: {error}") from error
    return value if isinstance(value, dict) else {}


def _without_nulls(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if value is not None}


def _size(raw: Mapping[str, Any], key: str, where: str, *, smallest: int = 1) -> int:
    value = raw[key]
    if type(value) is not int or not smallest <= value < 2**31:
        kind = "positive whole number" if smallest else "whole number from 0"
        raise ValueError(f"{where}: {key} = {repr(value)[:60]} is no {kind}; the model folder is damaged")
    return value


def _number(value: Any, key: str, where: str) -> float:
    if type(value) not in (int, float) or not 0 < value < 1e15:  # NaN too
        raise ValueError(f"{where}: {key} = {repr(value)[:60]} is no positive number; the model folder is damaged")
    return float(value)


def _feature(raw: Mapping[str, Any], feature: bool | str) -> bool:
    return bool(raw[feature]) if isinstance(feature, str) else feature


def _experts(raw: Mapping[str, Any], family: _Family, where: str) -> Experts:
    fields = ("n_routed_experts",) if family.shared else ("num_experts", "num_local_experts")
    count = _size(raw, next((name for name in fields if raw.get(name) is not None), fields[-1]), where)
    per_token = _size(raw, "num_experts_per_tok", where)
    if per_token > count:
        raise ValueError(
            f"{where}: num_experts_per_tok = {per_token} is more than its {count} experts; the model folder is damaged"
        )
    if per_token == 1 and raw["norm_topk_prob"]:
        raise ValueError(
            f"{where}: num_experts_per_tok = 1 is not supported with renormalised weights (the one expert's is always 1, so "
            "that the router would never learn)"
        )
    if not family.shared:
        return Experts(count, per_token, renormalize=bool(raw["norm_topk_prob"]))
    shared = _size(raw, "n_shared_experts", where) * _size(raw, "moe_intermediate_size", where)
    return Experts(
        count,
        per_token,
        True,
        biased=True,
        scale=_number(raw["routed_scaling_factor"], "routed_scaling_factor", where),
        shared_ffn_size=shared,
    )


def _check_sizes(spec: ModelSpec, where: str) -> None:
    problems = {
        f"num_key_value_heads = {spec.num_kv_heads} does not divide num_attention_heads = {spec.num_heads}": (
            spec.num_heads % spec.num_kv_heads
        ),
        f"first_k_dense_replace = {spec.dense_layers} leaves none of the {spec.num_layers} layers with experts": (
            not 0 <= spec.dense_layers < spec.num_layers
        ),
        f"partial_rotary_factor = {spec.rotary_fraction} of head_dim = {spec.head_dim} is no even number of dimensions": (
            spec.rotary_fraction != 1 and spec.head_dim * spec.rotary_fraction % 2
        ),
    }
    for problem, is_one in problems.items():
        if is_one:
            raise ValueError(f"{where}: {problem}; the model folder is damaged")
    plain = spec.hidden_size // spec.num_heads
    if spec.architecture == "Qwen2ForCausalLM" and spec.head_dim != plain:  # vLLM's Qwen2 does not read head_dim
        raise ValueError(
            f"{where}: head_dim = {spec.head_dim} is not supported for Qwen2 (only hidden_size / num_attention_heads = {plain})"
        )


def _refuse_unsupported(raw: Mapping[str, Any], family: _Family, where: str) -> None:
    for key, value in {**_SUPPORTED, **family.only}.items():
        if (raw.get(key, value) or None) != (value or None):  # null, false, 0 and an empty list all switch a feature off
            raise ValueError(f"{where}: {key} = {raw[key]!r} is not supported yet (only {value!r})")
    if not family.rotary_fraction:
        fractions = [raw.get("partial_rotary_factor"), _rope_parameters(raw).get("partial_rotary_factor")]
        if wrong := [fraction for fraction in fractions if fraction not in (None, 1)]:
            raise ValueError(f"{where}: partial_rotary_factor = {wrong[0]!r} is not supported yet (only 1)")
    kinds = set(raw.get("layer_types") or ()) - {"full_attention"}
    if kinds:
        raise ValueError(f"{where}: layer_types has {', '.join(sorted(kinds))}, which is not supported (only full_attention)")


def _rope_parameters(raw: Mapping[str, Any]) -> Any:
    """Of Transformers 5: ``rope_scaling`` of older folders comes first."""
    return raw.get("rope_scaling") or raw.get("rope_parameters") or {}


def _rope(raw: Mapping[str, Any], where: str) -> tuple[float, RopeScaling | None]:
    parameters = {"rope_theta": raw.get("rope_theta", 10000.0), **_rope_parameters(raw)}
    theta = _number(parameters["rope_theta"], "rope_theta", where)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3" or any(parameters.get(key) != value for key, value in LLAMA3_ROPE.items()):
        raise ValueError(f"{where}: rope scaling {parameters} is not supported; known: default, llama3 with {LLAMA3_ROPE}")
    return theta, RopeScaling(factor=_number(parameters["factor"], "rope scaling's factor", where))
