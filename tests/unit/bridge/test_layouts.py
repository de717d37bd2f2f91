"""Layouts: every element of every tensor lies on the ranks exactly once (or identically more than once), wherever it is
split.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.bridge.architecture import ModelSpec
from tepo_megatron.bridge.gather import sources
from tepo_megatron.bridge.layouts import megatron_layout, tensor_shapes

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
    ranks = [megatron_layout(spec, tp=tp, tp_rank=t, pp=pp, pp_rank=p) for p in range(pp) for t in range(tp)]
    plan = sources(ranks)
    for name, shape in tensor_shapes(spec).items():
        writes = np.zeros(shape, dtype=int)
        for _, shard in plan[name]:
            assert shard.box.shape == shard.at.shape
            writes[shard.box.slices] += 1
        assert (writes == 1).all(), name


@given(layouts())
def test_no_two_shards_share_a_place_in_a_parameter(case: tuple[ModelSpec, int, int]) -> None:
    spec, tp, pp = case
    for p in range(pp):
        for t in range(tp):
            layout = megatron_layout(spec, tp=tp, tp_rank=t, pp=pp, pp_rank=p)
            for param in {shard.param for shard in layout.shards}:
                members = [shard.at for shard in layout.shards if shard.param == param]
                extent = tuple(max(box.stop[d] for box in members) for d in range(len(members[0].stop)))
                writes = np.zeros(extent, dtype=int)
                for box in members:
                    writes[box.slices] += 1
                assert (writes == 1).all(), param


def test_query_key_value_interleave_per_group() -> None:
    """4 heads of 1 row in 2 groups: Megatron's rows are q0 q1 k0 v0 | q2 q3 k1 v1, so rank 1 of 2 holds the second half."""
    spec = replace(BASE, num_layers=1, head_dim=1)
    layout = megatron_layout(spec, tp=2, tp_rank=1, pp=1, pp_rank=0)
    rows = {
        shard.tensor.split(".")[-2]: (shard.box.start[0], shard.box.stop[0], shard.at.start[0])
        for shard in layout.shards
        if shard.param.endswith("linear_qkv.weight")
    }
    assert rows == {"q_proj": (2, 4, 0), "k_proj": (1, 2, 2), "v_proj": (1, 2, 3)}


def test_a_tensor_that_no_rank_holds_is_named() -> None:
    half = megatron_layout(BASE, tp=2, tp_rank=0, pp=1, pp_rank=0)
    with pytest.raises(ValueError, match=r"hold \d+ of \d+ elements of model.embed_tokens.weight"):
        sources([half])


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
