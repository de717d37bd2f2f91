"""What cannot be meant, or could not act, is refused with what to write."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest

from tepo_megatron.config import RunConfig
from tepo_megatron.config.load import ConfigError, load_run
from tepo_megatron.weights.architecture import ModelSpec
from tests.support.reshard_models import MOE, small_spec

BIAS, AUX = "engine.moe_balance.kind=expert_bias", "engine.moe_balance.kind=aux_loss"
DOCKER, LOCAL, KUBERNETES = (f"cluster.executor={name}" for name in ("docker", "local", "kubernetes"))
IMAGE = "cluster.container=a"
REDUCE = "engine.overlap_grad_reduce=true"
MXFP8 = ["engine.fp8.recipe=mxfp8", "engine.fp8.params=true", "optimizer.distributed=true", "model.dtype=bfloat16"]
AGAIN = ["engine.recompute=selective", "engine.recompute_modules=[layernorm]", "model.dtype=bfloat16"]
DP2 = ["engine.parallel.dp=2", "rollout.prompts_per_step=8", "rollout.samples_per_prompt=8"]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ("engine.recompute=some", 'engine.recompute: got "some"; allowed: "none", "selective", "full"'),
        ("optimizer.lr=-1", "optimizer.lr: got -1; allowed: a number > 0"),
        ("optimizer.lr=true", "optimizer: lr = true is no number; write one"),
        ("evaluate.problems=true", "evaluate: problems = true is no number; write one"),
        ("reward.weights={a: true}", "reward: weights.a = true is no number; write one"),
        ("objective.advantage={kind: gdpo, weights: [1, true]}", "weights.1 = true is no number; write one"),
        ("evaluate.problems=0", "evaluate.problems: got 0; allowed: an integer > 0 or null"),
        ("log.tensorboard=maybe", 'log.tensorboard: got "maybe"; allowed: true or false'),
        ("optimizer.betas=[0.9, x]", 'optimizer.betas[1]: got "x"; allowed: a number'),
        ("engine=3", "engine: got 3; allowed: a section with platform, cpu_threads, layers, fp8, "),
        ("name=7", "name: got 7; allowed: text (to give a number as text: name='\"7\"')"),
        ("lr=3", "lr: unknown key (got 3); did you mean optimizer.lr?"),
        ("objective={preset: clip_cov, trust_region: {dual: 3}}", "dual: unknown key (got 3); known keys here: "),
        ("train.zzz=3", "train.zzz: unknown key (got 3); known keys here: steps, minibatches, epochs_per_batch"),
        ("engine.parallel.sequence_parallel=true", "engine.parallel: sequence_parallel = true needs tp > 1"),
        ("optimizer.min_lr=1", "optimizer: min_lr = 1 is more than lr = 1e-06; lower min_lr, or raise lr"),
        ("train.minibatches=1000", "512 rollouts a step cannot fill train.minibatches = 1000"),
        ("objective.ratio.kind=tokn", 'got "tokn"; allowed: "power_mean", "prefix", "sequence", "sequence_token", "token"'),
        ("objective.entropy.kind=fixed", "objective.entropy.coefficient: missing; allowed: a number > 0"),
        ("objective.kl.against=new", 'objective.kl.against: got "new"; allowed: "old", "reference"'),
        ("steps", 'override "steps": write path=value, such as train.steps=10'),
        ("--train.steps=1", 'override "--train.steps=1": write path=value'),
        ("name=[1", 'override "name=[1": not valid YAML: '),
        ("name=${oc.env:HOME}", "${oc.env:HOME}: only fields of this configuration can be referred to"),
        ("name=${name}", "name: Recursive interpolation detected"),
        ("name=a/b", 'name: got "a/b"; a name has printable characters but the slash, not U+002F'),
        ('name="\\u202e95"', 'name: got "\\u202e95"; a name has printable characters but the slash, not U+202E'),
        ("name=''", "allowed: text of 1 to 200 characters"),
        ("rollout.sampling.temperature=inf", "allowed: a number ≥ 0.01 and ≤ 2"),
        ("optimizer.min_lr=1e-7", "optimizer: min_lr = 1e-07 does nothing with schedule = constant; set schedule = linear"),
        (["engine.noise_every=0", "engine.noise_sequences=2"], "noise_sequences = 2 does nothing with noise_every = 0; set"),
        ("train.hang_timeout_s=1e14", "train.hang_timeout_s: got 100000000000000.0; allowed: a number ≥ 60 and ≤ 2592000"),
        ("optimizer.min_lr=inf", 'optimizer.min_lr: got "inf"; allowed: a number ≥ 0'),
        ("optimizer.betas=[0.9, 1.0]", "optimizer.betas[1]: got 1.0; allowed: a number ≥ 0 and < 1"),
        ("reward.failed_reward=.nan", "reward.failed_reward: got NaN"),
        (["cluster.spare_nodes=1", "cluster.train_nodes=2"], "spare_nodes = 1 replace a node when the ranks start again"),
        (["cluster.spare_nodes=1", "train.max_restarts=3"], "spare_nodes = 1 cannot replace the first node"),
        ([DOCKER, "cluster.partition=h100"], "cluster: partition = h100 does nothing with executor = docker"),
        ([KUBERNETES, IMAGE, "cluster.max_requeues=0"], "max_requeues = 0 does nothing with"),
        ([LOCAL, IMAGE], "container = a does nothing with executor = local; set executor = docker"),
        ("cluster.kubernetes={}", "section kubernetes does nothing with executor = slurm; set executor = kubernetes, or leave"),
        (["cluster.executor=lepton", IMAGE], "needs the section lepton with node_group, resource_shape, storage"),
        (DOCKER, "executor = docker runs an image; name it in container"),
        ([LOCAL, "cluster.rollout_nodes=2"], "one machine, and train_nodes = 1 and rollout_nodes = 2; set them"),
        ("cluster.rollout_python=b", "rollout_python is for nodes of servers, and with rollout_nodes = 0 the trainer's start"),
        ("cluster.rollout_container=b", "rollout_container is for nodes of servers, and with rollout_nodes = 0 the trainer's"),
        (
            [KUBERNETES, IMAGE, "cluster.rollout_container=b"],
            "gives all nodes one image; leave rollout_container out, and name",
        ),
        (["cluster.executor=skypilot", IMAGE, "cluster.skypilot.infra=aws"], "name of the GPU; set cluster.skypilot.gpus"),
        ([LOCAL, "cluster.rollout_nodes=1", "cluster.gpus_per_node=1"], "but ranks and workers of servers need 2; make them"),
        ("cluster.executor=k8s", 'cluster.executor: got "k8s"; allowed: "slurm", "local", "docker", "skypilot"'),
        ("engine.noise_every=0", "kl_mask.tolerance = auto takes measured noise, and engine.noise_every = 0 measures none"),
        (["objective.trust_region.low=auto", "train.minibatches=1"], "every ratio is 1; set train.minibatches = 4"),
        (
            "objective={preset: gdpo, advantage: {weights: [1, 2]}}",
            "weights has 2 entries, and reward.weights names none; a run",
        ),
        ("objective.kl={}", "objective.kl = {} does not say what it switches on"),
        ("output=/proc/x", "a run cannot write to the system's own /proc"),
        ("output=/dev/x", "a run cannot write to the system's own /dev"),
        ("output=/tmp/../sys/x", "a run cannot write to the system's own /sys"),
        ("output=''", "output is an empty path"),
        ("rollout.replay=''", "replay is an empty path"),
        ('output="a\\0b"', "U+0000 is a character that no file and no command line takes"),
        ("seed=2147483648", "seed: got 2147483648; allowed: an integer ≥ 0 and < 2147483648"),
        ("rollout.prompts_per_step=9223372036854775807", "an integer here is 2147483647 at most"),
        ("train.steps=???", "??? stands for a value that is missing"),
        ("seed=0x_", "a value cannot be read"),
        ("objective.preset=[a]", "is unknown; the nearest is"),
        ("name=!!python/name:os.system x", "python/name:os.system"),
        (["data.train=mine.jsonl", "evaluate.every=5"], "evaluate.every = 5, but there are no held-out problems"),
        (["data.heldout=null", "evaluate.every=5"], "evaluate.every = 5, but there are no held-out problems"),
        (["data.train=mine.jsonl", "data.heldout=builtin:addition-heldout"], "one is your own"),
        ("data.heldout=mine.jsonl", "data.train = builtin:addition with data.heldout = mine.jsonl: one is your own"),
        ("rollout.samples_per_prompt=1", "rollout.samples_per_prompt = 1: an advantage compares"),
        ("rollout.sampling.top_p=0.9", "sampling.top_p = 0.9 without sampling.top_k"),
        ("rollout.sampling.min_p=0.1", "sampling.min_p = 0.1 without sampling.top_k"),
        ("rollout.sampling.bad_words=[idiot]", "sampling.bad_words without sampling.top_k"),
        ("rollout.sampling.top_k=1025", "at most 1024 of them"),
        (["rollout.sampling.top_k=8", "rollout.server.speculative={}"], "sampling.top_k = 8 with server.speculative"),
        (["rollout.partial=true", "rollout.oversample=1.5", "rollout.sampling.stop=[x]"], "partial = true with sampling.stop"),
        ("rollout.sampling.stop=['']", "one of the strings is empty"),
        ("engine.moe_balance.coefficient=0.01", "coefficient = 0.01 does nothing with kind = none; set kind = aux_loss"),
        ([BIAS, "engine.moe_balance.coefficient=0.01"], "coefficient = 0.01 does nothing with kind = expert_bias"),
        ([AUX, "engine.moe_balance.update_rate=0.01"], "update_rate = 0.01 does nothing with kind = aux_loss"),
        ([BIAS, "model.lora.rank=8"], "expert_bias moves biases of the model, which model.lora leaves as it is"),
        ("evaluate.sets={a b: {path: x}}", "'a b' cannot name a set"),
        ("evaluate.sets.a={}", "evaluate.sets.a.path: missing"),
        ("evaluate.sets.a={path: x, sampling: {temprature: 1}}", "did you mean evaluate.sets.a.sampling.temperature"),
        ("evaluate.sets.a={path: x, greedy: false, samples: 0}", "leaves nothing to answer"),
        (["evaluate.samples=0", "evaluate.sets.a={path: x, greedy: false}"], "leaves nothing to answer"),
        (["evaluate.samples=4", "evaluate.sets.a={path: x, k: [1, 8]}"], "sets.a.k = 8 cannot be estimated from 4 samples"),
        ("evaluate.sets.a={path: x, k: [2, 2]}", "k names a number twice"),
        (REDUCE, "with dp × cp = 1 there is none"),
        ([*DP2, "engine.bucket_size=1000"], "bucket_size = 1000 does nothing with overlap_grad_reduce = false; set"),
        ([*DP2, "engine.overlap_param_gather=true"], "gather = true does nothing with overlap_grad_reduce = false"),
        ([*DP2, REDUCE, "engine.overlap_param_gather=true"], "only optimizer.distributed = true"),
        ([*DP2, REDUCE, "engine.overlap_param_gather=true", *MXFP8], "the gradients' memory, which the next update clears"),
        ("engine.recompute_modules=[mlp]", "recompute_modules = ['mlp'] does nothing with recompute = none"),
        (["engine.recompute=full", "engine.recompute_modules=[mlp]"], "does nothing with recompute = full"),
        (["engine.recompute=selective", "engine.recompute_modules=[]"], "computes nothing again; set recompute = none"),
        ([*AGAIN, "engine.fp8.recipe=delayed"], "recompute_modules = layernorm with fp8.recipe = delayed, which Megatron-Core"),
        (["engine.parallel.cp=2", "engine.layers=te", "model.dtype=float32"], "for which Transformer Engine has no attention"),
        (["engine.recompute=selective", "engine.recompute_modules=[norms]"], 'got "norms"; allowed: "core_attn", "mlp"'),
    ],
)
def test_what_cannot_be_meant_is_refused_with_what_to_write(overrides: str | list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run(None, [overrides] if isinstance(overrides, str) else overrides)
    (problem,) = caught.value.problems
    assert sentence in problem
    assert "\n" not in problem


def test_sampling_that_can_be_scored_is_accepted() -> None:
    for given, truncates, needs_tokenizer in (
        ({"top_p": 0.9, "top_k": 20, "min_p": 0.01}, True, False),
        ({"stop": ["Question:"]}, False, True),
        ({}, False, False),
    ):
        sampling = RunConfig.model_validate({"rollout": {"sampling": given}}).rollout.sampling
        assert (sampling.truncates, sampling.needs_tokenizer) == (truncates, needs_tokenizer)


DENSE = small_spec()
MIXTRAL, GLM = (small_spec(architecture=name, experts=MOE[name]) for name in ("MixtralForCausalLM", "Glm4MoeForCausalLM"))


def test_a_model_must_have_what_is_balanced() -> None:
    DENSE.check_balance("none")
    MIXTRAL.check_balance("aux_loss")
    GLM.check_balance("expert_bias")
    for kind in ("aux_loss", "expert_bias"):
        with pytest.raises(ValueError, match=f"kind = {kind} balances experts, and LlamaForCausalLM has none"):
            DENSE.check_balance(kind)
    with pytest.raises(ValueError, match=r"bias on each expert's score, and MixtralForCausalLM has none, in"):
        MIXTRAL.check_balance("expert_bias")


MIXED = replace(GLM, dense_layers=1, dense_ffn_size=16)
MODULES = {"core_attn", "mlp", "moe", "moe_act", "layernorm"}


@pytest.mark.parametrize(
    ("spec", "te", "acts"),
    [
        (DENSE, False, {"core_attn", "mlp"}),
        (DENSE, True, {"core_attn", "mlp"}),
        (MIXTRAL, False, {"core_attn", "moe"}),
        (MIXTRAL, True, MODULES - {"mlp"}),
        (MIXED, False, {"core_attn", "mlp", "moe"}),
        (MIXED, True, MODULES),
    ],
)
def test_a_module_that_the_model_does_not_have_is_refused(spec: ModelSpec, te: bool, acts: set[str]) -> None:
    for module in MODULES:
        refused = pytest.raises(ValueError, match=rf"engine\.recompute_modules has {module}, ")
        with nullcontext() if module in acts else refused:
            spec.check_recompute(["core_attn", module], transformer_engine=te)
