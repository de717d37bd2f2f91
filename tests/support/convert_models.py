"""Small models on disk, as Hugging Face folders and as checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tepo_megatron.weights.architecture import read_model_spec
from tepo_megatron.weights.layouts import MegatronParallel, megatron_layout
from tepo_megatron.weights.storage.hf_folder import write_model
from tepo_megatron.weights.storage.stored import box_key, write_boxes
from tepo_megatron.weights.table import tensor_shapes

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 12,
    "intermediate_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "vocab_size": 13,
    "dtype": "float32",
}


def make_model(
    folder: Path, *, dtype: torch.dtype = torch.float32, seed: int = 0, shard_bytes: int = 2000, **changes: Any
) -> Path:
    """A model folder with random weights in several files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes, "dtype": str(dtype).removeprefix("torch.")}))
    (folder / "tokenizer.json").write_text("{}")
    generator = torch.Generator().manual_seed(seed)
    shapes = tensor_shapes(read_model_spec(folder))
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    out = folder.with_name(folder.name + "-written")
    write_model(out, tensors.items(), source=folder, dtype=dtype, shard_bytes=shard_bytes)
    shutil.rmtree(folder)
    out.rename(folder)
    return folder


def make_checkpoint(model: Path, out: Path, *, tp: int, pp: int) -> Path:
    """What the engine's ranks write, as far as weights go."""
    spec, source = read_model_spec(model), all_tensors(model)
    (out / "shards").mkdir(parents=True)
    for rank in range(tp * pp):
        layout = megatron_layout(spec, MegatronParallel(tp=tp, pp=pp), rank)
        boxes = (
            (box_key(kind, shard.tensor, shard.box), source[shard.tensor][shard.box.slices].float().clone())
            for shard in layout.shards
            for kind in ("master", "exp_avg")
        )
        assert write_boxes(out, f"rank{rank:05d}", boxes, metadata={}, file_bytes=3000).error is None
    (out / "state.json").write_text(json.dumps({"step": 1, "model": str(model)}))
    return out


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_same(found: Path, expected: Path) -> None:
    ours, theirs = all_tensors(found), all_tensors(expected)
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name
