"""The layout of LoRA adapters follows that of the weights, and PEFT folders of anything else are refused."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tepo_megatron.weights import adapters
from tepo_megatron.weights.adapters import AdapterBlock, adapted_tensors, adapter_layouts, adapter_names, adapter_shapes
from tepo_megatron.weights.architecture import ModelSpec
from tepo_megatron.weights.layouts import MegatronParallel
from tepo_megatron.weights.storage.hf_folder import AdapterSettings, check_peft_folder, load_adapters
from tepo_megatron.weights.table import tensor_shapes
from tepo_megatron.weights.transfer.full_tensors import GatherPlan
from tests.support.reshard_models import MOE, Case, cases, parameters, small_spec

RANK = 2
TARGETS = ["q_proj", "o_proj"]


@given(case=cases(), seed=st.integers(0, 2**31 - 1), some=st.booleans())
def test_parts_of_products_are_products_of_parts(case: Case, seed: int, some: bool) -> None:
    """On every rank of any split B · A, put where the blocks say, is that part of the whole model's B · A."""
    layouts, shapes = case.source.layouts(case.spec), tensor_shapes(case.spec)
    tensors = adapted_tensors(shapes, ["q_proj", "v_proj"] if some else ["all-linear"])
    generator = torch.Generator().manual_seed(seed)
    wanted = adapter_shapes(shapes, tensors, RANK)
    whole = {name: torch.randint(-9, 9, shape, generator=generator) for name, shape in wanted.items()}
    adapted = adapter_layouts(layouts, tensors, RANK)
    GatherPlan(adapted)  # the ranks together hold everything
    for layout, local in zip(layouts, parameters(adapted, whole), strict=True):
        for tensor, shards in layout.by_tensor(tensors).items():
            (a, b), (param,) = adapter_names(tensor), {shard.param for shard in shards}
            product = local[b] @ local[a]
            merged = torch.zeros(layout.params[param], dtype=torch.int64)
            for block in AdapterBlock.of(shards):
                merged[block.param_rows] += product[block.local_rows]
            for shard in shards:
                expected = (whole[b] @ whole[a])[shard.box.slices]
                assert torch.equal(merged[shard.param_box.slices], expected)


def test_a_layout_that_ranks_share_is_adapted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = MegatronParallel(dp=3, tp=2).layouts(small_spec())
    one_by_one = [adapter_layouts([layout], ["lm_head.weight"], RANK)[0] for layout in layouts]
    counted = mock.Mock(side_effect=adapters._adapter_layout)
    monkeypatch.setattr(adapters, "_adapter_layout", counted)
    assert adapter_layouts(layouts, ["lm_head.weight"], RANK) == one_by_one
    assert counted.call_count == 2


def test_linear_layers_are_known_by_their_names() -> None:
    dense = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

    def linear_modules(spec: ModelSpec) -> list[str]:
        return list(dict.fromkeys(tensor.split(".")[-2] for tensor in adapted_tensors(tensor_shapes(spec), ["all-linear"])))

    assert linear_modules(small_spec()) == dense
    experts = {name: linear_modules(small_spec(architecture=name, experts=MOE[name])) for name in MOE}
    mixtral = [*dense[:4], "w1", "w3", "w2"]
    assert experts == {  # and no router
        "MixtralForCausalLM": mixtral, "Qwen3MoeForCausalLM": dense, "Glm4MoeForCausalLM": dense,
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"names q_prj, w1, which match nothing in this model; .* are q_proj, .*all-linear"):
        adapted_tensors(tensor_shapes(small_spec()), ["q_prj", "o_proj", "w1"])


@pytest.mark.parametrize(
    ("path", "name", "revision"),
    [("hub:some/model@v1", "some/model", "v1"), ("hub:some/model", "some/model", None), ("builtin:tiny", None, None)],
)
def test_peft_can_open_the_base_model(path: str, name: str | None, revision: str | None, tmp_path: Path) -> None:
    folder = Path(os.path.relpath(tmp_path))
    AdapterSettings(RANK, 4, False, 0.0, ()).write(tmp_path / "lora", {}, base_model=path, folder=folder)
    config = json.loads((tmp_path / "lora" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == (name or str(tmp_path), revision)


Change = Callable[[Path], None]


def change_config(**changes: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def change_tensors(changed: Callable[[str, torch.Tensor], tuple[str, torch.Tensor]]) -> Change:
    def change(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        save_file(dict(changed(*item) for item in load_file(path).items()), path)

    return change


def rename(old: str, new: str) -> Change:
    return change_tensors(lambda name, tensor: (name.replace(old, new), tensor))


def cut_short(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-9])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_config(r=9), r"r is 9, and model\.lora\.rank is 2"),
        (change_config(lora_alpha=1), r"lora_alpha is 1, and model\.lora\.alpha is 4"),
        (change_config(use_rslora=True), r"use_rslora is True, and model\.lora\.rslora is False"),
        (change_config(init_lora_weights="pissa"), r"init_lora_weights = 'pissa' is not supported"),
        (change_config(use_dora=True), r"use_dora = True is not supported \(only False\)"),
        (change_config(modules_to_save=["lm_head"]), r"modules_to_save = \['lm_head'\] is not supported"),
        (change_config(rank_pattern={"q_proj": 4}), r"rank_pattern = .* is not supported"),
        (rename("layers.3.", "layers.4."), r"(?s)missing: .*layers\.3.*not of this model.*layers\.4\."),
        (rename("q_proj", "k_proj"), r"(?s)missing: .*q_proj.*or not in model\.lora\.target_modules: .*k_proj"),
        (lambda folder: (folder / "adapter_config.json").unlink(), r"has no adapter_config\.json and"),
        (lambda folder: (folder / "adapter_config.json").write_text("{"), r"adapter_config\.json is damaged"),
        (cut_short, r"damaged or cut short"),
        (change_tensors(lambda name, tensor: (name, tensor[:, 1:].clone())), r"layers\.0.* is \(2, 5\), and .* needs \(2, 6\)"),
    ],
)
def test_a_folder_comes_back_as_it_was_and_another_is_refused(tmp_path: Path, change: Change, message: str) -> None:
    shapes = tensor_shapes(small_spec())
    wanted = adapter_shapes(shapes, adapted_tensors(shapes, TARGETS), RANK)
    tensors = {name: torch.randn(shape) for name, shape in wanted.items()}
    AdapterSettings(RANK, 4, False, 0.0, ("o_proj", "q_proj")).write(
        tmp_path / "lora", tensors, base_model="m", folder=tmp_path
    )
    nulls = dict.fromkeys(("fan_in_fan_out", "rank_pattern", "use_dora", "use_rslora", "modules_to_save"))
    check_peft_folder(tmp_path / "lora", wanted, rank=RANK, alpha=4, rslora=False)
    change_config(**nulls)(tmp_path / "lora")
    check_peft_folder(tmp_path / "lora", wanted, rank=RANK, alpha=4, rslora=False)
    (layout,) = adapter_layouts(MegatronParallel().layouts(small_spec()), adapted_tensors(shapes, TARGETS), RANK)
    back = {name: torch.empty(shape) for name, shape in layout.params.items()}
    load_adapters(tmp_path / "lora", layout, back)
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)
    change(tmp_path / "lora")
    with pytest.raises(ValueError, match=message):
        check_peft_folder(tmp_path / "lora", wanted, rank=RANK, alpha=4, rslora=False)
