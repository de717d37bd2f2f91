"""What the choice of layers comes to in the modules that Megatron builds from it; one world builds all."""

import contextlib
import os
import warnings
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tepo_megatron.config import EngineConfig, RunConfig
from tepo_megatron.weights.architecture import Experts, ModelSpec, RopeScaling
from tests.support.launch import run_dist

pytestmark = pytest.mark.slow

TOKENS, VOCABULARY, LAYERS = 6, 5, 2
SPEC = ModelSpec("LlamaForCausalLM", LAYERS, 8, 2, 1, 4, 16, VOCABULARY, False, 1e-5, 1e4, None, 64)
RECIPES = ("none", "delayed", "tensorwise", "blockwise")


def look(rank: int, world: int) -> dict[str, Any]:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import RowParallelLinear

    from tepo_megatron.trainer.megatron.parallel import platform

    warnings.filterwarnings("ignore")
    cpu = platform.select_platform(EngineConfig(platform="cpu"))
    ranks = cpu.initialize(RunConfig().engine.parallel, seed=0, timeout=timedelta(hours=2))
    RowParallelLinear.fuse_wgrad_accumulation = None  # a stand-in for Transformer Engine's

    def fusing(model: Any) -> list[Any]:
        return [module.fuse_wgrad_accumulation for module in model.modules() if isinstance(module, RowParallelLinear)]

    chosen = {"NVTE_FLASH_ATTN": "1", "NVTE_FUSED_ATTN": "0"}  # Transformer Engine reads what a user has set
    with cpu.megatron(), mock.patch.dict(os.environ, chosen):
        return {
            "fuses": [fusing(build(cpu, ranks, model={"lora": lora})) for lora in (None, {"rank": 2})],
            "router": device_of_a_router(cpu, ranks),
            "recipes": {recipe: seen_in_a_forward(cpu, ranks, recipe) for recipe in RECIPES},
            "tables": tables(cpu, ranks),
            "timeout": parallel_state.get_tensor_model_parallel_group()._get_backend(torch.device("cpu")).options._timeout,
        }


def device_of_a_router(cpu: Any, ranks: Any) -> str:
    spec = replace(SPEC, architecture="MixtralForCausalLM", experts=Experts(4, 2, renormalize=True))
    with mock.patch("torch.cuda.current_device", return_value=torch.device("meta")):
        model = build(cpu, ranks, spec=spec)
    (device,) = {str(param.device) for name, param in model.named_parameters() if name.endswith("router.weight")}
    return device


def tables(cpu: Any, ranks: Any) -> dict[str, Any]:
    """Of two lengths, without and with Llama 3's scaling: a model's, and Megatron's."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    specs = [replace(SPEC, rope_theta=1e8, rope_scaling=scaling) for scaling in (None, RopeScaling(8.0))]
    rotaries = [build(cpu, ranks, spec).rotary_pos_emb for spec in specs]
    ours = [rotary(length, packed_seq=True) for rotary in rotaries for length in (3, TOKENS)]
    remembered = RotaryEmbedding.forward.cache_info().currsize
    megatrons = [RotaryEmbedding.forward(rotary, length, packed_seq=True) for rotary in rotaries for length in (3, TOKENS)]
    return {"ours": ours, "remembered": remembered, "megatrons": megatrons}


def build(cpu: Any, ranks: Any, spec: ModelSpec = SPEC, **sections: Any) -> Any:
    from tepo_megatron.trainer.megatron.model.model import LOCAL
    from tepo_megatron.trainer.megatron.policy import PolicyBuilder

    run = RunConfig.model_validate({**sections, "model": {"dtype": "float32", **sections.get("model", {})}})
    return PolicyBuilder(run, spec, Path(), cpu, LOCAL, ranks, ())._chunks()[1][0]


def seen_in_a_forward(cpu: Any, ranks: Any, recipe: str) -> dict[str, Any]:
    """Which linears compute within Megatron's FP8 context, for which a stand-in is put here; and what the head gives."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer import transformer_block

    model = build(cpu, ranks, model={"dtype": "bfloat16"}, engine={"fp8": {"recipe": recipe}})
    depth = 0

    @contextlib.contextmanager
    def context(*_: Any, **__: Any) -> Iterator[None]:
        nonlocal depth
        depth += 1
        yield
        depth -= 1

    transformer_block.get_fp8_context = context
    within: dict[str, bool] = {}
    inputs: list[torch.Tensor] = []
    for name, module in model.named_modules():
        if name.rpartition(".")[2].startswith(("linear_", "output_layer", "word_embeddings")):
            module.register_forward_pre_hook(lambda _module, _inputs, name=name: within.update({name: depth > 0}))
    model.output_layer.register_forward_pre_hook(lambda _module, args: inputs.append(args[0]))
    ids, offsets = torch.arange(TOKENS)[None] % VOCABULARY, torch.tensor([0, TOKENS], dtype=torch.int32)
    packed = PackedSeqParams("thd", offsets, offsets, max_seqlen_q=TOKENS, max_seqlen_kv=TOKENS)
    with torch.no_grad():
        logits = model(ids, torch.arange(TOKENS)[None], None, packed_seq_params=packed)
        weight = model.output_layer.weight
        exact = inputs[0].double() @ weight.double().t()
    return {"within": within, "logits": logits, "exact": exact, "weight": (weight.dtype, tuple(weight.shape))}


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    (report,) = run_dist(1, look)
    return report


def test_megatrons_groups_wait_as_long_as_the_world(seen: dict[str, Any]) -> None:
    """The watch must report a rank that hangs before a group gives up; Megatron's own limit is 30 minutes."""
    assert seen["timeout"] == timedelta(hours=2)


def test_a_router_is_where_the_other_weights_are(seen: dict[str, Any]) -> None:
    """Megatron moves it in the first forward pass, after the optimizer and the digests have met it."""
    assert seen["router"] == "meta"


def test_rotary_tables_are_megatrons_and_are_not_remembered(seen: dict[str, Any]) -> None:
    """Its cache would hold 32 of them, of so many lengths, on the GPU."""
    tables = seen["tables"]
    assert all(map(torch.equal, tables["ours"], tables["megatrons"]))
    assert [len(table) for table in tables["ours"]] == [3, TOKENS] * 2
    assert not torch.equal(tables["ours"][1], tables["ours"][3])
    assert tables["remembered"] == 0


def test_linears_that_can_add_to_gradients_in_fp32_do_so_without_apex_unless_there_are_adapters(seen: dict[str, Any]) -> None:
    assert seen["fuses"] == [[True] * 2 * LAYERS, [False] * 2 * LAYERS]


def test_fp8_is_for_the_linears_of_the_layers_and_not_for_the_head(seen: dict[str, Any]) -> None:
    """Nor for the embedding: the vocabulary needs no multiple of 16, and logits are products in the parameters' dtype."""
    for recipe, report in seen["recipes"].items():
        assert len(report["within"]) == 4 * LAYERS + 2
        for name, within in report["within"].items():
            assert within == (recipe != "none" and name.startswith("decoder.layers.")), name
        assert report["weight"] == (torch.bfloat16, (VOCABULARY, 8))
        assert report["logits"].dtype == torch.bfloat16
        torch.testing.assert_close(report["logits"].double().flatten(), report["exact"].flatten(), atol=1e-3, rtol=2**-7)
