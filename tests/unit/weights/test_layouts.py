"""Layouts: every element of every tensor lies on the ranks exactly once (or identically more than once), wherever it is
split.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from tepo_megatron.weights.architecture import ModelSpec
from tepo_megatron.weights.layouts import (
    MegatronParallel,
    VllmParallel,
    megatron_layout,
    megatron_ranks,
    pipeline_stages,
    vllm_ranks,
)
from tepo_megatron.weights.table import tensor_shapes
from tepo_megatron.weights.transfer.full_tensors import gather_sources

BASE = ModelSpec(
    architecture="LlamaForCausalLM",
    num_layers=4,
    hidden_size=6,
    num_heads=4,
    num_kv_heads=2,
    head_dim=3,
    ffn_size=8,
    vocab_size=13,
    tied_embeddings=False,
    norm_eps=1e-5,
    rope_theta=1e4,
    rope_scaling=None,
    max_positions=64,
)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[ModelSpec, int, int]:
    tp, pp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4]))
    groups = draw(st.integers(1, 3)) * tp
    spec = replace(
        BASE,
        num_layers=pp * draw(st.integers(1, 3)),
        num_kv_heads=groups,
        num_heads=groups * draw(st.integers(1, 3)),
        head_dim=draw(st.integers(1, 5)),
        ffn_size=tp * draw(st.integers(1, 5)),
        vocab_size=draw(st.integers(1, 19)),
        tied_embeddings=draw(st.booleans()),
    )
    return spec, tp, pp


@given(layouts())
def test_chosen_sources_cover_each_element_once(case: tuple[ModelSpec, int, int]) -> None:
    spec, tp, pp = case
    ranks = [megatron_layout(spec, MegatronParallel(tp=tp, pp=pp), rank) for rank in range(tp * pp)]
    plan = gather_sources(ranks)
    for name, shape in tensor_shapes(spec).items():
        writes = np.zeros(shape, dtype=int)
        for _, shard in plan[name]:
            assert shard.box.shape == shard.param_box.shape
            writes[shard.box.slices] += 1
        assert (writes == 1).all(), name


@given(layouts())
def test_no_two_shards_share_a_place_in_a_parameter(case: tuple[ModelSpec, int, int]) -> None:
    spec, tp, pp = case
    for rank in range(tp * pp):
        layout = megatron_layout(spec, MegatronParallel(tp=tp, pp=pp), rank)
        for param in {shard.param for shard in layout.shards}:
            members = [shard.param_box for shard in layout.shards if shard.param == param]
            extent = tuple(max(box.stop[d] for box in members) for d in range(len(members[0].stop)))
            writes = np.zeros(extent, dtype=int)
            for box in members:
                writes[box.slices] += 1
            assert (writes == 1).all(), param


def test_query_key_value_interleave_per_group() -> None:
    """4 heads of 1 row in 2 groups: Megatron's rows are q0 q1 k0 v0 | q2 q3 k1 v1, so rank 1 of 2 holds the second half."""
    spec = replace(BASE, num_layers=1, head_dim=1)
    layout = megatron_layout(spec, MegatronParallel(tp=2), 1)
    rows = {
        shard.tensor.split(".")[-2]: (shard.box.start[0], shard.box.stop[0], shard.param_box.start[0])
        for shard in layout.shards
        if shard.param.endswith("linear_qkv.weight")
    }
    assert rows == {"q_proj": (2, 4, 0), "k_proj": (1, 2, 2), "v_proj": (1, 2, 3)}


def test_a_tensor_that_no_rank_holds_is_named() -> None:
    half = megatron_layout(BASE, MegatronParallel(tp=2), 0)
    with pytest.raises(ValueError, match=r"hold \d+ of \d+ elements of model.embed_tokens.weight"):
        gather_sources([half])


@pytest.mark.parametrize(
    ("tp", "pp", "message"),
    [
        (3, 1, "tp = 3 does not divide the model's 4 attention heads"),
        (4, 1, "tp = 4 does not divide the model's 2 key/value heads"),
        (1, 3, "pp = 3 does not divide the model's 4 layers"),
    ],
)
def test_a_split_that_does_not_fit_is_refused(tp: int, pp: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BASE.check_parallel(tp=tp, pp=pp)


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


def test_chunks_of_a_stage_have_their_own_names() -> None:
    stages = pipeline_stages(4, 2, chunks=2)
    first, last = megatron_ranks(BASE, MegatronParallel(pp=2, stages=stages))
    assert stages == ((range(0, 1), range(2, 3)), (range(1, 2), range(3, 4)))
    at = {shard.tensor: shard.param for layout in (first, last) for shard in layout.shards}
    assert at["model.embed_tokens.weight"] == "model0.embedding.word_embeddings.weight"
    assert at["model.layers.2.mlp.down_proj.weight"] == "model1.decoder.layers.0.mlp.linear_fc2.weight"
    assert at["model.norm.weight"] == "model1.decoder.final_layernorm.weight"
    assert at["lm_head.weight"] == "model1.output_layer.weight"


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


def test_stages_that_leave_a_layer_out_are_refused() -> None:
    with pytest.raises(ValueError, match="hold each of the model's 4 layers once"):
        megatron_ranks(BASE, MegatronParallel(pp=2, stages=((range(0, 2),), (range(3, 4),))))


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
