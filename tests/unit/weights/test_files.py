"""Model folders: everything that is wrong with one is said at once, and one that was not finished is not there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tepo_megatron.weights.architecture import ModelSpec, read_model_spec
from tepo_megatron.weights.layouts import MegatronParallel, megatron_layout
from tepo_megatron.weights.storage.hf_folder import load_into, write_model
from tepo_megatron.weights.table import tensor_shapes
from tests.support.disks import files_of_at_most

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 6,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 5,
    "hidden_act": "silu",
    "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=generator) for name, shape in tensor_shapes(read_model_spec(tmp_path)).items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def params_of(spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Parameters of the only rank, filled with a value that loading must overwrite."""
    layout = megatron_layout(spec, MegatronParallel(), 0)
    extents: dict[str, tuple[int, ...]] = {}
    for shard in layout.shards:
        before = extents.get(shard.param, (0,) * len(shard.param_box.stop))
        extents[shard.param] = tuple(max(a, b) for a, b in zip(before, shard.param_box.stop, strict=True))
    return {name: torch.full(extent, 7.0) for name, extent in extents.items()}


def load(folder: Path) -> dict[str, torch.Tensor]:
    spec = read_model_spec(folder)
    params = params_of(spec)
    load_into(folder, megatron_layout(spec, MegatronParallel(), 0), params)
    return params


def test_config_is_read_in_both_styles_of_rope(folder: Path) -> None:
    assert read_model_spec(folder).rope_theta == 500.0
    old = {key: value for key, value in CONFIG.items() if key != "rope_parameters"}
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    old |= {"rope_theta": 300.0, "rope_scaling": {"rope_type": "llama3", **scaling}}
    (folder / "config.json").write_text(json.dumps(old))
    spec = read_model_spec(folder)
    assert spec.rope_theta == 300.0
    assert spec.rope_scaling is not None
    assert spec.rope_scaling.factor == 8.0


def test_every_wrong_tensor_is_named_at_once_and_nothing_is_loaded(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(3, 6)
    tensors["model.layers.9.extra.weight"] = torch.zeros(2)
    save_file(tensors, folder / "model.safetensors")
    params = params_of(read_model_spec(folder))
    with pytest.raises(ValueError, match="does not hold the model") as caught:
        load_into(folder, megatron_layout(read_model_spec(folder), MegatronParallel(), 0), params)
    assert "missing: model.norm.weight" in str(caught.value)
    assert "unexpected: model.layers.9.extra.weight" in str(caught.value)
    assert "misshapen: model.layers.1.mlp.up_proj.weight is (3, 6), config.json makes it (8, 6)" in str(caught.value)
    assert all((param == 7).all() for param in params.values())


@pytest.mark.parametrize("shard_bytes", [10, 300, 10**9])
def test_written_models_load_back_however_they_are_divided(folder: Path, tmp_path: Path, shard_bytes: int) -> None:
    from transformers import LlamaForCausalLM

    tensors = load_file(folder / "model.safetensors")
    write_model(tmp_path / "out", tensors.items(), source=folder, dtype=torch.float32, shard_bytes=shard_bytes)
    assert (tmp_path / "out" / "model.safetensors.index.json").exists() == (shard_bytes < 10**9)
    model = LlamaForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    for name, value in model.state_dict().items():
        assert torch.equal(value, tensors[name]), name
    for name, param in load(tmp_path / "out").items():
        assert torch.equal(param, load(folder)[name]), name


def test_a_full_disk_is_told_in_a_sentence(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    with files_of_at_most(1000), pytest.raises(RuntimeError, match=r"part-00001.safetensors could not be written: .*Make room"):
        write_model(tmp_path / "out", tensors.items(), source=folder, dtype=torch.float32)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob("*.partial"))


def test_an_export_that_fails_leaves_what_was_there_and_nothing_half_written(folder: Path, tmp_path: Path) -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "model.norm.weight", torch.zeros(6)
        raise OSError(28, "No space left on device")

    out = tmp_path / "out"
    write_model(out, load_file(folder / "model.safetensors").items(), source=folder, dtype=torch.float32)
    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(OSError, match="No space left"):
        write_model(out, broken(), source=folder, dtype=torch.float32)
    assert (out / "model.safetensors").read_bytes() == before
    assert not list(tmp_path.glob("*.partial"))
