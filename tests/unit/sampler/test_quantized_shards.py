"""Shards put into models that quantise on arrival: vLLM's own FP8 layers over two workers, against what vLLM loads from disk.

The scales are compared with float64 over the whole tensors, so that a worker which scaled by its own part alone would show.
"""

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


def original(out: Path, name: str) -> Tensor:
    """The whole tensor, float64, as vLLM stacks it."""
    parts = load_file(out / "new" / "model.safetensors")
    stacked = {"gate_up_proj": ("gate_proj", "up_proj")}.get(name, (name,))
    folder = "self_attn" if name == "o_proj" else "mlp"
    return torch.cat([parts[f"model.layers.0.{folder}.{part}.weight"].double() for part in stacked])


def half_spacing(scaled: Tensor) -> Tensor:
    """Half the distance between the e4m3 numbers around each value: 3 bits after the point, subnormal below 2^-6."""
    exponent = scaled.abs().clamp(min=2.0**-6).log2().floor()
    return 2.0 ** (exponent - 4)


def check_rounding(weight: Tensor, quantized: Tensor, scale: Tensor) -> None:
    error = (quantized.double() * scale - weight).abs()
    assert (error <= 1.001 * scale * half_spacing(weight / scale)).all()  # 1/scale, rounded to fp32, is multiplied with


@pytest.mark.parametrize(("layer", "split"), [("o_proj", 1), ("down_proj", 1), ("gate_up_proj", 0)])
def test_scales_per_channel_and_per_tensor_are_of_the_whole_tensor(world: Path, layer: str, split: int) -> None:
    whole = original(world, layer)
    folder = "self_attn" if layer == "o_proj" else "mlp"
    for quantization in ("fp8_per_channel", "fp8_per_tensor"):
        for rank, found in enumerate(shards(world, "updated", quantization)):
            part = gate_and_up(whole, rank) if split == 0 else whole.chunk(2, 1)[rank]
            amax = whole.abs().amax().view(1)
            if quantization == "fp8_per_channel":
                amax = rows(whole, rank, split).abs().amax(1, keepdim=True)
            scale = (amax / FP8_MAX).clamp(min=1 / (FP8_MAX * 512))
            name = f"model.layers.0.{folder}.{layer}.weight"
            torch.testing.assert_close(found[f"{name}_scale"].double(), scale)
            check_rounding(part, found[name].t(), scale)


def gate_and_up(whole: Tensor, rank: int) -> Tensor:
    gate, up = whole.chunk(2)
    return torch.cat([gate.chunk(2)[rank], up.chunk(2)[rank]])


def rows(whole: Tensor, rank: int, split: int) -> Tensor:
    return gate_and_up(whole, rank) if split == 0 else whole


def test_scales_per_block_are_of_blocks_of_the_shard_and_the_last_ones_are_partial(world: Path) -> None:
    whole = original(world, "down_proj")
    for rank, found in enumerate(shards(world, "updated", "fp8_per_block")):
        part = whole.chunk(2, 1)[rank]
        assert part.shape == (160, 168)
        scales = found["model.layers.0.mlp.down_proj.weight_scale_inv"].double()
        assert scales.shape == (2, 2)
        for i, block_rows in enumerate(part.split(128)):
            for j, block in enumerate(block_rows.split(128, 1)):
                expected = max(float(block.abs().amax()), 1e-4) / FP8_MAX  # vLLM keeps the scale of an empty block above 0
                assert float(scales[i, j]) == pytest.approx(expected, rel=1e-6)
        spread = scales.repeat_interleave(128, 0)[:160].repeat_interleave(128, 1)[:, :168]
        check_rounding(part, found["model.layers.0.mlp.down_proj.weight"], spread)
        assert not found["model.layers.0.mlp.down_proj.weight"][:128].double().any()


def test_a_checkpoint_that_is_quantised_already_is_refused_by_the_name_of_its_layer(world: Path) -> None:
    for rank in RANKS:
        text = (world / f"refused-{rank}.txt").read_text()
        assert "model.layers.0.mlp.down_proj holds weights that were quantised before they were loaded" in text
        assert "rollout.server.quantization" in text
