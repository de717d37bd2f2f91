"""A plan as a whole: the recipes fit, what does not fit is mended as the plan says, and the command says so."""

import json
import re
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.config import RunConfig
from tepo_megatron.config.load import load_run
from tepo_megatron.plan import Plan, make_plan
from tepo_megatron.plan.memory import BATCH_BYTES_PER_TOKEN, TrainingRanks
from tepo_megatron.plan.shapes import KNOWN_MODELS, model_parameters, resolve_spec
from tepo_megatron.plan.tables import plan_notes
from tepo_megatron.plan.time import SyncTraffic
from tests.support.cli import invoke

EXAMPLES = Path(__file__).parents[3] / "examples"
LLAMA, QWEN = str(EXAMPLES / "llama3.3-70b/run.yaml"), str(EXAMPLES / "qwen2.5-7b/run.yaml")
LONG = str(EXAMPLES / "llama3.3-70b-32k/run.yaml")
REPLAY = "rollout.replay=recorded"
WITHOUT_CP = ["engine.parallel.cp=1", "engine.parallel.dp=4"]
RECIPES = ("llama3.3-70b", "llama3.3-70b-32k", "llama3.3-70b-lora", "qwen2.5-72b", "qwen2.5-7b", "qwen2.5-7b-h200")
GIB = 2**30


@cache
def plan(path: str, *overrides: str) -> Plan:
    return make_plan(load_run(Path(path), overrides))


@pytest.mark.parametrize("name", [*RECIPES, "code"])
def test_the_recipes_fit_and_state_their_assumption(name: str) -> None:
    found = plan(str(EXAMPLES / name / "run.yaml"))
    assert found.problems == ()
    assert any("not on this machine" in text for text in found.assumptions)
    assert found.worst.total < 0.9 * found.config.cluster.gpu_memory_gib * GIB


def test_the_70b_recipes_overlap_and_the_long_one_keeps_caches() -> None:
    runs = [load_run(EXAMPLES / name / "run.yaml") for name in ("llama3.3-70b", "llama3.3-70b-32k")]
    assert [(run.train.schedule, run.objective.mismatch is not None, run.train.kv_cache) for run in runs] == [
        ("overlap", True, "recompute"),
        ("overlap", True, "keep"),
    ]


def test_a_run_without_a_bound_of_prompts_is_planned_with_the_longest_that_its_model_has_room_for() -> None:
    tiny = str(EXAMPLES / "tiny" / "run.yaml")
    found = plan(tiny)
    assert found.lengths.longest == found.spec.max_positions
    with pytest.raises(ValueError, match=r"= 272 tokens are more than the 256 positions"):
        plan(tiny, "data.max_prompt_tokens=240")


def assert_mended_as_it_says(path: str, broken: list[str]) -> list[list[str]]:
    """Makes every change that the one problem names, looks that the run then fits and needs what was said, and returns them."""
    (problem,) = plan(path, *broken).problems
    found = re.findall(r"with ([a-z][^()]+ = [^()]+) \(([\d.]+) GiB\)", problem)
    changes: list[list[str]] = []
    for text, needed in found:
        changes.append([])
        section = ""
        for part in re.split(r", (?=[\w.]+ = )| and ", text):
            name, value = part.split(" = ")
            section = name.rpartition(".")[0] or section
            changes[-1].append(f"{section}.{name.rpartition('.')[2]}={value.replace(' ', '')}")
        mended = plan(path, *broken, *changes[-1])
        assert mended.problems == (), text
        assert f"{mended.worst.total / GIB:.1f}" == needed
    return changes


WITHOUT_OVERLAP = ["engine.overlap_grad_reduce=false", "engine.overlap_param_gather=false"]


def test_among_all_changes_that_mend_a_run_the_fastest_comes_first() -> None:
    """Context parallelism on the same GPUs, for responses of 32k."""
    assert assert_mended_as_it_says(LONG, [*WITHOUT_CP])[0] == ["engine.parallel.cp=4", "engine.parallel.dp=1"]
    assert len(assert_mended_as_it_says(LLAMA, ["engine.micro_batch_tokens=16384"])) >= 2


@pytest.mark.parametrize(
    "broken",
    [
        ["engine.parallel.sequence_parallel=false", "optimizer.distributed=false", *WITHOUT_CP],
        ["engine.parallel.pp=1", "engine.parallel.cp=1", "engine.parallel.dp=8"],
        ["cluster.gpu_memory_gib=40"],
    ],
)
def test_where_one_change_is_not_enough_two_are_found_or_more_nodes(broken: list[str]) -> None:
    changes = assert_mended_as_it_says(LONG, [*broken, *WITHOUT_OVERLAP])
    assert all(len({each.partition("=")[0] for each in change}) > 1 for change in changes)


def test_what_nothing_mends_is_said_to_be_too_large() -> None:
    (problem,) = plan(LONG, "cluster.gpu_memory_gib=6", REPLAY).problems
    assert "No change of one or two fields makes it fit" in problem


def test_a_server_without_room_says_how_much_is_missing() -> None:
    config = load_run(Path(LLAMA), ["rollout.server.tp=2"])
    (problem,) = Plan.of(config, plan(LLAMA).spec).problems
    missing = re.search(r"([\d.]+) GiB too little for one sequence of 5120 tokens; raise rollout.server.tp to 4", problem)
    weights, cache_of_one = 70_553_706_496 * 2 / 2, 5120 * 2 * 80 * 4 * 128 * 2
    assert float(missing[1]) == pytest.approx((weights + 3 * GIB + cache_of_one) / GIB - 0.85 * 79, abs=0.06)


UNBOUNDED = ["rollout.server.max_model_len=null", "rollout.server.gpu_memory_utilization=0.55"]


def test_a_cache_must_hold_the_longest_sequence_that_the_server_takes() -> None:
    spec, config = plan(LLAMA).spec, load_run(Path(LLAMA), UNBOUNDED)
    found = Plan.of(config, spec)
    assert 5120 < found.server.capacity < 131_072
    assert "max_model_len, here 131072; set that to 5120, or raise rollout.server.tp or" in found.problems[0]
    assert Plan.of(config.with_values({"rollout.server.max_model_len": 5120}), spec).problems == ()


def test_a_served_teacher_must_fit_its_gpus() -> None:
    served = ["objective.preset=on_policy_distill", "rollout.server.count=2", "teachers.a.path=Llama-3.3-70B-Instruct"]
    served += ["teachers.a.place=server"]

    def problems(**server: Any) -> tuple[str, ...]:
        config = load_run(Path(QWEN), [*served, f"teachers.a.server={json.dumps(server)}"])
        return Plan.of(config, plan(QWEN).spec).problems

    (problem,) = problems(tp=1)
    assert re.search(
        r"teachers\.a\.server\.tp = 1 .* too little for one sequence of 4097 tokens; raise teachers\.a\.server\.tp to 2",
        problem,
    )
    (problem,) = problems(tp=4, gpu_memory_utilization=0.5)
    assert "teachers.a.server.max_model_len, here 131072; set that to 4097" in problem
    assert problems(tp=4, gpu_memory_utilization=0.5, max_model_len=4097) == ()
    assert problems(placement="external", registry="/r") == ()  # on GPUs that are not known
    small = ["teachers.a.path=Qwen2.5-1.5B", "teachers.a.server.tp=8", "cluster.gpus_per_node=16"]
    with pytest.raises(ValueError, match=r"(?s)teachers\.a\.server\.tp = 8 does not fit this model: .* 12 attention heads"):
        plan(QWEN, *served, *small)


def test_a_quantised_teacher_takes_what_its_folder_holds(tmp_path: Path) -> None:
    settings = KNOWN_MODELS["Llama-3.3-70B-Instruct"] | {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    served = f"teachers.a={{path: {tmp_path}, place: server, server: {{tp: 2, max_model_len: 4097}}}}"
    run = load_run(Path(QWEN), ["objective.preset=on_policy_distill", "rollout.server.count=2", served])
    for size, problems in ((0, 1), (70 * 2**30, 0), (150 * 2**30, 1)):
        with (tmp_path / "model.safetensors").open("wb") as file:
            file.truncate(size)
        assert len(Plan.of(run, plan(QWEN).spec).problems) == problems


EPISODES = ["environment.name=guess_number", "reward.verifier=last_word", "rollout.server.max_model_len=33792"]


def test_an_episode_is_as_long_as_a_response_of_its_tokens() -> None:
    turn = plan(LLAMA, "rollout.sampling.max_new_tokens=32768", "rollout.server.max_model_len=33792")
    episode = plan(LLAMA, *EPISODES, "environment.max_tokens=32768")
    assert turn.worst == episode.worst
    assert turn.lengths == episode.lengths
    assert episode.problems[0].startswith("a training rank needs 126.5 GiB")


def test_an_episode_without_a_bound_has_the_tokens_of_its_turns_or_what_the_model_takes() -> None:
    found = plan(LLAMA, *EPISODES, "environment.max_turns=3")
    assert found.lengths.longest_response == 3 * 4096
    assert any("environment.max_tokens is not set" in text for text in found.assumptions)
    found = plan(LLAMA, *EPISODES, "environment.max_turns=300")
    assert found.lengths.longest == 33_792


def test_a_sync_moves_every_server_s_shards_once() -> None:
    """8 servers: the model in bfloat16, and its 161 norms of 8192 once more for each further worker of the four."""
    found = plan(LLAMA).sync
    assert found.moves == 41_120, "those of reshard_plan"
    assert found.bytes_total == 8 * 2 * (70_553_706_496 + 3 * 161 * 8192)
    assert found.bytes_received_most * 32 == found.bytes_total
    assert found.bytes_total / 64 <= found.bytes_sent_most < 1.1 * found.bytes_total / 64
    assert found.seconds == pytest.approx(found.bytes_received_most / (0.7 * 50e9))


def test_a_colocated_sync_counts_what_leaves_a_gpu() -> None:
    """One GPU alone sends nothing; of two tensor-parallel ranks each worker gets half of the model from the other one."""
    alone = plan(str(EXAMPLES / "qwen2.5-7b-h200/run.yaml")).sync
    assert (alone.moves, alone.bytes_total, alone.seconds) == (339, 0, 0)
    apart, shared = plan(QWEN).sync, plan(QWEN, "rollout.server.placement=colocated").sync
    assert shared.bytes_total == pytest.approx(apart.bytes_total / 2, rel=1e-3)


def test_a_sync_is_planned_only_if_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SyncTraffic, "of", lambda ranks: pytest.fail("this takes seconds"))
    assert "It fits with" in make_plan(load_run(Path(LONG), WITHOUT_CP)).problems[0]


def test_a_gather_broadcasts_the_whole_model_to_every_worker() -> None:
    found, size = plan(LLAMA, "rollout.server.transfer=gather").sync, 2 * 70_553_706_496
    assert (found.bytes_received_most, found.bytes_total, found.bytes_sent_most) == (size, 32 * size, 6 * size)
    assert found.seconds == pytest.approx(6 * size / (0.7 * 50e9))


def test_adapters_alone_are_sent_and_exchanged() -> None:
    wide = ("rollout.server.tp=2", "rollout.server.count=2", "rollout.server.dtype=float32")
    merged, served = (plan(QWEN, f"model.lora={{rank: 16, serve: {kind}}}", *wide) for kind in ("merged", "adapter"))
    size, workers = 2 * model_parameters(served.spec, served.config.model.lora), 4  # the trainer sends its own dtype
    assert (served.sync.moves, served.sync.bytes_received_most, served.sync.bytes_total) == (workers, size, workers * size)
    assert served.sync.bytes_sent_most == workers.bit_length() * size < merged.sync.bytes_total / 100
    assert merged.time.exchange < plan(QWEN).time.exchange / 50


def test_seconds_of_a_step_by_hand() -> None:
    time = plan(LLAMA, "cluster.score_mfu=0.3").time
    matrices = 70_553_706_496 - 128_256 * 8192
    token, bubble = 2 * matrices + 2 * 80 * 8192 * 2560, 3 / (1024 * 2560 / 4 / 2 / 8192)
    layers = matrices - 128_256 * 8192
    imbalance = (layers / 4 + 128_256 * 8192) * 4 / matrices  # the last stage's, which has the head
    computing = 3 * token * 1024 * 2560 / (64 * 989e12 * 0.45) * imbalance
    activations = 2 * 8192 * 1024 * 2560 / 2  # bytes between two layers, on one of two replicas
    waiting = 8 * 20 * activations * 7 / 8 / (0.7 * 450e9) + 2 * activations / 8 / (0.7 * 50e9)
    padding = 1 + 7 / 2 / 8192  # to the next multiple of eight tensor-parallel ranks
    assert time.train == pytest.approx((computing + waiting) * (1 + bubble) * padding)
    # a forward pass is a third of the work, and moves half of the activations
    assert time.score == pytest.approx((computing / 3 * 0.45 / 0.3 + waiting / 2) * (1 + bubble) * padding)
    assert 0.33 <= time.mfu <= 0.38
    assert time.mfu == pytest.approx(3 * token * 1024 * 2560 / (64 * 989e12) / ((computing + waiting) * padding))
    assert time.root == pytest.approx(1024 * 2048 * 0.02e-6)
    own, replayed = 12 * 2_270_765_056 / 2, plan(LLAMA, REPLAY, "train.async_save=false")
    assert replayed.time.save == pytest.approx((12 * 70_553_706_496 / 7e9 + own * 1e-9) / 20)
    assert time.save == pytest.approx(own / (0.7 * 55e9) / 20)  # beside training
    assert plan(LLAMA).hosts[-1].staged == own
    weights, cache = 4096 * 70_553_706_496 * 2 / 4, 128 * 2048 * (512 + 1024) * 81_920  # one wave of 128 sequences
    decoding, prompts = (weights + cache) / (3350e9 * 0.5), 128 * 512 * token / (32 * 989e12 * 0.3)
    assert time.generation == pytest.approx(decoding + prompts)
    # a gradient is read, 12 bytes of states are read and written, a bfloat16 weight is written; four times a step
    assert time.adam == pytest.approx(4 * own / 12 * (4 + 24 + 2) / (0.7 * 3350e9))
    assert time.turns == 0
    parts = (time.generation, time.score, time.train, time.exchange, time.adam, time.sync, time.root, time.save)
    assert time.seconds == pytest.approx(sum(parts))
    assert (replayed.time.generation, replayed.time.sync, replayed.sync) == (0, 0, None)


def test_a_second_pass_costs_the_updates_again_and_no_scores() -> None:
    once, twice = plan(QWEN).time, plan(QWEN, "train.epochs_per_batch=2").time
    assert twice.train == pytest.approx(2 * once.train)
    assert (twice.adam, twice.exchange, twice.mfu) == pytest.approx((2 * once.adam, 2 * once.exchange, once.mfu))
    assert (twice.score, twice.generation) == (once.score, once.generation)


def test_every_minibatch_fills_the_pipeline_anew_for_scores_too() -> None:
    four, sixteen = (plan(LLAMA, REPLAY, f"train.minibatches={count}").time for count in (4, 16))
    assert sixteen.bubble == pytest.approx(4 * four.bubble)
    assert sixteen.score / four.score == pytest.approx((1 + sixteen.bubble) / (1 + four.bubble))
    short, whole = (plan(LLAMA, f"engine.micro_batch_tokens={size}").time for size in (1024, 2560))  # 2,560 is the mean length
    assert (short.bubble, short.exchange) == (whole.bubble, whole.exchange)  # a longer sequence is a micro-batch of its own


def test_float32_computes_at_its_own_peak() -> None:
    overrides = ("engine.parallel={tp: 1, sequence_parallel: false}", "engine.layers=local", "cluster.gpu_memory_gib=1000")
    half, full = (plan(QWEN, *overrides, f"model.dtype={dtype}") for dtype in ("bfloat16", "float32"))
    assert plan(QWEN, *overrides, "model.dtype=auto").time == half.time
    assert full.time.train == pytest.approx(15 * half.time.train)
    assert full.time.score == pytest.approx(15 * half.time.score)
    assert full.time.mfu == pytest.approx(half.time.mfu)
    assert [any("a fifteenth" in text for text in found.assumptions) for found in (half, full)] == [False, True]


def test_tensor_parallel_ranks_that_straddle_nodes_wait_for_the_network() -> None:
    """24 ranks in groups of 4: four nodes of 6 GPUs, or three of 8."""
    ranks, nodes = "engine.parallel={tp: 4, pp: 1, dp: 6}", ((4, 6), (3, 8))
    across, within = (plan(LLAMA, REPLAY, ranks, f"cluster={{train_nodes: {n}, gpus_per_node: {k}}}") for n, k in nodes)
    assert across.time.exposed == pytest.approx(450 / 50 * within.time.exposed)
    assert [any("tp = 4 does not divide" in text for text in found.assumptions) for found in (across, within)] == [True, False]


@given(pp=st.sampled_from([2, 4, 8]), vpp=st.sampled_from([1, 2, 5]))
def test_interleaving_keeps_as_many_activations_as_its_inventors_say(pp: int, vpp: int) -> None:
    """The first stage keeps L · (1 + (p − 1) / (p v)) layers' worth if interleaved, L if not (Korthikanti et al., 2022)."""
    spec, _ = resolve_spec("Llama-3.3-70B-Instruct")
    config = RunConfig.model_validate({"engine": {"parallel": {"pp": pp, "vpp": vpp}}})
    expected = 80 * (1 + (pp - 1) / (pp * vpp)) if vpp > 1 else 80
    ranks = TrainingRanks(spec, config)
    assert ranks.layers_in_flight(0, 1000) == pytest.approx(expected)
    assert ranks.layers_in_flight(0, 1) == pytest.approx(80 / pp)
    # of every chunk also its output, and one more
    batch = 1e9 * BATCH_BYTES_PER_TOKEN * (1 + 2 / config.train.minibatches)
    outputs = (ranks.memory(0, longest=4096, step_tokens=1e9).communication - batch) / (ranks.micro_batch_tokens(4096) * 8192)
    assert outputs == pytest.approx(2 * (expected * pp * vpp / 80 + 1))


def terms(stage: int, *overrides: str) -> dict[str, float]:
    ranks = TrainingRanks(resolve_spec("Llama-3.3-70B-Instruct")[0], load_run(Path(LLAMA), overrides))
    return ranks.memory(stage, longest=5120, step_tokens=2.6e6).terms


def test_short_responses_on_average_keep_no_fewer_micro_batches() -> None:
    """One step may have all of the longest."""
    few = ("rollout.prompts_per_step=8", "train.minibatches=8", "engine.micro_batch_tokens=16384", REPLAY)
    config = load_run(Path(LLAMA), [*few, "rollout.sampling.max_new_tokens=15360", "rollout.server.max_model_len=16384"])
    plans = [make_plan(config, response_tokens=mean) for mean in (100, 15360)]
    short, long = ([stage.activations for stage in found.stages] for found in plans)
    assert short == long
    assert all("the largest term is activations" in found.problems[0] for found in plans)


def test_full_recomputation_and_splits_shrink_what_they_are_for() -> None:
    base, full = terms(3), terms(3, "engine.recompute=full")
    assert full["activations"] < 0.2 * base["activations"]
    assert {**full, "activations": 0} == {**base, "activations": 0}
    halved = terms(3, "engine.parallel.tp=4", "engine.parallel.dp=4", "engine.parallel.sequence_parallel=true")
    # half the tensor-parallel ranks: twice of all but the norms, whose 41 vectors of 8192 are whole on every rank
    assert halved["weights"] == 2 * base["weights"] - 2 * 41 * 8192
    assert halved["optimizer"] == pytest.approx(base["optimizer"], rel=1e-3)  # twice the parameters over twice the replicas


def test_layers_decide_what_is_activations_without() -> None:
    memory = partial(terms, 0, "engine.parallel.pp=1", "engine.parallel.dp=8")
    base, local, fp8 = memory(), memory("engine.layers=local"), memory("engine.fp8.recipe=tensorwise")
    ffn = 28672
    mlp = 2 * 8192 * 80 * 2 * ffn / 8  # the activated gate and the offset up of 8192 tokens in 80 layers, in bfloat16
    assert local["activations"] - base["activations"] > mlp
    # rows and columns of q, k, v, output, gate, up and down, and (too much by so little) the norms
    weights = 80 * 8192 * (64 * 128 * 2 + 2 * 8 * 128 + 3 * ffn) // 8
    assert fp8["weights"] - base["weights"] == pytest.approx(2 * weights, rel=1e-3)
    assert {**fp8, "weights": 0} == {**base, "weights": 0}
    assert memory("engine.fp8.recipe=tensorwise", "engine.fp8.params=true") == base


def test_recomputed_modules_keep_their_inputs_and_cost_flops() -> None:
    """Of the MLP its input alone is kept: neither the norm's output, nor gate and up, nor their product; one layer has them."""
    base, mlp = plan(LONG, REPLAY), plan(LONG, REPLAY, "engine.recompute=selective", "engine.recompute_modules=[mlp]")
    tokens = 33792 // 4
    dropped = 2 * tokens * (8192 / 8 + 3 * 28672 / 8)
    assert base.stages[0].activations - mlp.stages[0].activations == pytest.approx((80 - 1) * dropped)
    again = mlp.time.flops_train - base.time.flops_train
    assert again == pytest.approx(2 * 80 * 3 * 8192 * 28672 * mlp.time.tokens)
    full = plan(LONG, REPLAY, "engine.recompute=full")
    head = 2 * 128256 * 8192 * base.time.tokens  # is no layer
    assert full.time.flops_train == pytest.approx(4 / 3 * base.time.flops_train - head)
    assert full.stages[0].activations < mlp.stages[0].activations < base.stages[0].activations


def test_overlap_hides_what_fits_behind_a_micro_batch() -> None:
    overlap = ["engine.overlap_grad_reduce=true", "engine.overlap_param_gather=true"]
    both, reduced = plan(LLAMA, *overlap), plan(LLAMA)
    assert both.time.exchange < reduced.time.exchange
    # the last mini-batch's weights: bfloat16, half of them sent
    last = 2 * max(both.stage_parameters) / 2 / (0.7 * 50e9)
    assert both.time.exchange == pytest.approx(last)
    assert reduced.time.exchange == pytest.approx(4 * 3 * last)
    assert both.stages == reduced.stages


def test_uneven_stages_are_counted_layer_by_layer_and_even_out_the_work() -> None:
    first, last = (f"engine.parallel.num_layers_in_{which}_pipeline_stage={n}" for which, n in (("first", 21), ("last", 19)))
    even, uneven = plan(LLAMA, REPLAY), plan(LLAMA, REPLAY, first, last)
    layer = even.stage_parameters[1] // 20
    assert uneven.stage_parameters == tuple(
        count + extra * layer for count, extra in zip(even.stage_parameters, (1, 0, 0, -1), strict=True)
    )
    assert uneven.time.imbalance < even.time.imbalance
    assert plan(LLAMA, REPLAY, "engine.parallel.vpp=2").time.bubble == even.time.bubble / 2


@pytest.mark.parametrize(
    ("path", "override", "sentence"),
    [
        (LLAMA, "rollout.server={tp: 3, transfer: reshard}", r"server.tp = 3 does not fit this model: .* 64 attention heads"),
        (LLAMA, "rollout.server={tp: 3, transfer: gather}", r"server.tp = 3 does not fit this model: .* 64 attention heads"),
        (LLAMA, "engine.parallel.etp=8", r"engine.parallel.etp = 8 is for models with experts"),
        (LLAMA, "rollout.server.max_model_len=4096", r"max_model_len = 4096 is less than .* 1024 \+ 4096; raise it to 5120"),
        (LLAMA, "rollout.server.max_model_len=200000", r"max_model_len = 200000 tokens are more than the 131072 positions"),
        (LLAMA, "rollout.server.routing_replay=true", r"replays the choice of experts, and LlamaForCausalLM has none"),
        (QWEN, "model={path: Mixtral-8x7B-v0.1, lora: {rank: 8, serve: adapter}}", r"adapter is for dense models"),
        (LONG, "rollout.sampling.max_new_tokens=131072", r"together = 132096 tokens are more than the 131072 positions"),
    ],
)
def test_a_run_that_cannot_be_laid_out_is_refused(path: str, override: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){sentence}"):
        plan(path, "rollout.server.max_model_len=132096", override)


def test_mean_lengths_must_lie_within_the_longest() -> None:
    with pytest.raises(ValueError, match=r"--response-tokens = 5000 must lie above 0 and not above the longest, 4096"):
        make_plan(load_run(Path(LLAMA)), response_tokens=5000)


def test_flops_of_a_token_are_those_that_torch_counts() -> None:
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import LlamaConfig, LlamaForCausalLM

    tokens = 48
    shape: dict[str, Any] = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    model = LlamaForCausalLM(LlamaConfig(**shape, **heads, tie_word_embeddings=False))
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, tokens, dtype=torch.int64), use_cache=False)
    uncausal = 2 * 4 * 128 * tokens * tokens  # eager attention also multiplies what the mask hides: as much again
    rotations = next(count for op, count in counter.get_flop_counts()["Global"].items() if "bmm" in str(op)) - 2 * uncausal
    matrices = model.num_parameters() - 64 * 128 - 9 * 128  # neither embedding nor norms multiply matrices
    norms = 2 * 9 * 128 * tokens  # a plan counts norms' weights as if they did: 0.2 % here, 1e-5 at 70B
    assert counter.get_total_flops() == 2 * matrices * tokens + 2 * uncausal + rotations
    config = load_run(None, ["data.max_prompt_tokens=24", "rollout.sampling.max_new_tokens=24"])
    time = make_plan(config, prompt_tokens=24, response_tokens=24).time
    assert time.flops_score / time.tokens * tokens == counter.get_total_flops() - uncausal - rotations + norms


def test_the_command_prints_tables_or_json_and_fails_with_the_sentence() -> None:
    assert "7,615,616,512 parameters" in invoke("plan", QWEN).stdout
    as_json = json.loads(invoke("plan", QWEN, "--json").stdout)
    assert as_json["parameters_per_rank"] == [3_807_910_400]
    assert sum(as_json["memory_per_rank"][0].values()) == 2 * as_json["memory_per_rank"][0]["total"]
    refused = invoke("plan", QWEN, "cluster.gpu_memory_gib=40", code=1)
    assert "Memory of a training rank" in refused.stdout
    assert "error: the run does not fit: a training rank needs" in refused.stderr
    impossible = invoke("plan", LLAMA, "cluster.train_nodes=7", code=1)
    assert impossible.stdout == ""
    assert "which tp × pp × cp = 8 × 4 × 1 = 32 does not divide; use 4 or 8 nodes" in impossible.stderr


def test_what_is_not_set_yet_ends_a_plan(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(KNOWN_MODELS["Llama-3.3-70B-Instruct"]))

    def unset(*overrides: str) -> list[str]:
        """As scripts/run_tepo_70b.sh finds it."""
        *_, notes = "\n".join(plan_notes(plan(LLAMA, *overrides))).partition("\nNot set yet")
        return re.findall("^  - ([^:]+): ", notes, re.MULTILINE)

    paths = ["model.path", "data.train", "data.heldout"]
    assert unset() == ["cluster.account", "cluster.partition", "cluster.container, or cluster.python", *paths]
    assert unset("cluster.account=a", "cluster.partition=p", "cluster.container=c", f"model.path={tmp_path}") == paths[1:]
    assert unset("cluster.executor=kubernetes", "cluster.mounts=['claim:/shared']", "cluster.container=c") == []


@given(st.floats(0.1, 500), st.floats(0.1, 500), st.floats(0, 50))
def test_idle_shares_of_both_schedules_follow_from_the_phases(generation: float, training: float, sync: float) -> None:
    step = replace(plan(QWEN).time, generation=generation, train=training, sync=sync)
    trains = step.seconds - generation
    one, two = step.schedules(is_colocated=False)
    assert (one.schedule, two.schedule) == ("sync", "overlap")
    assert one.seconds == step.seconds
    assert two.seconds == pytest.approx(max(generation + sync, trains))
    for each in (one, two):
        assert each.idle_trainer * each.seconds == pytest.approx(each.seconds - trains, abs=1e-6)
        assert each.idle_servers * each.seconds == pytest.approx(each.seconds - generation, abs=1e-6)
    assert [each.schedule for each in step.schedules(is_colocated=True)] == ["sync"]
    assert replace(step, generation=0.0).schedules(is_colocated=False) == []


def test_a_draft_model_takes_memory_beside_the_policy_and_one_of_unknown_shape_is_said() -> None:
    small = resolve_spec("models/Qwen2.5-7B")[0]
    server = load_run(Path(LLAMA)).rollout.server
    without, drafted = (
        plan(LLAMA, f"rollout.server.speculative={draft}") for draft in ("null", "{draft_model: models/Qwen2.5-7B}")
    )
    assert drafted.server.weights == without.server.weights
    assert drafted.server.draft == 2 * model_parameters(small) / server.tp
    assert without.server.kv_cache - drafted.server.kv_cache == drafted.server.draft
    keys_and_values = 2 * small.num_layers * max(1, small.num_kv_heads / server.tp) * small.head_dim * 2
    assert drafted.server.kv_bytes_per_token - without.server.kv_bytes_per_token == keys_and_values
    assert any("how many guesses hold" in line for line in drafted.assumptions)
    unknown = plan(LLAMA, "rollout.server.speculative={draft_model: models/unheard-of}")
    assert (unknown.problems, unknown.server.draft) == ((), 0)
    assert any("speculative.draft_model = models/unheard-of is not on this machine" in line for line in unknown.assumptions)
