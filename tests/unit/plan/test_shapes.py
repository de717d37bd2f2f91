"""Parameters per rank, from the formula, against published counts and against the bridge's layouts."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tepo_megatron.config import ParallelConfig
from tepo_megatron.plan.shapes import ModelSplit, active_parameters, model_parameters, resolve_spec
from tepo_megatron.weights.architecture import Experts, ModelSpec, is_always_fp32
from tepo_megatron.weights.layouts import MegatronParallel, megatron_ranks

PUBLISHED = {
    "Llama-3.3-70B-Instruct": 70_553_706_496,
    "Qwen2.5-72B": 72_706_203_648,
    "Qwen2.5-7B": 7_615_616_512,
    "Mixtral-8x7B-v0.1": 46_702_792_704,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-30B-A3B": 30_532_122_624,
}
"""Elements of all tensors of the published safetensors."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_known_models_have_as_many_parameters_as_published(name: str) -> None:
    spec, assumption = resolve_spec(f"/nowhere/{name}")
    assert model_parameters(spec) == PUBLISHED[name]
    assert assumption is not None
    assert name in assumption


def test_a_folder_on_this_machine_is_read_and_an_unknown_one_refused(tmp_path: Path) -> None:
    spec, assumption = resolve_spec("builtin:tiny")
    assert (model_parameters(spec), assumption) == (607_360, None)
    with pytest.raises(ValueError, match=r"'Llama-9' is not known here.*config.json is enough"):
        resolve_spec(str(tmp_path / "Llama-9"))


def test_of_the_experts_a_token_meets_the_chosen_ones() -> None:
    """Published, rounded: 12.9 and 3.3 billion."""
    for name, billions in (("Mixtral-8x7B-v0.1", 12.9), ("Qwen3-30B-A3B", 3.3)):
        assert active_parameters(resolve_spec(name)[0]) / 1e9 == pytest.approx(billions, abs=0.06)


@st.composite
def models(draw: st.DrawFn) -> tuple[ModelSpec, ParallelConfig]:
    tp, pp = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 3))
    kv_heads = tp * draw(st.integers(1, 2))
    etp = draw(st.sampled_from([size for size in (1, 2, 4) if tp % size == 0]))
    ep = tp // etp * draw(st.sampled_from([1, 2]))  # what the tensor-parallel ranks of a stage leave, or more of them
    count, num_layers = ep * draw(st.integers(2, 3)), pp * draw(st.integers(1, 3))
    shared = Experts(count, 2, renormalize=True, biased=True, shared_ffn_size=tp * 2)
    experts = draw(st.sampled_from([None, Experts(count, 2, renormalize=True), shared]))
    dense_layers = draw(st.integers(0, num_layers - 1)) if experts is shared else 0
    spec = ModelSpec(
        architecture="LlamaForCausalLM" if not experts else "Glm4MoeForCausalLM" if experts.biased else "MixtralForCausalLM",
        experts=experts,
        dense_layers=dense_layers,
        dense_ffn_size=tp * 3 if dense_layers else 0,
        num_layers=num_layers,
        hidden_size=draw(st.integers(1, 9)),
        num_heads=kv_heads * draw(st.integers(1, 3)),
        num_kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 4)),
        ffn_size=tp * draw(st.integers(1, 5)),
        vocab_size=draw(st.integers(tp, 23)),
        tied_embeddings=draw(st.booleans()),
        norm_eps=1e-5,
        rope_theta=1e4,
        rope_scaling=None,
        max_positions=16,
        qkv_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
    )
    sizes = {"dp": ep * etp // tp, "ep": ep, "etp": etp} if experts else {}
    return spec, ParallelConfig(tp=tp, pp=pp, **sizes)


@given(models())
@settings(max_examples=60, deadline=None)
def test_a_rank_holds_what_the_bridge_lays_out_and_the_padding_of_its_vocabulary(
    case: tuple[ModelSpec, ParallelConfig],
) -> None:
    spec, parallel = case
    tp, dp, pp = parallel.tp, parallel.dp, parallel.pp
    layouts = megatron_ranks(spec, MegatronParallel(tp=tp, pp=pp, dp=dp, ep=parallel.ep, etp=parallel.etp))
    padding = (-spec.vocab_size) % tp * spec.hidden_size * dp  # over the ranks of a stage, for each of embedding and head
    for stage in range(parallel.pp):
        ranks = layouts[stage * tp * dp : (stage + 1) * tp * dp]
        held = [
            sum(math.prod(shard.param_box.shape) for shard in layout.shards if not is_always_fp32(shard.tensor))
            for layout in ranks
        ]
        first, last = stage == 0, stage == parallel.pp - 1
        matrices = int(first) + int(last and not (first and spec.tied_embeddings))
        assert ModelSplit(spec, parallel).in_stage(stage).total * tp * dp == sum(held) + matrices * padding
