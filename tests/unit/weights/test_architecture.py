"""config.json: every known family is read, and what would be computed wrongly is refused; so are routes of another model."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from safetensors.torch import load_file

from tepo_megatron.weights.architecture import FAMILIES, Experts, ModelSpec, RopeScaling, read_model_spec
from tepo_megatron.weights.table import tensor_shapes
from tests.support.random_models import random_model
from tests.support.reshard_models import MOE, small_spec

SIZES: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "vocab_size": 17}
SIZES |= {"num_attention_heads": 6, "num_key_value_heads": 3}
UNLIKE: dict[str, dict[str, Any]] = {
    "Glm4MoeForCausalLM": {"n_shared_experts": 2, "n_routed_experts": 5, "moe_intermediate_size": 28},
    "MixtralForCausalLM": {"num_local_experts": 3},
    "Qwen3MoeForCausalLM": {"num_experts": 5, "moe_intermediate_size": 28},
}
"""Sizes of experts that are no other size, so that shapes tell them apart."""


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_tensors_are_those_that_transformers_writes(architecture: str, tied: bool, tmp_path: Path) -> None:
    """In memory transformers stacks the experts; on disk every expert has tensors of its own. A tied head occurs once."""
    changes = UNLIKE.get(architecture, {})
    random_model(architecture.removesuffix("ForCausalLM"), tie_word_embeddings=tied, **changes).save_pretrained(tmp_path)
    written = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    assert tensor_shapes(read_model_spec(tmp_path)) == written


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_silent_config_means_what_transformers_takes_it_for(architecture: str) -> None:
    """Only what cannot be left out is given; published folders of old do leave out the rest."""
    raw = {**SIZES, "num_attention_heads": 32, "hidden_size": 128}
    del raw["num_key_value_heads"]
    if architecture == "MistralForCausalLM":
        raw["sliding_window"] = None
    spec = ModelSpec.of({**raw, "architectures": [architecture]}, "config")
    config = getattr(transformers, architecture.replace("ForCausalLM", "Config"))(**raw)
    assert spec.num_kv_heads == config.num_key_value_heads
    assert spec.head_dim == (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    assert spec.norm_eps == config.rms_norm_eps
    assert spec.tied_embeddings == config.tie_word_embeddings
    assert spec.rope_theta == config.rope_parameters["rope_theta"]
    if spec.experts is not None:
        assert spec.ffn_size == getattr(config, "moe_intermediate_size", config.intermediate_size)
        assert (spec.experts.count, spec.experts.per_token) == (config.num_local_experts, config.num_experts_per_tok)
        assert spec.experts.renormalize == getattr(config, "norm_topk_prob", True)  # Mixtral has no choice
    if architecture == "Glm4MoeForCausalLM":
        assert (spec.dense_layers, spec.dense_ffn_size) == (config.first_k_dense_replace, config.intermediate_size)
        assert spec.experts.shared_ffn_size == config.n_shared_experts * config.moe_intermediate_size
        assert spec.experts.scale == config.routed_scaling_factor
        assert (spec.qkv_bias, spec.qk_norm) == (config.attention_bias, config.use_qk_norm)
        assert spec.rotary_fraction == config.rope_parameters["partial_rotary_factor"]


@pytest.mark.parametrize(
    ("architecture", "change", "message"),
    [
        ("Qwen2MoeForCausalLM", {}, r"Qwen2MoeForCausalLM is not known; known: LlamaForCausalLM, MistralForCausalLM, Qwen2"),
        ("MixtralForCausalLM", {"sliding_window": 4096}, r"sliding_window = 4096 is not supported yet \(only None\)"),
        ("MixtralForCausalLM", {"router_jitter_noise": 0.1}, r"router_jitter_noise = 0.1 is not supported yet \(only 0.0\)"),
        ("MixtralForCausalLM", {"output_router_logits": True}, r"output_router_logits = True is not supported"),
        ("MixtralForCausalLM", {"num_experts_per_tok": 9}, r"num_experts_per_tok = 9 is more than its 8 experts"),
        ("MixtralForCausalLM", {"num_experts_per_tok": 1}, r"num_experts_per_tok = 1 is not supported with renormalised"),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": [1]}, r"mlp_only_layers = \[1\] is not supported yet \(only \[\]\)"),
        ("Qwen3MoeForCausalLM", {"decoder_sparse_step": 2}, r"decoder_sparse_step = 2 is not supported yet \(only 1\)"),
        ("Glm4MoeForCausalLM", {"n_group": 2}, r"n_group = 2 is not supported yet \(only 1\)"),
        ("Glm4MoeForCausalLM", {"norm_topk_prob": False}, r"norm_topk_prob = False is not supported yet"),
        ("Glm4MoeForCausalLM", {"first_k_dense_replace": 2}, r"first_k_dense_replace = 2 leaves none of the 2 layers with exp"),
        ("Glm4MoeForCausalLM", {"head_dim": 6}, r"partial_rotary_factor = 0.5 of head_dim = 6 is no even number"),
        ("MistralForCausalLM", {}, r"sliding_window = 4096 is not supported"),
        ("Qwen2ForCausalLM", {"use_sliding_window": True}, r"use_sliding_window = True is not supported"),
        ("Qwen2ForCausalLM", {"head_dim": 8}, r"head_dim = 8 .* hidden_size / num_attention_heads = 4"),
        ("Qwen3ForCausalLM", {"attention_bias": True}, r"attention_bias = True is not supported"),
        ("Qwen3ForCausalLM", {"layer_types": ["full_attention", "sliding_attention"]}, r"layer_types has sliding_attention"),
        ("LlamaForCausalLM", {"logit_scale": 0.0625}, r"logit_scale = 0.0625 is not supported yet \(only 1.0\)"),
        ("Qwen3ForCausalLM", {"final_logit_softcapping": 30.0}, r"final_logit_softcapping = 30.0 is not supported yet"),
        ("MixtralForCausalLM", {"lm_head_bias": True}, r"lm_head_bias = True is not supported yet \(only False\)"),
        ("LlamaForCausalLM", {"is_causal": False}, r"is_causal = False is not supported yet \(only True\)"),
        ("LlamaForCausalLM", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor = 0.5 is not supported yet \(only 1\)"),
        (
            "MixtralForCausalLM",
            {"rope_parameters": {"partial_rotary_factor": 0.5}, "sliding_window": 0},
            r"factor = 0.5 is not",
        ),
        ("Qwen3ForCausalLM", {"rope_scaling": {"type": "default", "partial_rotary_factor": 0.25}}, r"factor = 0.25 is not"),
        ("LlamaForCausalLM", {"hidden_act": "gelu"}, r"hidden_act = 'gelu' is not supported"),
        ("LlamaForCausalLM", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn"}}, r"rope scaling .*yarn.* is not"),
        ("LlamaForCausalLM", {"hidden_size": None}, r"config.json lacks 'hidden_size'"),
        ("LlamaForCausalLM", {"mlp_bias": True}, r"mlp_bias = True is not supported"),
        ("LlamaForCausalLM", {"num_key_value_heads": 4}, r"num_key_value_heads = 4 does not divide num_attention_heads = 6"),
        ("LlamaForCausalLM", {"vocab_size": "many"}, r"vocab_size = 'many' is no positive whole number"),
        ("LlamaForCausalLM", {"num_hidden_layers": 0}, r"num_hidden_layers = 0 is no positive whole number"),
        ("Glm4MoeForCausalLM", {"first_k_dense_replace": -1}, "first_k_dense_replace = -1 is no whole number from 0"),
        ("Glm4MoeForCausalLM", {"first_k_dense_replace": 1.5}, "first_k_dense_replace = 1.5 is no whole number from 0"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(architecture: str, change: dict[str, Any], message: str) -> None:
    raw = {**SIZES, "architectures": [architecture], **change}
    with pytest.raises(ValueError, match=message):
        ModelSpec.of({name: value for name, value in raw.items() if value is not None}, "config.json")


def test_both_styles_of_rope_are_read() -> None:
    raw: dict[str, Any] = {**SIZES, "architectures": ["LlamaForCausalLM"]}
    new = raw | {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    old = raw | {"rope_theta": 300.0, "rope_scaling": {"rope_type": "llama3", **scaling}}
    both = old | {"rope_parameters": {"rope_type": "default"}}
    outside = raw | {"rope_theta": 400.0, "rope_parameters": {"rope_type": "default"}}
    specs = [ModelSpec.of(config, "config.json") for config in (new, old, both, outside)]
    expected = [(500.0, None), (300.0, RopeScaling(8.0)), (300.0, RopeScaling(8.0)), (400.0, None)]
    assert [(spec.rope_theta, spec.rope_scaling) for spec in specs] == expected


SPEC = small_spec(architecture="MixtralForCausalLM", num_layers=3, experts=MOE["MixtralForCausalLM"])


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (np.zeros((7, 3, 2), np.uint8), "7 × 3 × 2, and 7 tokens of this model make 6 × 3 × 2 .* another length"),
        (np.zeros((6, 4, 2), np.uint8), "6 × 4 × 2, and 7 tokens of this model make 6 × 3 × 2"),
        (np.zeros((6, 3, 8), np.uint8), "6 × 3 × 8, and 7 tokens"),
        (np.full((6, 3, 2), 4, np.uint8), "with expert 4, and this model has 4: it is of another model"),
        (np.full((6, 3, 2), -1, np.int16), "with expert -1, and this model has 4"),
    ],
)
def test_a_record_of_another_model_or_length_is_one_sentence(routes: np.ndarray, message: str) -> None:
    assert re.search(message, SPEC.routes_fault(routes, 7) or "")


def test_a_record_that_fits_has_no_fault_and_a_dense_model_no_record() -> None:
    assert SPEC.routes_fault(np.full((6, 3, 2), 3, np.uint8), 7) is None
    assert SPEC.routes_fault(np.zeros((0, 3, 2), np.uint8), 1) is None
    fault = replace(SPEC, experts=None).routes_fault(np.zeros((6, 3, 2), np.uint8), 7)
    assert fault == "has a routing record, and MixtralForCausalLM has no experts"


@pytest.mark.parametrize(("count", "dtype", "size"), [(8, np.uint8, 1), (255, np.uint8, 1), (256, np.int16, 2)])
def test_a_byte_tells_255_experts_and_none_apart(count: int, dtype: type, size: int) -> None:
    spec = replace(SPEC, experts=Experts(count, 2, renormalize=True))
    assert spec.routes_dtype == np.dtype(dtype)
    assert spec.route_bytes == 3 * 2 * size
