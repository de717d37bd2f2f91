"""Real Transformer Engine layers have the parameters that the bridge's table names, in every FP8 recipe; no GPU is needed.

Transformer Engine is not in requirements/cpu.txt, since its torch part is built from source (docs/reference/gpu.md).
"""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import run_program

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 96, "head_dim": 16}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}


def described(architecture: str, **changes: Any) -> dict[str, Any]:
    return {"architectures": [architecture], "hidden_act": "silu", **SIZES, **HEADS, **changes}


MODELS = {
    "Llama": described("LlamaForCausalLM"),
    "Llama-tied": described("LlamaForCausalLM", tie_word_embeddings=True),
    "Mistral": described("MistralForCausalLM", sliding_window=None),
    "Qwen2": described("Qwen2ForCausalLM"),
    "Qwen3": described("Qwen3ForCausalLM"),
    "Mixtral": described("MixtralForCausalLM", num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "Qwen3Moe": described("Qwen3MoeForCausalLM", num_experts=4, norm_topk_prob=True, **EXPERTS),
    "Glm4Moe": described("Glm4MoeForCausalLM", n_routed_experts=4, attention_bias=True, **EXPERTS),
}


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="transformer_engine is not installed")
def test_parameters_are_those_of_the_table(tmp_path: Path) -> None:
    models = tmp_path / "models.json"
    models.write_text(json.dumps(MODELS))
    found = json.loads(run_program("te_layouts", models).splitlines()[-1])
    assert len(found) == 4 * len(MODELS)
    assert not any(found.values()), found
