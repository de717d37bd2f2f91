"""What cannot act, or cannot be used, is refused: settings as they are read, inputs before anything starts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tepo_megatron.config import RunConfig
from tepo_megatron.config.load import ConfigError, load_run
from tepo_megatron.core.rollout import Rollout, SamplingMask, WeightsVersion, token_ids
from tepo_megatron.run.checks import RUN_CHECKS, RunSubject, check_model
from tepo_megatron.run.sampling.inputs import Inputs, read_replay
from tepo_megatron.runtime.machine import this_machine
from tepo_megatron.sampler.rollout_file import record_path, write_rollouts
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.tasks.data.tokenizer import Tokenizer
from tepo_megatron.weights.architecture import ModelSpec
from tests.support.checkpoints import make_whole
from tests.support.random_models import write_llama

OVERLAP, PENALISE = "train.schedule=overlap", "rollout.truncated=penalise"
FILTERS, SERVER = "rollout.filter_groups", "rollout.server"
FREE, GDPO, THREE = "rollout.uncorrected=true", "objective.preset=gdpo", "reward.weights={a: 1, b: 1, c: 1}"
FP8 = ["engine.fp8={recipe: blockwise, params: true}", "optimizer.distributed=true", "model.dtype=bfloat16"]
SET = "evaluate.sets.s={path: x, majority: none}"
TAUGHT = ["model.dtype=float32", "objective.distill={coefficient: 1, of: top_k}", "teachers.a={path: x, place: server}"]
LONG = "{max_tokens: 16, buffer_tokens: 8}"
AFTER_UPDATES = (
    *("canary/drift", "staleness/mean", "reward/failed", "response_len/truncated", "groups/drawn", "moe/aux_loss"),
    *("entropy/noise/p50", "source/a/reward", "staleness/kl_1"),
)
ROLLBACK = ["train.rollback.metric=loss", "train.rollback.above=1"]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        # keys of another place
        (["objective.beta=0.1"], r"did you mean objective\.distill\.beta\?"),
        (["verifyer=exact"], r"did you mean reward\.verifier or environment\.agent\.verifier\?"),
        # schedules
        ([OVERLAP], r"objective\.mismatch = null with train\.schedule = overlap: train\.max_staleness = 1"),
        ([OVERLAP, FREE, f"{SERVER}.placement=colocated"], r"schedule = overlap with rollout\.server\.placement = colocated"),
        (["train.max_staleness=2"], r"max_staleness = 2 does nothing with schedule = sync"),
        (["train.stale=keep"], r"stale = keep does nothing with schedule = sync"),
        (["train.kv_cache=keep"], r"kv_cache = keep does nothing with schedule = sync"),
        ([OVERLAP, FREE, f"{SERVER}.cpu_threads=all"], r"leaves the trainer no core"),
        # groups and long responses
        ([PENALISE], r"truncated = penalise needs overlong\.buffer"),
        (
            ["rollout.truncated=mask", f"objective.advantage.overlong={LONG}"],
            r"the longest would not be penalised; set rollout",
        ),
        (
            [PENALISE, "rollout.overlong.buffer=2", f"objective.advantage.overlong={LONG}"],
            r"would each subtract DAPO's penalty",
        ),
        (["rollout.overlong.buffer=2"], r"truncated = train and overlong belong together"),
        (["rollout.truncated=mask", "rollout.overlong.buffer=2"], r"truncated = mask and overlong belong together"),
        ([PENALISE, "rollout.overlong.buffer=999"], r"even an empty response would be punished"),
        ([PENALISE, "rollout.overlong.buffer=2", "objective.preset=max_rl"], r"divides by their mean"),
        (["reward.failed_reward=-1", "objective.preset=max_rl"], r"failed_reward = -1 is negative, .*by their mean"),
        ([PENALISE, "rollout.overlong.buffer=2", GDPO], r"a component of its own"),
        (["rollout.oversample=1.5"], r"set filter_groups or partial, or leave it out"),
        (["rollout.partial=true"], r"oversample = 1 begins no more groups than a step needs"),
        (["rollout.partial=true", "rollout.oversample=1.5"], r"which biases the gradient; set objective\.mismatch\.kind"),
        ([f"{FILTERS}.filters=[]"], r"filters is empty"),
        ([f"{FILTERS}.filters=[variance]"], r"'variance' is no filter; known: zero_variance"),
        ([f"{FILTERS}.filters=[too_long]"], r"the filter too_long needs max_truncated"),
        ([f"{FILTERS}.max_truncated=0.5"], r"max_truncated is for the filter too_long"),
        ([f"{FILTERS}={{filters: [reward_range], reward_range: [1, 0]}}"], r"holds no number"),
        ([f"{FILTERS}.filters=['a:keep', 'b.py:keep']"], r"two filters are called keep"),
        (["data.filter=['a.py:keep', 'b.py:keep']"], r"two filters are called keep"),
        # a generation step of one's own
        (["rollout.collect=mine.py:best", f"{FILTERS}={{}}"], r"collect = mine\.py:best"),
        (["rollout.collect=mine.py:best", "environment.name=calculator"], r"collect = mine\.py:best"),
        # servers and weights
        ([f"{SERVER}.transport=ipc"], r"trainer and servers on the same GPUs, not placement = local"),
        ([f"{SERVER}={{transport: ipc, placement: external, registry: /r}}"], r"GPUs, not placement = external"),
        ([f"{SERVER}={{transport: nccl, placement: colocated}}"], r"transport = nccl needs a GPU for each of its ranks"),
        ([f"{SERVER}={{transport: nccl, transfer: gather}}"], r"gather broadcasts over gloo"),
        ([f"{SERVER}={{placement: colocated, registry: /r}}"], r"registry is for external ones"),
        (["engine={cpu_threads: 2, platform: cuda}"], r"acts where the trainer runs on a CPU, and platform = cuda"),
        ([*FP8, f"{SERVER}.placement=colocated"], r"engine\.fp8\.params"),
        (["rollout.replay_weights=any"], r"replay_weights = any has no effect without replay"),
        # rollback, checkpoints, records
        ([ROLLBACK[0], "train.save_every=1"], r"give one of above"),
        ([*ROLLBACK, "train.rollback.factor=2", "train.save_every=1"], r"give one of above"),
        (ROLLBACK, r"save_every = 0 writes none"),
        ([*ROLLBACK, "train.save_every=1", "rollout.replay=/x"], r"the same rollouts would be read again"),
        (["train.keep_best.metric=accuracy/greedy", "evaluate.every=0"], r"evaluate\.every = 0 makes none"),
        (["train.save_every=1", "train.keep_best.metric=avg@4"], r"no metric of this run; did you mean accuracy/avg@4\?"),
        ([*ROLLBACK[1:], "train.save_every=1", "train.rollback.metric=los"], r"rollback\.metric = los is no .* mean loss\?"),
        ([*ROLLBACK[1:], "train.save_every=1", "train.rollback.metric=time/step"], r"metric = time/step is no metric"),
        *(
            ([*ROLLBACK, "train.save_every=1", f"train.rollback.metric={name}"], f"{name} is no metric")
            for name in AFTER_UPDATES
        ),
        (["train.callbacks=[{callback: early_stopping, kwargs: {metric: accuracy/avg@8}}]"], r"did you mean accuracy/avg@4\?"),
        *(
            ([*ROLLBACK[1:], "train.save_every=1", f"train.rollback.metric={metric}"], f"{metric} is in no row, since {reason}")
            for metric, reason in {
                "kl/reference": "the objective has no reference model",
                "distill/divergence": "teachers names none",
                "source/a/divergence": "teachers names none",
                "mismatch/weight": r"objective\.mismatch is null",
                "clip/bound_low": r"objective\.trust_region has no auto bound",
            }.items()
        ),
        (
            ["objective.trust_region.kind=none", "train.callbacks=[{callback: early_stopping, kwargs: {metric: clip/share}}]"],
            r"clip/share is in no row, since objective\.trust_region\.kind = none",
        ),
        (
            ["rollout.canary.every=0", "train.callbacks=[{callback: early_stopping, kwargs: {metric: canary/drift}}]"],
            r"canary/drift is in no row, since rollout\.canary\.every = 0",
        ),
        # servers of teachers
        *(
            ([*TAUGHT, f"teachers.a.server={{{given}}}"], sentence)
            for given, sentence in {
                "load_format: dummy": r"teachers\.a: server\.load_format = dummy: no update would ever bring",
                "transfer: gather": r"server\.transfer = gather is for the policy's servers",
                "routing_replay: true": r"server\.routing_replay = True is for the policy's servers",
                "head_dtype: float32": r"teachers\.a\.server\.head_dtype = float32 does nothing for servers in float32",
                "quantization: fp8_per_block": r"teachers\.a\.server\.quantization = fp8_per_block takes servers in bfloat16",
            }.items()
        ),
        (["train.grace_s=1e10"], r"train\.grace_s: got 10000000000\.0"),
        (["train.callbacks=[early_stopping]", "evaluate.every=0"], r"early_stopping = accuracy/greedy is measured by eval"),
        ([SET, "train.save_every=1", "train.keep_best.metric=eval/s/maj@4"], r"did you mean eval/s/avg@4\?"),
        (["log.token_samples=2", "train.steps=9"], r"token_samples_every = 10 is more than train\.steps = 9"),
        # rewards of several components
        ([GDPO, "objective.advantage.weights=[1,2]"], r"has 2 entries, .* names none; a run has one .* unless reward\.weights"),
        ([GDPO, "reward.weights={a: 1, b: 2}"], r"set objective\.advantage\.weights=\[1, 2\], in this order"),
        ([PENALISE, "rollout.overlong.buffer=2", "objective.preset=on_policy_distill", "teachers.a.path=x"], r"read them"),
        (
            ["data.train=[{path: a/x.jsonl, verifier: 'o.py:f'}]", "data.heldout=[{path: b/x.jsonl, verifier: 'o.py:g'}]"],
            r"both have a source x, with other verifiers, .*; give the held-out source another name",
        ),
        ([GDPO, THREE, "objective.advantage.weights=[1,2]"], r"has 2 entries, .* names 3 components: a, b, c"),
        # W&B and MLflow
        (["log.mlflow={experiment_name: a, tracking_uri: 'postgresql://me:pw@host/db'}"], r"an address with a password"),
        (["log.mlflow={experiment_name: a, tracking_uri: ./mlruns}"], r"is a folder, which MLflow 3 cannot write to"),
        (["log.mlflow={experiment_name: a, tracking_uri: 'http://[::1'}"], r"is no address"),
        (["log.wandb={project: team/mine}"], r"W&B takes no / in the name of a project"),
    ],
)
def test_what_cannot_act_is_refused(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_run(None, overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        [OVERLAP, "train.max_staleness=4", "objective.preset=decoupled_ppo"],
        ["log.token_samples=2", "train.steps=10"],
        [GDPO, "reward.weights={a: 1, b: 1}"],
        [GDPO, "reward.weights={a: 1, b: 2}", "objective.advantage.weights=[3,1]"],
        ["reward.weights={a: 1, b: 2}"],
    ],
)
def test_what_can_act_is_accepted(overrides: list[str]) -> None:
    load_run(None, overrides)


STEPS, SHORT = 3, "rollout.sampling.max_new_tokens=16"


@pytest.fixture
def make(few_problems: Path) -> Callable[..., RunConfig]:
    """Makes runs with few problems, changed by overrides."""
    data = (f"data.train={few_problems}", "data.heldout=null", "evaluate.every=0")
    return lambda *overrides: load_run(None, [*data, SHORT, *overrides])


@pytest.fixture
def replaying(make: Callable[..., RunConfig], tmp_path: Path) -> Callable[..., RunConfig]:
    """Makes runs that replay what is in ``recorded``."""
    for step in range(STEPS):
        write_rollouts(tmp_path / "recorded", step, rollouts(step))
    size = ("rollout.prompts_per_step=2", "rollout.samples_per_prompt=2", f"train.steps={STEPS}", "train.minibatches=2")
    return partial(make, *size, f"rollout.replay={tmp_path}/recorded", f"output={tmp_path}/out")


def rollouts(step: int) -> list[Rollout]:
    version = WeightsVersion(step, "ab")
    return [Rollout(f"p{at // 2}", at // 2, (3, at // 2), (4, 5), (-0.5, -0.5), "stop", version) for at in range(4)]


def read(config: RunConfig) -> int:
    return Inputs.read(config, resolve_model_path(config.model.path)).spec.vocab_size


def test_a_record_without_fitting_routes_is_named_with_its_line(replaying: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mixtral = {"architectures": ["MixtralForCausalLM"], "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 8}
    spec = ModelSpec.of({**mixtral, "intermediate_size": 8, "vocab_size": 61, "num_local_experts": 4}, "test")
    monkeypatch.setattr("tepo_megatron.run.sampling.inputs.read_model_spec", lambda folder: spec)
    fitting = [replace(each, routed_experts=np.zeros((3, 3, 2), np.uint8)) for each in rollouts(0)]
    other = replace(fitting[1], routed_experts=np.zeros((3, 5, 2), np.uint8))
    plain, routed = replaying(), replaying("rollout.server.routing_replay=true")
    for recorded, problem in (
        (rollouts(0), "line 2: the rollout has no routing record"),
        ([fitting[0], other, *fitting[2:]], "line 3: the rollout has a routing record of 3 × 5 × 2"),
    ):
        write_rollouts(plain.rollout.replay, 0, recorded)
        with pytest.raises(ValueError, match=rf"step_0000000\.jsonl, {problem}"):
            read(routed)
    read(plain)  # what is not replayed is not asked for
    write_rollouts(plain.rollout.replay, 0, fitting)
    read(routed)


def test_a_record_without_the_tokens_that_could_be_drawn_is_named_with_its_line(replaying: Any) -> None:
    plain, truncating = replaying(), replaying("rollout.sampling.top_k=20")
    known = [replace(each, sampling_mask=SamplingMask([1, 0], [7])) for each in rollouts(0)]
    write_rollouts(plain.rollout.replay, 0, known)
    read(truncating)
    write_rollouts(plain.rollout.replay, 0, [known[0], *rollouts(0)[1:]])
    read(plain)  # scored among all tokens
    with pytest.raises(ValueError, match=r"step_0000000\.jsonl, line 3: the rollout has no sampling mask, but .*top_k says"):
        read(truncating)


def test_records_that_are_missing_or_of_other_weights_are_named_before_the_run(replaying: Any) -> None:
    config = replaying()
    vocab_size, replay = read(config), config.rollout.replay
    assert [read_replay(config, vocab_size, step) for step in range(STEPS)] == [rollouts(step) for step in range(STEPS)]
    write_rollouts(replay, 0, rollouts(1))
    with pytest.raises(ValueError, match=r"step_0000000\.jsonl, line 2: drawn by the weights of step 1, not of step 0"):
        read(config)
    record_path(replay, 0).unlink()
    with pytest.raises(ValueError, match=r"no record of step 0 \(step_0000000\.jsonl\), and 1 of the steps 0 to 2 are missing"):
        read(config)
    read(replaying("train.resume=true", "train.resume_from=/other/step_000001"))  # a resumed run begins with a later one
    make_whole(config.output / "checkpoints", 2)
    config = replaying("train.resume=true")
    read(config)
    with pytest.raises(ValueError, match=r"no record of step 0 .*, and 1 of the steps 0 to 2 are missing"):
        read(replaying("train.resume=true", "train.resume_from=step_000000"))
    write_rollouts(replay, 2, rollouts(0))
    with pytest.raises(ValueError, match=r"step_0000002\.jsonl, line 2: drawn by the weights of step 0"):
        read(config)
    first, *others = rollouts(1)
    write_rollouts(replay, 1, [replace(first, response_ids=token_ids((4, vocab_size))), *others])
    with pytest.raises(ValueError, match=rf"step_0000001\.jsonl, line 2: token {vocab_size} is not one of the model's"):
        read_replay(config, vocab_size, 1)


@pytest.mark.parametrize(
    ("changes", "tied", "message"),
    [
        ({"lm_head.weight": None}, False, r"missing: lm_head.weight \(a reward or embedding model has none; give a model with"),
        ({"lm_head.bias": torch.zeros(61)}, False, r"unexpected: lm_head.bias"),
        ({}, False, None),
        ({}, True, None),
    ],
    ids=["none", "with a bias", "its own", "tied"],
)
@pytest.mark.parametrize("head", ["logits", "fused"])
def test_a_head_that_cannot_be_loaded_is_refused_before_servers_start(
    changes: dict[str, torch.Tensor | None], tied: bool, message: str | None, head: str, tmp_path: Path
) -> None:
    write_llama(tmp_path, tie_word_embeddings=tied)
    shutil.copy(resolve_model_path("builtin:tiny") / "tokenizer.model", tmp_path)
    tensors = {**load_file(tmp_path / "model.safetensors"), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, tmp_path / "model.safetensors")
    servers = {"server": {"placement": "external", "registry": str(tmp_path)}}  # heads too small for a server here
    document = {"model": {"path": str(tmp_path)}, "output": str(tmp_path / "out"), "rollout": servers}
    config = RunConfig.model_validate({**document, "engine": {"head": head}})
    if message is None:
        assert check_model(config) == tmp_path
    else:
        with pytest.raises(ValueError, match=message):
            check_model(config)


@pytest.mark.parametrize(
    ("new", "message"),
    [
        (5000, r"exceed the 256 tokens that the model takes; lower max_new_tokens to 248 or less$"),
        (253, r"the model takes; lower max_new_tokens to 248 or less, or set data.max_prompt_tokens=3$"),
    ],
)
def test_a_response_that_leaves_no_room_for_its_prompt_is_refused(new: int, message: str, make: Any) -> None:
    with pytest.raises(ValueError, match=message):
        read(make(f"rollout.sampling.max_new_tokens={new}"))


def test_the_tokenizer_is_compared_with_vllms_where_vllm_looks_for_strings(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(Tokenizer, "check_served", lambda _self, texts, words: seen.extend([*texts, *words]))
    read(make())
    assert not seen
    read(make('rollout.sampling.stop=["\\n"]'))
    assert seen
    seen.clear()
    read(make('rollout.sampling.bad_words=["never"]', "rollout.sampling.top_k=5"))
    assert seen[0].endswith("=")
    assert seen[1].isdecimal()
    assert seen[-1] == "never"


def test_answers_that_the_verifier_refuses_itself_end_the_start(tmp_path: Path) -> None:
    """All of a source: a sentence; some: a notice. A source's own verifier counts, and a replay asks for none."""
    (tmp_path / "a.jsonl").write_text('{"prompt": "1+1=", "answer": "is 2"}\n{"prompt": "2+1=", "answer": "3"}\n')
    (tmp_path / "b.jsonl").write_text('{"prompt": "1+1=", "answer": "is 2"}\n')

    def inputs(verifier: str) -> list[str]:
        sources = [{"path": f"{tmp_path}/a.jsonl"}, {"path": f"{tmp_path}/b.jsonl", "verifier": verifier}]
        config = load_run(None, [f"data.train={json.dumps(sources)}", "data.heldout=null", "evaluate.every=0", SHORT])
        return Inputs.read(config, resolve_model_path(config.model.path)).left_out

    with pytest.raises(ValueError, match=r"the verifier last_word can give no response a reward: .*'is 2' of problem 'b:1'"):
        inputs("last_word")
    (notice,) = inputs("exact")
    assert notice == f"{tmp_path}/a.jsonl: 1 problems whose own answer last_word refuses: no response solves them"


def test_heads_that_vllm_has_no_attention_for_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Path(shutil.copytree(resolve_model_path("builtin:tiny"), tmp_path / "model"))
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(settings | {"num_attention_heads": 8, "head_dim": 16}))
    (check,) = [check for check in RUN_CHECKS if check.name == "server machine"]
    run = RunSubject(load_run(None, [f"model.path={model}", "data.train=builtin:addition", SHORT]), this_machine())
    with pytest.raises(ValueError, match=r"attention heads have 16 dimensions .* on a CPU vLLM takes 32, 64, "):
        check.verify(run)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    check.verify(run)
