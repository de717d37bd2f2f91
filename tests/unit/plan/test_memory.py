"""Memory of a plan: parameters, optimizer states, servers on the same GPU, FP8, a fused head, LoRA and experts."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tepo_megatron.config import LoraConfig, ParallelConfig, RunConfig
from tepo_megatron.config.load import load_run
from tepo_megatron.plan import Plan, make_plan
from tepo_megatron.plan import memory as of_the_plan
from tepo_megatron.plan.memory import FUSED_HEAD_CHUNK, RankMemory, TrainingRanks
from tepo_megatron.plan.shapes import ModelSplit, active_parameters, model_parameters, resolve_spec
from tepo_megatron.trainer.megatron import policy
from tepo_megatron.trainer.megatron.parallel.partition import partition
from tepo_megatron.weights.adapters import adapted_tensors, adapter_shapes
from tepo_megatron.weights.table import tensor_shapes
from tests.support.reshard_models import MOE, Case, cases, small_spec

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
    # of an "-Instruct" Qwen's config.json has fewer positions
    positions = 32_768 if name.startswith("Qwen2.5") else spec.max_positions
    assert resolve_spec(f"/nowhere/{name.removesuffix('-Instruct')}-Instruct")[0] == replace(spec, max_positions=positions)


def test_a_folder_on_this_machine_is_read_and_an_unknown_one_refused(tmp_path: Path) -> None:
    spec, assumption = resolve_spec("builtin:tiny")
    assert (model_parameters(spec), assumption) == (607_360, None)
    with pytest.raises(ValueError, match=r"'Llama-9' is not known here.*config.json is enough"):
        resolve_spec(str(tmp_path / "Llama-9"))


def test_of_the_experts_a_token_meets_the_chosen_ones() -> None:
    """Published, rounded: 12.9 and 3.3 billion."""
    for name, billions in (("Mixtral-8x7B-v0.1", 12.9), ("Qwen3-30B-A3B", 3.3)):
        assert active_parameters(resolve_spec(name)[0]) / 1e9 == pytest.approx(billions, abs=0.06)


@given(cases())
@settings(max_examples=40)
def test_every_rank_holds_what_the_layouts_say_with_the_padding_of_its_vocabulary(case: Case) -> None:
    source, stages = case.source, case.source.pp
    layers = 2 * stages
    spec = replace(case.spec, num_layers=layers, dense_layers=min(case.spec.dense_layers, layers - 1))
    counts = ModelSplit(spec, ParallelConfig(tp=source.tp, pp=stages, dp=source.dp, ep=source.ep, etp=source.etp)).stages()
    for rank, layout in enumerate(replace(source, stages=None).layouts(spec)):
        trained = [math.prod(shape) for name, shape in layout.params.items() if not name.endswith("expert_bias")]
        assert counts[rank * stages // source.world_size].total == sum(trained)


EXAMPLES = Path(__file__).parents[3] / "examples"
H200, QWEN, LLAMA, LORA = (
    str(EXAMPLES / name / "run.yaml") for name in ("qwen2.5-7b-h200", "qwen2.5-7b", "llama3.3-70b", "llama3.3-70b-lora")
)
PARAMETERS, GIB = PUBLISHED["Qwen2.5-7B"], 2**30
SPEC = resolve_spec("Qwen2.5-7B")[0]
FP32 = ("store_param_remainders=false", "exp_avg_dtype=float32", "exp_avg_sq_dtype=float32")


@cache
def plan(*overrides: str, path: str = H200) -> Plan:
    return make_plan(load_run(Path(path), overrides))


def optimizer(*settings: str) -> list[str]:
    return [f"optimizer.{setting}" for setting in settings]


def test_7b_trains_and_samples_on_one_h200() -> None:
    found = plan()
    assert found.problems == ()
    assert (found.config.engine.parallel.world_size, found.config.rollout.server.placement) == (1, "colocated")
    assert found.worst.optimizer == (2 + 2 + 2) * PARAMETERS
    assert found.worst.total < 0.9 * 139 * GIB
    (problem,) = plan(*optimizer(*FP32)).problems
    assert "the largest term is optimizer with 85.1 GiB" in problem
    away, reduced = re.findall(r"with (optimizer[^()]+) \(([\d.]+) GiB\)", problem)
    assert (away[0], reduced[1]) == ("optimizer.offload_fraction = 1.0", f"{found.worst.total / GIB:.1f}")
    assert f"{plan(*optimizer(*FP32, 'offload_fraction=1')).worst.total / GIB:.1f}" == away[1]


@given(st.floats(0, 1), st.sampled_from([("float32", 4), ("bfloat16", 2), ("float16", 2), ("fp8", 1)]), st.booleans())
def test_states_are_counted_where_they_are(fraction: float, moment: tuple[str, int], remainders: bool) -> None:
    dtype, size = moment
    reduced = remainders or dtype != "float32"
    lean = {"exp_avg_dtype": dtype, "store_param_remainders": remainders} if reduced else {"offload_fraction": fraction}
    config = RunConfig.model_validate({"model": {"dtype": "bfloat16"}, "optimizer": {"distributed": True, **lean}})
    ranks = TrainingRanks(SPEC, config)
    if reduced:
        assert ranks.state_bytes == (2 if remainders else 4) + size + 4
        assert ranks.host_state_bytes == 0
    else:
        assert ranks.state_bytes == pytest.approx(12 * (1 - fraction))
        assert ranks.host_state_bytes == 20 * fraction


def test_a_step_copies_as_much_at_once_as_the_engine_does() -> None:
    """Of both moments, in fp32: of a part, or of the largest tensor, which is the embedding of 152 064 × 3 584."""
    assert of_the_plan.PART_ELEMENTS == policy.PART_ELEMENTS
    found = plan()
    assert found.ranks.step_copies(PARAMETERS) == 4 * 2 * 152_064 * 3_584
    assert found.worst.activations + found.worst.logits > 4 * 2 * 152_064 * 3_584
    short = plan("engine.micro_batch_tokens=64", "rollout.sampling.max_new_tokens=32", "data.max_prompt_tokens=32")
    assert (short.worst.activations, short.worst.transient) == (0, 4 * 2 * 152_064 * 3_584)


def test_states_on_the_host_cost_its_memory_and_a_step_time() -> None:
    here, away = plan(*optimizer(*FP32), "cluster.gpu_memory_gib=200"), plan(*optimizer(*FP32, "offload_fraction=1"))
    assert away.hosts[0].states == 20 * PARAMETERS
    assert away.time.adam == pytest.approx(4 * PARAMETERS * (8 / (0.7 * 55e9) + 1 / 2e9))
    assert here.time.adam == pytest.approx(4 * PARAMETERS * (4 + 24 + 2) / (0.7 * 4800e9))
    (problem,) = plan(*optimizer(*FP32, "offload_fraction=1"), "cluster.host_memory_gib=100").problems
    assert "1 training ranks on a node need 162 GiB of its host's memory, more than cluster.host_memory_gib = 100" in problem


def test_servers_on_the_same_gpu_cost_memory_while_they_sleep_and_time_when_they_wake() -> None:
    found = plan()
    assert found.worst.server == (3 + 1 / 8) * GIB
    left = found.worst.weights + found.worst.optimizer
    assert found.hosts[0].turns == left
    assert found.time.turns == pytest.approx(2 * left / (0.7 * 55e9))
    for reference in ("objective.kl=null", "objective.kl.coefficient=0.1"):
        plain, fp8 = plan(reference), plan(reference, "engine.fp8.recipe=tensorwise")
        assert fp8.worst.weights > plain.worst.weights
        assert fp8.hosts == plain.hosts, "copies in FP8 are dropped"
    (problem,) = plan("rollout.server.gpu_memory_utilization=0.995").problems
    assert "the trainer keeps 1.5 GiB of its 139 for CUDA and NCCL; lower it to 0.98" in problem
    assert plan("rollout.server.gpu_memory_utilization=0.98").problems == ()


def test_fp8_servers_hold_linear_layers_in_one_byte() -> None:
    fp8 = ("rollout.server.quantization=fp8_per_block", "rollout.uncorrected=true")
    whole, half = plan(path=QWEN), plan(*fp8, path=QWEN)
    linear = 28 * 3584 * (2 * 3584 + 2 * 512 + 3 * 18944)
    assert whole.server.weights - half.server.weights == linear
    assert half.server.kv_cache - whole.server.kv_cache == linear
    assert half.sync == whole.sync
    assert half.time.generation < whole.time.generation


@pytest.mark.parametrize(
    ("quantization", "more", "waiting"),
    [
        ("fp8_per_channel", "tp=4", 80 * 8192 * (8192 + 28672)),  # o_proj and down_proj
        ("fp8_per_tensor", "tp=4", 80 * 8192 * (2 * 8192 + 2 * 1024 + 3 * 28672)),
        ("fp8_per_block", "tp=4", 0),
        ("fp8_per_tensor", "transfer=gather", 0),
    ],
)
def test_fp8_servers_need_room_for_what_waits_for_scales_over_all_workers(quantization: str, more: str, waiting: int) -> None:
    def servers(*overrides: str) -> Plan:
        given = (f"quantization={quantization}", more, "max_model_len=5120", *overrides)
        return plan("rollout.uncorrected=true", *(f"rollout.server.{one}" for one in given), path=LLAMA)

    assert servers().server.waiting == 2 * waiting / 4
    full = servers("gpu_memory_utilization=0.95").problems
    assert len(full) == (waiting > 0)
    for problem in full:
        assert f"holds {waiting / 2 / GIB:.1f} GiB of weights in full precision" in problem
        less = float(problem.rpartition("gpu_memory_utilization by ")[2])
        assert servers(f"gpu_memory_utilization={0.95 - less:.2f}").problems == ()
        assert servers(f"gpu_memory_utilization={0.96 - less:.2f}").problems != ()


def test_a_colocated_server_s_weights_must_fit_beside_the_trainer_s() -> None:
    """In an update, when the rest of both has left the GPU."""

    def shared(*overrides: str) -> Plan:
        servers = (f"rollout.server.{one}" for one in ("tp=2", "count=4", "gpu_memory_utilization=0.95"))
        return plan(*servers, "optimizer.distributed=false", *overrides, path=LORA)

    (problem,) = shared().problems
    assert "a colocated server's 65.7 GiB of weights need room beside 23.1 GiB of a training rank, and" in problem
    quantized = ("rollout.server.quantization=fp8_per_block", "rollout.uncorrected=true")
    assert shared("rollout.server.tp=4", "rollout.server.count=2").problems == shared(*quantized).problems == ()
    size = re.findall(r"([\d.]+) GiB", problem)
    enough = math.fsum(map(float, size)) + 0.2
    tight = shared(f"cluster.gpu_memory_gib={enough}")
    assert tight.problems == ()
    assert shared(f"cluster.gpu_memory_gib={enough - 0.4}").problems != ()
    assert tight._changed({"optimizer.distributed": True}) is None, "another group of ranks takes 0.35 GiB"
    assert tight._changed({"engine.head": "fused"}) is not None


# -- a fused head

TOKENS, LAST = 8192, 3


def last_stage(head: str, stage: int = LAST, *, tokens: int = TOKENS, recompute: str = "none", **parallel: Any) -> RankMemory:
    engine = {"platform": "cuda", "head": head, "micro_batch_tokens": tokens, "recompute": recompute}
    document = {"model": {"dtype": "bfloat16"}, "engine": {**engine, "parallel": {"pp": 4, **parallel}}}
    ranks = TrainingRanks(resolve_spec("Llama-3.3-70B-Instruct")[0], RunConfig.model_validate(document))
    return ranks.memory(stage, longest=tokens, step_tokens=100 * tokens)


def test_the_planned_chunk_is_the_one_that_the_head_takes() -> None:
    from tepo_megatron.core.scores import fused_linear

    assert {"cuda": fused_linear._CHUNK_BYTES_ACCELERATOR, **fused_linear._CHUNK_BYTES} == FUSED_HEAD_CHUNK


def test_the_last_stage_keeps_a_chunk_instead_of_the_logits() -> None:
    """8 192 tokens of 128 256 bfloat16 logits are 1.96 GiB; all other stages are as they were. A token of a chunk has logits in
    fp32 and a gradient in bfloat16. A shard whose logits are no more than a chunk gains nothing.
    """
    logits = 2 * TOKENS * 128256
    plain, fused = last_stage("logits"), last_stage("fused")
    assert plain.logits - fused.logits == pytest.approx(logits - 256 * 2**20, rel=0.01)
    assert {**fused.terms, "logits": 0, "transient": 0} == {**plain.terms, "logits": 0, "transient": 0}
    assert 1.5 * GIB < plain.total - fused.total < logits
    for stage in range(LAST):
        assert last_stage("fused", stage) == last_stage("logits", stage)
    few, fewer = (last_stage("fused", tokens=tokens, recompute="full").logits for tokens in (100, 50))
    assert few - fewer == 50 * 6 * 128256
    shards = [last_stage(head, tp=8, sequence_parallel=True).logits for head in ("logits", "fused")]
    assert shards[1] == pytest.approx(shards[0], rel=0.02)


def test_its_product_is_computed_once_more() -> None:
    plain, fused = (plan(f"engine.head={head}", "rollout.replay=recorded", path=LLAMA).time for head in ("logits", "fused"))
    assert fused.flops_train - plain.flops_train == pytest.approx(2 * 128256 * 8192 * plain.tokens)
    assert fused.train > plain.train
    assert fused.flops_score == plain.flops_score


@pytest.mark.parametrize(("dp", "pairs"), [(1, False), (2, True)])
def test_two_long_sequences_share_a_micro_batch_if_ranks_do_not_divide_their_number(dp: int, pairs: bool) -> None:
    longest, bound = 5120, 8192
    bins = partition([longest] * 127, ranks=dp, max_tokens=bound)
    most = max(longest * len(members) for of_rank in bins for members in of_rank)
    assert most == longest * (1 + pairs)

    def tokens(**rollout: Any) -> int:
        engine = {"micro_batch_tokens": bound, "parallel": {"dp": dp}}
        config = RunConfig.model_validate({"engine": engine, "rollout": rollout, "train": {"minibatches": 4}})
        return TrainingRanks(SPEC, config).micro_batch_tokens(longest)

    odd = {"prompts_per_step": 127, "samples_per_prompt": 4}
    assert tokens(truncated="mask") == tokens(**odd) == max(bound, most)
    assert tokens() == bound


# -- LoRA


def test_70b_fits_one_node_of_eight_gpus_with_lora_alone() -> None:
    found = plan(path=LORA)
    assert found.problems == ()
    cluster = found.config.cluster
    assert (cluster.train_nodes, cluster.rollout_nodes, found.config.engine.parallel.world_size) == (1, 0, 8)
    assert found.worst.total < 50 * GIB
    everything = plan("model.lora=null", path=LORA)
    assert "the largest term is optimizer with 98.6 GiB" in everything.problems[0]
    assert found.worst.activations == everything.worst.activations
    assert found.worst.gradients < everything.worst.gradients / 90
    # a KL term's reference is the model without its adapters
    kl = ("objective.kl.coefficient=0.1", "objective.kl.against=reference")
    assert plan(*kl, path=LORA).worst == found.worst
    assert plan(*kl, "model.lora=null", path=LORA).worst.reference > 16 * GIB


def test_teachers_on_the_ranks_are_counted() -> None:
    """They wait in host memory: on the GPU a head is beside an update, and the layers are where activations are later."""
    distill, alone = "objective.distill.of=all", plan()
    judged = plan(distill, f"teachers.big.path={alone.config.model.path}")
    peak = judged.worst.activations + judged.worst.logits + judged.worst.transient
    head = 2 * alone.spec.padded_vocab_size(1) * alone.spec.hidden_size
    assert judged.worst.teachers == head + max(0, alone.worst.weights - head - peak)
    assert {**judged.worst.terms, "teachers": 0, "logits": 0} == {**alone.worst.terms, "teachers": 0, "logits": 0}
    large = plan("objective.distill.coefficient=1", "teachers.big.path=Llama-3.3-70B-Instruct")
    assert "the largest term is teachers" in large.problems[0]
    assert judged.time.score == pytest.approx(2 * alone.time.score, rel=0.01)
    hosts = [one.hosts[0] for one in (alone, judged)]
    assert hosts[1].teachers - hosts[0].teachers > judged.worst.weights / 2
    fp8 = plan(distill, f"teachers.big.path={alone.config.model.path}", "engine.fp8.recipe=tensorwise")
    assert fp8.worst.teachers > judged.worst.teachers
    assert fp8.hosts == judged.hosts, "copies in FP8 are dropped"
    external = "teachers.big={path: Llama-3.3-70B-Instruct, place: server, server: {placement: external, registry: /r}}"
    served = plan("objective.distill.coefficient=1", external)
    assert served.worst == alone.worst
    # the step and all mini-batches on the host, a rank's part of a mini-batch twice on its GPU
    top = plan("objective.distill={of: top_k, k: 64}", external)
    whole = 8 * 64 * top._step_tokens
    assert top.hosts[0].teachers - served.hosts[0].teachers == 2 * whole
    assert top.worst.communication - served.worst.communication == pytest.approx(2 * whole / top.config.train.minibatches)


@pytest.mark.parametrize(
    ("of", "head", "rows"), [("all", "logits", [1, 3]), ("all", "fused", [0, 0]), ("sampled", "logits", [0, 0])]
)
def test_logits_of_teachers_are_kept_until_the_loss_goes_backward(of: str, head: str, rows: list[int]) -> None:
    """Of one beside the policy's; of two also the gradient, which is then not written over the policy's."""
    alone = plan(f"engine.head={head}")
    every = 2 * alone.ranks.micro_batch_tokens(alone.lengths.longest) * alone.spec.padded_vocab_size(1)
    for names, more in zip(("a", "ab"), rows, strict=True):
        sources = ", ".join(f"{{path: {name}, teacher: {name}}}" for name in names)
        teachers = [f"teachers.{name}.path={alone.config.model.path}" for name in names]
        judged = plan(f"engine.head={head}", f"objective.distill.of={of}", f"data.train=[{sources}]", *teachers)
        assert judged.worst.logits - alone.worst.logits == more * every


@pytest.mark.parametrize(
    ("distill", "parallel", "message"),
    [
        ("of=all", "{tp: 4, dp: 4}", r"teachers\.a has 152064 logits and the policy 128256"),
        ("coefficient=1", "{}", r"teachers\.a is split as the policy is: .*28 attention heads.*place = server"),
        ("coefficient=1", "{tp: 4, pp: 8}", r"teachers\.a is split .* 28 layers do not split"),
    ],
)
def test_a_teacher_that_the_ranks_would_refuse_is_refused(distill: str, parallel: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){message}"):
        plan("teachers.a.path=Qwen2.5-7B", f"objective.distill.{distill}", f"engine.parallel={parallel}", path=LLAMA)


def test_adapters_are_counted_as_they_are_made() -> None:
    spec, lora = resolve_spec("Llama-3.3-70B-Instruct")[0], LoraConfig(rank=16)
    by_hand = {"q": 2 * 8192, "k": 8192 + 1024, "v": 8192 + 1024, "o": 2 * 8192, "gate": 8192 + 28672, "up": 8192 + 28672}
    by_hand["down"] = 28672 + 8192
    assert model_parameters(spec, lora) == 80 * 16 * sum(by_hand.values())
    # A of what is split by rows, and B of what is split by columns, are whole on each rank
    split = 16 * (5 * 8192 + (8192 + 2 * 1024 + 2 * 28672) // 8 + 2 * 8192 + (8192 + 28672) // 8)
    assert ModelSplit(spec, ParallelConfig(tp=8, pp=4)).stages(lora) == [(20 * split, 0)] * 4


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_experts_are_counted_apart(ep: int) -> None:
    spec, lora = small_spec(architecture="MixtralForCausalLM", experts=MOE["MixtralForCausalLM"]), LoraConfig(rank=2)
    shapes = tensor_shapes(spec)
    wanted = adapter_shapes(shapes, adapted_tensors(shapes, ["all-linear"]), 2)
    experts = sum(a * b for name, (a, b) in wanted.items() if ".experts." in name)
    (found,) = ModelSplit(spec, ParallelConfig(ep=ep, dp=ep)).stages(lora)
    assert found.experts * ep == experts
    assert found.dense + experts == model_parameters(spec, lora)


# -- models with experts

SPLIT = ("dp=4", "tp=2", "sequence_parallel=true", "ep=4", "etp=1")


def moe_plan(*parallel: str, more: Sequence[str] = ()) -> Plan:
    model = ["model.path=/nowhere/Mixtral-8x7B-v0.1", "cluster.train_nodes=1", "optimizer.distributed=true", "rollout.replay=r"]
    return plan(*model, *(f"engine.parallel.{setting}" for setting in parallel), *more, path=QWEN)


def test_states_of_experts_are_shared_among_those_that_hold_the_same() -> None:
    """8 ranks in 4 expert-parallel groups hold each expert twice; the rest of the model is cut in 2 and held 4 times."""
    found = moe_plan(*SPLIT)
    layers, hidden, ffn = 32, 4096, 14336
    experts = layers * 8 // 4 * 3 * hidden * ffn
    attention = layers * (2 * hidden * hidden + 2 * hidden * 1024) // 2
    dense = attention + layers * (8 * hidden + 2 * hidden) + hidden + 2 * 32000 // 2 * hidden
    assert found.stage_parameters == (experts + dense,)
    assert found.worst.optimizer == pytest.approx(12 * (dense / 4 + experts / 2))


def test_flops_and_activations_are_those_of_the_chosen_experts() -> None:
    found = moe_plan(*SPLIT)
    attention = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 2 * 4096)
    chosen = 32 * (8 * 4096 + 2 * 3 * 4096 * 14336)
    head = 32000 * 4096 + 4096
    causal = 2 * 32 * 4096 * found.lengths.mean
    assert found.time.flops_score / found.time.tokens == 2 * (attention + chosen + head) + causal
    kept = found.ranks.layer_activations
    assert kept["gate and up"] == 2 * 2 * 2 * 14336 / 2, "bfloat16, two matrices, two experts, half of the tokens"
    assert kept["experts' inputs"] == 2 * 2 * 4096 / 2
    assert any("every expert gets as many tokens" in text for text in found.assumptions)
    mlp: dict[str, Any] = {"recompute": "selective", "recompute_modules": ["mlp"]}  # of the few dense layers alone
    plain, again = (TrainingRanks(found.ranks.spec, RunConfig.model_validate({"engine": engine})) for engine in ({}, mlp))
    assert again.layer_activations == plain.layer_activations


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (("tp=2", "dp=2"), r"tp = 2 with experts needs sequence parallelism.*sequence_parallel = true"),
        (("dp=1", "tp=2", "sequence_parallel=true", "ep=2"), r"ep × etp = 2 × 2 does not divide the 2 ranks of a pipeline"),
        (("dp=3", "ep=3"), r"ep = 3 does not divide the model's 8 experts"),
        (("dp=4", "tp=2", "sequence_parallel=true", "etp=1"), r"etp = 1 differs from tp = 2, which .* right only with ep > 1"),
    ],
)
def test_what_could_not_be_trained_is_refused(parallel: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        moe_plan("sequence_parallel=false", *parallel)


@pytest.mark.parametrize(
    ("layers", "target", "experts"), [("auto", "all-linear", 6), ("local", "all-linear", 0), ("auto", "q_proj", 0)]
)
def test_a_grouped_linear_has_the_merged_weights_of_its_experts_at_once(layers: str, target: str, experts: int) -> None:
    lora = (f"engine.layers={layers}", "model.lora.rank=8", f"model.lora.target_modules=[{target}]")
    one = ("tp=1", "dp=4", "sequence_parallel=false")
    all_experts, two = (moe_plan(*one, f"ep={ep}", more=lora).worst.transient for ep in (1, 4))
    assert all_experts - two == experts * 2 * 2 * 2 * 4096 * 14336, "gate and up, and their gradient, in bfloat16"


def test_blocks_that_vllm_pads_are_neither_planned_nor_suggested() -> None:
    def served(quantization: str, *more: str) -> Plan:
        model = ("model.path=/m/Qwen3-30B-A3B", "engine.parallel.tp=4", "engine.parallel.dp=4", "rollout.uncorrected=true")
        settings = (f"quantization={quantization}", *more)
        return plan(*model, *(f"rollout.server.{setting}" for setting in settings), path=LLAMA)

    with pytest.raises(ValueError, match=r"fp8_per_block: a worker's part of an expert is 192 × 2048, .*transfer = gather"):
        served("fp8_per_block")
    served("fp8_per_block", "transfer=gather")
    problem = served("fp8_per_tensor", "gpu_memory_utilization=0.95").problems[-1]
    assert "GiB for them; raise rollout.server.tp, or lower" in problem


def test_a_model_that_does_not_suit_fp8_is_refused() -> None:
    with pytest.raises(ValueError, match=r"first_layers_bf16 = 29 is more than the 28 layers of a pipeline stage"):
        plan("engine.fp8.recipe=tensorwise", "engine.fp8.first_layers_bf16=29", path=QWEN)


def test_records_of_routes_are_counted_on_the_host_and_a_rank_s_part_on_its_gpu() -> None:
    """Mixtral's take 64 bytes a token: 32 layers of two experts."""
    small = ("cluster.rollout_nodes=1", "train.steps=1", "rollout.prompts_per_step=32", "rollout.samples_per_prompt=8")
    recorded = [*small, "rollout.server.routing_replay=true"]
    without, found = (moe_plan(*SPLIT, more=settings) for settings in (small, recorded))
    record = 32 * 8 * found.lengths.mean * 64
    assert [host.routes for host in without.hosts] == [0]
    assert [host.total - other.total for host, other in zip(found.hosts, without.hosts, strict=True)] == [2 * record]
    ranks = found.config.engine.parallel
    part = record / found.config.train.minibatches / ranks.dp / ranks.cp
    assert found.worst.total - without.worst.total == pytest.approx(part)
    overlap = ["train.schedule=overlap", "train.max_staleness=2", "rollout.uncorrected=true"]
    ahead = moe_plan(*SPLIT, more=[*recorded, *overlap])
    assert [each.ranks.root_routes(100) for each in (found, without, ahead)] == [6400, 0, 4 * 6400]
    tight = moe_plan(*SPLIT, more=[*recorded, f"cluster.host_memory_gib={8 * found.hosts[0].total / GIB}"])
    assert any("set rollout.server.routing_replay = false" in problem for problem in tight.problems)
