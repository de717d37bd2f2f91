"""Layouts: every element of every tensor is on the ranks once, and vLLM's are those that vLLM itself declares and loads."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.parallel_state import RankGenerator
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from safetensors.torch import load_file, save_file

from tepo_megatron.plan.shapes import KNOWN_MODELS
from tepo_megatron.weights.architecture import ModelSpec, read_model_spec
from tepo_megatron.weights.layouts import MegatronParallel, VllmParallel, pipeline_stages
from tepo_megatron.weights.reshard import reshard_plan
from tepo_megatron.weights.table import tensor_shapes
from tepo_megatron.weights.transfer.full_tensors import GatherPlan
from tests.support.programs import run_program
from tests.support.random_models import random_model
from tests.support.reshard_models import MOE, Case, cases, numbered_model, small_spec
from tests.support.transfers import blank, setting

BASE = small_spec(num_heads=4, num_kv_heads=2, ffn_size=8)


@given(cases())
def test_chosen_sources_cover_each_element_once(case: Case) -> None:
    plan = GatherPlan(case.source.layouts(case.spec))
    for name, shape in tensor_shapes(case.spec).items():
        writes = np.zeros(shape, dtype=int)
        for _, shard in plan.owners[name]:
            assert shard.box.shape == shard.param_box.shape
            writes[shard.box.slices] += 1
        assert (writes == 1).all(), name


def test_a_tensor_that_no_rank_holds_is_named() -> None:
    half = MegatronParallel(tp=2).layout(BASE, 0)
    with pytest.raises(ValueError, match=r"hold \d+ of \d+ elements of model.embed_tokens.weight"):
        GatherPlan([half])


@pytest.mark.parametrize(
    ("family", "parallel", "message"),
    [
        ("Llama", MegatronParallel(tp=3), "tp = 3 does not divide the model's 8 attention heads"),
        ("Llama", MegatronParallel(tp=8), "tp = 8 does not divide the model's 4 key/value heads"),
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
        parallel.layouts(small_spec(architecture=name, experts=MOE.get(name)))


@pytest.mark.parametrize(
    ("layers", "pp", "chunks", "first", "last"),
    [(80, 4, 5, None, None), (126, 8, 1, 15, 15), (10, 4, 1, None, 1), (14, 3, 2, 4, 6), (5, 2, 1, 2, 3)],
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
        ((7, 3, {"first": 2, "last": 2, "chunks": 2}), "2 chunks do not divide a pipeline stage of 3 layers"),
        ((7, 2, {"first": 2, "last": 4}), "7 layers do not split over 2 pipeline stages with 2 in the first and 4 in the last"),
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
        VllmParallel(tp=3, pp=5).layouts(replace(BASE, num_kv_heads=4))
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

    expected = [*(coordinate(dense, axis) for axis in ("tp", "pp")), *(coordinate(sparse, axis) for axis in ("tp", "ep"))]
    for rank in range(parallel.world_size):
        assert tuple(parallel.coordinates(rank)) == tuple(axis[rank] for axis in expected)


@pytest.mark.parametrize("family", MOE)
def test_names_of_transformer_engines_grouped_linears(family: str) -> None:
    """Each rank counts its experts from 0; the norm before the router stays a parameter of its own."""
    spec = small_spec(architecture=family, experts=MOE[family])
    layout = MegatronParallel(dp=2, ep=2, fused_norms=True).layout(spec, 1)
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


LLAMA = KNOWN_MODELS["Llama-3.3-70B-Instruct"] | {"model_type": "llama"}
LLAMA_405B = LLAMA | {"hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128, "num_hidden_layers": 126}
MIXTRAL_8X7B = KNOWN_MODELS["Mixtral-8x7B-v0.1"] | {"model_type": "mixtral", "sliding_window": None}
QWEN3_30B_A3B = KNOWN_MODELS["Qwen3-30B-A3B"] | {"model_type": "qwen3_moe", "decoder_sparse_step": 1, "mlp_only_layers": []}
INTERLEAVED, UNEVEN = pipeline_stages(80, 4, chunks=5), pipeline_stages(126, 8, first=15, last=15)
LARGE: dict[str, tuple[dict[str, Any], MegatronParallel, VllmParallel, float]] = {
    "llama-3.3-70b": (LLAMA, MegatronParallel(8, 4, 2, INTERLEAVED, fused_norms=True), VllmParallel(8), 70.554),
    "llama-3.1-405b": (LLAMA_405B, MegatronParallel(8, 8, 1, UNEVEN), VllmParallel(8, 2), 405.853),
    "mixtral-8x7b": (MIXTRAL_8X7B, MegatronParallel(2, 4, 4, fused_norms=True, ep=8, etp=1), VllmParallel(4, 2), 46.703),
    "qwen3-30b-a3b": (QWEN3_30B_A3B, MegatronParallel(4, 1, 2, fused_norms=True, ep=8, etp=1), VllmParallel(2), 30.532),
}
SMALL = ["Llama", "Llama-tied", "Mistral", "Qwen2-tied", "Qwen3", "Mixtral", "Qwen3Moe-tied", "Glm4Moe"]
SMALL_SPLITS = [(1, 1), (4, 1), (2, 2)]
LAYERS_AND_STAGES = [(layers, pp) for layers in (1, 2, 7, 23, 80, 126) for pp in (1, 2, 3, 4, 5, 8, 16) if pp <= layers]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vLLM's answers, and the small models' folders, in one folder."""
    out = tmp_path_factory.mktemp("vllm")
    job: dict[str, Any] = {"declared": [], "loaded": [], "pp": LAYERS_AND_STAGES}
    for name, (config, _, destination, _) in LARGE.items():
        folder = out / f"hf-{name}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        tp, pp = destination.tp, destination.pp
        for rank in ((tp, tp - 1, pp, stage) for stage in range(pp)):
            job["declared"].append({"name": f"{name}-{rank[3]}", "folder": str(folder), "rank": rank})
    for name in SMALL:
        family, tied = name.removesuffix("-tied"), name.endswith("-tied")
        folder = out / f"hf-{name}"
        random_model(family, num_hidden_layers=3, vocab_size=75, tie_word_embeddings=tied).save_pretrained(folder)
        model = numbered_model(tensor_shapes(read_model_spec(folder)))
        save_file({tensor: values.float() for tensor, values in model.items()}, folder / "model.safetensors")
        for tp, pp in SMALL_SPLITS:
            for number in range(tp * pp):
                rank = (tp, number % tp, pp, number // tp)
                job["loaded"].append({"name": f"{name}-{tp}-{pp}-{number}", "folder": str(folder), "rank": rank})
    (out / "job.json").write_text(json.dumps(job))
    run_program("vllm_oracle", out / "job.json", out, environment={"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"})
    return out


def as_matrix(shape: Sequence[int]) -> list[int]:
    """Layouts speak of a parameter with a dimension of experts as of a matrix."""
    return [shape[0] * shape[1], shape[2]] if len(shape) == 3 else list(shape)


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_plans_of_large_models_fill_every_parameter_that_vllm_declares(oracle: Path, name: str) -> None:
    config, source, destination, billions = LARGE[name]
    spec = ModelSpec.of(config, "config")
    assert sum(map(math.prod, tensor_shapes(spec).values())) / 1e9 == pytest.approx(billions, abs=1e-3)
    plan = reshard_plan(spec, source, destination)
    written: Counter[tuple[int, str]] = Counter()
    for move in plan.moves:
        written[move.destination, move.destination_param] += move.numel
    assert spec.vocab_size % 64 == 0, "so that what is written is the whole parameter"
    for rank, layout in enumerate(destination.layouts(spec)):
        stage = rank // destination.tp % destination.pp
        declared = json.loads((oracle / f"{name}-{stage}.json").read_text())
        assert {param: list(shape) for param, shape in layout.params.items()} == {k: as_matrix(v) for k, v in declared.items()}
        assert [param for param, shape in declared.items() if math.prod(shape) != written[rank, param]] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize(("tp", "pp"), SMALL_SPLITS)
def test_moved_weights_are_what_vllm_loads_from_disk(oracle: Path, name: str, tp: int, pp: int) -> None:
    """From 2×2 Megatron ranks, or 2×2×2 where there are experts; with TP 4 two ranks share each key/value head, and the last
    rank's embedding is all padding: 75 rows, padded to 128.
    """
    spec = read_model_spec(oracle / f"hf-{name}")
    experts: dict[str, Any] = {"dp": 2, "ep": 2} if spec.experts else {}
    source = MegatronParallel(2, 2, stages=pipeline_stages(3, 2, first=1, last=2), **experts)
    plan, ours, expected = setting(Case(spec, source, VllmParallel(tp, pp), {}))
    theirs = [blank(params) for params in expected]
    for move in plan.moves:
        target = move.destination_region.view(theirs[move.destination][move.destination_param])
        target.copy_(move.source_region.view(ours[move.source][move.source_param]))
    for rank, params in enumerate(theirs):
        loaded = load_file(oracle / f"{name}-{tp}-{pp}-{rank}.safetensors")
        assert params.keys() == loaded.keys()
        for param, values in params.items():
            assert torch.equal(values.float(), loaded[param].view(as_matrix(loaded[param].shape))), (rank, param)


@pytest.mark.slow
def test_layers_are_divided_as_vllm_divides_them(oracle: Path) -> None:
    expected = json.loads((oracle / "pp.json").read_text())
    ours = [[[stage.start, stage.stop] for stage in VllmParallel(pp=pp).stages(layers)] for layers, pp in LAYERS_AND_STAGES]
    assert ours == expected
