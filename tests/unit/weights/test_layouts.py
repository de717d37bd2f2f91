"""Layouts: every element of every tensor lies on the ranks exactly once (or identically more than once), wherever it is
split.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.parallel_state import RankGenerator
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from tepo_megatron.weights.layouts import (
    MegatronParallel,
    VllmParallel,
    megatron_layout,
    megatron_ranks,
    pipeline_stages,
    vllm_ranks,
)
from tepo_megatron.weights.table import tensor_shapes
from tepo_megatron.weights.transfer.full_tensors import GatherPlan
from tests.support.reshard_models import MOE, Case, cases, small_spec

BASE = small_spec(num_heads=4, num_kv_heads=2, ffn_size=8)


@given(cases())
def test_chosen_sources_cover_each_element_once(case: Case) -> None:
    plan = GatherPlan(megatron_ranks(case.spec, case.source))
    for name, shape in tensor_shapes(case.spec).items():
        writes = np.zeros(shape, dtype=int)
        for _, shard in plan.owners[name]:
            assert shard.box.shape == shard.param_box.shape
            writes[shard.box.slices] += 1
        assert (writes == 1).all(), name


def test_a_tensor_that_no_rank_holds_is_named() -> None:
    half = megatron_layout(BASE, MegatronParallel(tp=2), 0)
    with pytest.raises(ValueError, match=r"hold \d+ of \d+ elements of model.embed_tokens.weight"):
        GatherPlan([half])


@pytest.mark.parametrize(
    ("family", "parallel", "message"),
    [
        ("Llama", MegatronParallel(tp=3), "tp = 3 does not divide the model's 8 attention heads"),
        ("Llama", MegatronParallel(tp=8), "tp = 8 does not divide the model's 4 key/value heads"),
        ("Llama", MegatronParallel(pp=3), "4 layers do not split over 3 pipeline stages"),
        ("Llama", MegatronParallel(dp=2, ep=2), r"engine\.parallel\.ep = 2 is for models with experts; unset it for Llama"),
        ("Llama", MegatronParallel(tp=2, etp=1), r"engine\.parallel\.etp = 1 is for models with experts"),
        ("Llama", MegatronParallel(pp=2, stages=((range(0, 2),), (range(3, 4),))), "hold each of the model's 4 layers once"),
        ("Mixtral", MegatronParallel(dp=3, ep=3), r"ep = 3 does not divide the model's 4 experts; use a divisor of 4"),
        ("Mixtral", MegatronParallel(dp=3, etp=3), r"etp = 3 does not divide the model's 16 MLP size of an expert"),
        ("Qwen3Moe", MegatronParallel(tp=2, ep=2), r"ep × etp = 2 × 2, does not divide the tp × dp = 2 × 1 ranks"),
    ],
)
def test_a_split_that_does_not_fit_is_refused(family: str, parallel: MegatronParallel, message: str) -> None:
    name = f"{family}ForCausalLM"
    with pytest.raises(ValueError, match=message):
        megatron_ranks(small_spec(architecture=name, experts=MOE.get(name)), parallel)


@pytest.mark.parametrize(
    ("layers", "pp", "chunks", "first", "last"),
    [
        (8, 2, 1, None, None),
        (80, 4, 5, None, None),
        (126, 8, 1, 15, 15),
        (10, 4, 1, None, 1),
        (14, 3, 2, 4, 6),
        (5, 2, 1, 2, 3),
    ],
)
def test_stages_are_those_that_megatron_builds(layers: int, pp: int, chunks: int, first: int | None, last: int | None) -> None:
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=8,
        num_attention_heads=2,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
        pipeline_dtype=torch.float32,
    )
    for stage, held in enumerate(pipeline_stages(layers, pp, chunks=chunks, first=first, last=last)):
        for number, chunk in enumerate(held):
            vp_stage = number if chunks > 1 else None
            assert chunk.start == get_transformer_layer_offset(config, vp_stage, stage)
            assert len(chunk) == get_num_layers_to_build(config, vp_stage, stage)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((7, 2, {}), "7 layers do not split over 2 pipeline stages; change pp"),
        ((7, 3, {"first": 2, "last": 2, "chunks": 2}), "2 chunks do not divide a pipeline stage of 3 layers"),
        ((7, 2, {"first": 2, "last": 4}), "7 layers do not split over 2 pipeline stages with 2 in the first and 4 in the last"),
        ((4, 8, {}), "4 layers do not split over 8"),
        ((4, 1, {"chunks": 2}), "a virtual pipeline size of 2 needs a pipeline"),
        ((4, 2, {"first": 0}), "1 chunks do not divide a pipeline stage of 0 layers"),
    ],
)
def test_stages_that_cannot_be_are_refused(arguments: tuple[int, int, dict[str, int]], message: str) -> None:
    layers, pp, options = arguments
    with pytest.raises(ValueError, match=message):
        pipeline_stages(layers, pp, **options)


def test_a_server_that_cannot_be_split_so_is_refused_for_every_reason() -> None:
    with pytest.raises(ValueError, match="cannot split the model so") as caught:
        vllm_ranks(replace(BASE, num_kv_heads=4), VllmParallel(tp=3, pp=5))
    for reason in (
        "tp = 3 does not divide the model's 4 attention heads",
        "tp = 3 does not divide the model's 8 MLP size",
        "tp = 3 does not divide the model's 64 rows of the vocabulary",
        "tp = 3 neither divides the model's 4 key/value heads nor is a multiple of them",
        "pp = 5 is more than the model's 4 layers",
    ):
        assert reason in str(caught.value)


# -- experts


@st.composite
def grids(draw: st.DrawFn) -> MegatronParallel:
    tp, pp, ep, etp = (draw(st.sampled_from([1, 2, 3, 4])) for _ in range(4))
    copies = draw(st.integers(1, 3))
    dp, left = divmod(ep * etp * copies, tp)
    return MegatronParallel(tp, pp, dp, ep=ep, etp=etp) if not left else MegatronParallel(tp, pp, ep * copies, ep=ep)


@given(grids())
def test_ranks_stand_where_megatron_puts_them(parallel: MegatronParallel) -> None:
    """Against the generator of Megatron's process groups: a rank's place in its group is its coordinate."""
    experts = parallel.world_size // (parallel.pp * parallel.ep * parallel.expert_tp)
    dense = RankGenerator(parallel.tp, 1, parallel.dp, parallel.pp, 1, "tp-cp-ep-dp-pp")
    sparse = RankGenerator(parallel.expert_tp, parallel.ep, experts, parallel.pp, 1, "tp-cp-ep-dp-pp")

    def coordinate(generator: RankGenerator, axis: str) -> dict[int, int]:
        return {rank: at for group in generator.get_ranks(axis) for at, rank in enumerate(group)}

    expected = [coordinate(dense, axis) for axis in ("tp", "dp", "pp")] + [
        coordinate(sparse, axis) for axis in ("tp", "ep", "dp")
    ]
    for rank in range(parallel.world_size):
        assert tuple(parallel.coordinates(rank)) == tuple(axis[rank] for axis in expected)


@pytest.mark.parametrize("family", MOE)
def test_names_of_transformer_engines_grouped_linears(family: str) -> None:
    """Each rank counts its experts from 0; the norm before the router stays a parameter of its own."""
    spec = small_spec(architecture=family, experts=MOE[family])
    layout = megatron_layout(spec, MegatronParallel(dp=2, ep=2, fused_norms=True), 1)
    layer = {name.removeprefix("decoder.layers.0.") for name in layout.params if name.startswith("decoder.layers.0.")}
    beside = {"mlp.router.expert_bias", "mlp.shared_experts.linear_fc1.weight", "mlp.shared_experts.linear_fc2.weight"}
    assert layer == (beside if MOE[family].biased else set()) | {
        "self_attention.linear_qkv.layer_norm_weight",
        "self_attention.linear_qkv.weight",
        "self_attention.linear_proj.weight",
        "pre_mlp_layernorm.weight",
        "mlp.router.weight",
        "mlp.experts.linear_fc1.weight0",
        "mlp.experts.linear_fc1.weight1",
        "mlp.experts.linear_fc2.weight0",
        "mlp.experts.linear_fc2.weight1",
    }
    held = {shard.tensor for shard in layout.shards if shard.param == "decoder.layers.0.mlp.experts.linear_fc2.weight0"}
    assert len(held) == 1
    assert ".experts.2." in held.pop()
