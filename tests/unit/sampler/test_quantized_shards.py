"""Shards put into models that quantise on arrival: vLLM's FP8 layers over two workers, against what vLLM loads from disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support.launch import run_world

SIZES: dict[str, Any] = {
    "vocab_size": 61,  # no multiple of TP, nor of what vLLM pads to
    "hidden_size": 160,  # blocks of 128 end within it
    "intermediate_size": 336,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
pytestmark = pytest.mark.slow

RANKS = range(2)
FP8_MAX = 448.0
Shards = dict[str, Tensor]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    models, out = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("out")
    for seed, name in enumerate(("old", "new")):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**SIZES)).bfloat16()
        with torch.no_grad():
            model.model.layers[0].mlp.down_proj.weight[:128] = 0.0  # whole blocks, and whole rows, of zeros
        model.save_pretrained(models / name)
    (out / "new").symlink_to(models / "new")
    run_world("quantized_shards", 2, models, out)
    return out


def shards(out: Path, kind: str, quantization: str) -> list[Shards]:
    return [load_file(out / f"{kind}-{quantization}-{rank}.safetensors") for rank in RANKS]


@pytest.mark.parametrize("quantization", ["fp8_per_channel", "fp8_per_tensor", "fp8_per_block"])
def test_updated_weights_and_scales_are_those_that_vllm_loads_from_disk(world: Path, quantization: str) -> None:
    for updated, loaded in zip(shards(world, "updated", quantization), shards(world, "loaded", quantization), strict=True):
        assert updated.keys() == loaded.keys()
        assert loaded["model.layers.0.mlp.down_proj.weight"].dtype == torch.float8_e4m3fn
        for name in loaded:
            assert torch.equal(updated[name].reshape(-1).view(torch.uint8), loaded[name].reshape(-1).view(torch.uint8)), name


def test_a_checkpoint_that_is_quantised_already_is_refused_by_the_name_of_its_layer(world: Path) -> None:
    for rank in RANKS:
        text = (world / f"refused-{rank}.txt").read_text()
        assert "model.layers.0.mlp.down_proj holds weights that were quantised before they were loaded" in text
        assert "rollout.server.quantization" in text
