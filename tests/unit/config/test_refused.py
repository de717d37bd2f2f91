"""What cannot be meant, or could not act, is refused with what to write. … stands for any text."""

import re
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
OVERLAP, PENALISE = "train.schedule=overlap", "rollout.truncated=penalise"
OUTSIDE = "environment={name: outside, adapter: agent, agent: {port: 8600, key_file: /k}}"
FILTERS, SERVER = "rollout.filter_groups", "rollout.server"
FREE, GDPO, THREE = "rollout.uncorrected=true", "objective.preset=gdpo", "reward.weights={a: 1, b: 1, c: 1}"
SET = "evaluate.sets.s={path: x, majority: none}"
OWN = "data.train=[{path: a/x.jsonl, verifier: 'o.py:f'}]"
LONG = "{max_tokens: 16, buffer_tokens: 8}"
AFTER_UPDATES = (
    *("canary/drift", "staleness/mean", "reward/failed", "response_len/truncated", "groups/drawn", "moe/aux_loss"),
    *("entropy/noise/p50", "source/a/reward", "staleness/kl_1"),
)
NO_NOISE = ["engine.noise_every=0", "objective.preset=grpo"]
ROLLBACK = ["train.rollback.metric=loss", "train.rollback.above=1"]
BF16, FP32 = "model.dtype=bfloat16 ", "model.dtype=float32 "
SPREAD = BF16 + "optimizer.distributed=true "
FP8, CP = BF16 + "engine.fp8.", "engine.parallel."
LORA, SERVED = "model.lora.rank=4 model.lora.", "model.lora.rank=4 model.lora.serve=adapter "
PRECISE = "rollout.server.quantization=fp8_per_tensor rollout.uncorrected=true "
TEPO = "objective.distill.coefficient=0.5"
TOP_K = "objective.distill={of: top_k, k: 3, divergence: forward_kl, coefficient: 0.5}"
ONE = "rollout.samples_per_prompt=1"
A, B, TAUGHT = "teachers.a.path=x", "teachers.b.path=y", "teachers.a={path: x, place: server}"


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
        (ONE, "rollout.samples_per_prompt = 1: an advantage compares"),
        (f"{ONE} {GDPO}", "rollout.samples_per_prompt = 1: an advantage compares"),
        ([ONE, f"{FILTERS}.filters=[zero_variance]"], "zero_variance refuses each group of one response"),
        ("rollout.sampling.top_p=0.9", "sampling.top_p = 0.9 without sampling.top_k"),
        ("rollout.sampling.min_p=0.1", "sampling.min_p = 0.1 without sampling.top_k"),
        ("rollout.sampling.bad_words=[idiot]", "sampling.bad_words without sampling.top_k"),
        ("rollout.sampling.top_k=1025", "at most 1024 of them"),
        (["rollout.sampling.top_k=8", "rollout.server.speculative={}"], "sampling.top_k = 8 with server.speculative"),
        ([SET, "evaluate.sets.s.sampling.min_p=0.1", f"{SERVER}.speculative={{}}"], "s.sampling.min_p = 0.1, which vLLM"),
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
        (["engine.layers=te", "model.dtype=float32"], "which Transformer Engine multiplies in TF32"),
        (["engine.platform=cuda", "model.dtype=float32"], "set model.dtype = bfloat16, or engine.layers = local"),
        (["engine.recompute=selective", "engine.recompute_modules=[norms]"], 'got "norms"; allowed: "core_attn", "mlp"'),
        # keys of another place
        (["objective.beta=0.1"], "did you mean objective.distill.beta?"),
        (["verifyer=exact"], "did you mean reward.verifier or environment.agent.verifier?"),
        # schedules
        ([OVERLAP], "objective.mismatch = null with train.schedule = overlap: train.max_staleness = 1"),
        ([OVERLAP, FREE, f"{SERVER}.placement=colocated"], "schedule = overlap with rollout.server.placement = colocated"),
        (["train.max_staleness=2"], "max_staleness = 2 does nothing with schedule = sync"),
        (["train.stale=keep"], "stale = keep does nothing with schedule = sync"),
        (["train.kv_cache=keep"], "kv_cache = keep does nothing with schedule = sync"),
        ([OVERLAP, FREE, f"{SERVER}.cpu_threads=all"], "leaves the trainer no core"),
        ([OVERLAP, FREE, TAUGHT, "teachers.a.server.cpu_threads=all", TEPO], "teachers.a.server.cpu_threads = all with"),
        # groups and long responses
        ([PENALISE], "truncated = penalise needs overlong.buffer"),
        (["rollout.truncated=mask", f"objective.advantage.overlong={LONG}"], "the longest would not be penalised; set rollout"),
        ([PENALISE, "rollout.overlong.buffer=2", f"objective.advantage.overlong={LONG}"], "would each subtract DAPO's penalty"),
        (["rollout.overlong.buffer=2"], "truncated = train and overlong belong together"),
        (["rollout.truncated=mask", "rollout.overlong.buffer=2"], "truncated = mask and overlong belong together"),
        ([PENALISE, "rollout.overlong.buffer=999"], "even an empty response would be punished"),
        ([PENALISE, "rollout.overlong.buffer=2", "objective.preset=max_rl"], "divides by their mean"),
        (["reward.failed_reward=-1", "objective.preset=max_rl"], "failed_reward = -1 is negative, …by their mean"),
        ([PENALISE, "rollout.overlong.buffer=2", GDPO], "a component of its own"),
        (["rollout.oversample=1.5"], "set filter_groups or partial, or leave it out"),
        (["rollout.partial=true"], "oversample = 1 begins no more groups than a step needs"),
        (["rollout.partial=true", "rollout.oversample=1.5"], "which biases the gradient; set objective.mismatch.kind"),
        ([f"{FILTERS}.filters=[]"], "filters is empty"),
        ([f"{FILTERS}.filters=[variance]"], "'variance' is no filter; known: zero_variance"),
        ([f"{FILTERS}.filters=[too_long]"], "the filter too_long needs max_truncated"),
        ([f"{FILTERS}.max_truncated=0.5"], "max_truncated is for the filter too_long"),
        ([f"{FILTERS}={{filters: [reward_range], reward_range: [1, 0]}}"], "holds no number"),
        ([f"{FILTERS}.filters=['a:keep', 'b.py:keep']"], "two filters are called keep"),
        (["data.filter=['a.py:keep', 'b.py:keep']"], "two filters are called keep"),
        # a generation step of one's own
        (["rollout.collect=mine.py:best", f"{FILTERS}={{}}"], "collect = mine.py:best"),
        (["rollout.collect=mine.py:best", "environment.name=calculator"], "collect = mine.py:best"),
        (
            [OVERLAP, FREE, OUTSIDE],
            "train.schedule = overlap: evaluations cannot share environment.agent.port = 8600; set evaluate.every = 0",
        ),
        # environments
        (["environment.name=calculator", "rollout={partial: true, oversample: 1.5, uncorrected: true}"], "cannot be put aside"),
        (["environment.name=calculator", PENALISE, "rollout.overlong.buffer=4"], "penalise with environment"),
        (["environment.name=calculator", "reward.verifier=exact"], "rewards come from the environment"),
        (["environment={name: calculator, servers: ['http://a:1']}"], "environment.servers needs environment.key_file"),
        (["environment={name: calculator, servers: ['a:1'], key_file: k}"], "'a:1' is no address"),
        (["environment={name: calculator, max_tokens: 1}"], "leaves no room"),
        (["environment={name: 'a.py:A', special_tokens: true, observations: user}"], "messages never have any"),
        (["environment={name: 'a.py:A', adapter: agent, observations: text}"], "agent, which sends messages"),
        # servers and weights
        ([f"{SERVER}.transport=ipc"], "trainer and servers on the same GPUs, not placement = local"),
        ([f"{SERVER}={{transport: ipc, placement: external, registry: /r}}"], "GPUs, not placement = external"),
        ([f"{SERVER}={{transport: nccl, placement: colocated}}"], "transport = nccl needs a GPU for each of its ranks"),
        ([f"{SERVER}={{transport: nccl, transfer: gather}}"], "gather broadcasts over gloo"),
        ([f"{SERVER}={{placement: colocated, registry: /r}}"], "registry is for external ones"),
        (["engine={cpu_threads: 2, platform: cuda}"], "acts where the trainer runs on a CPU, and platform = cuda"),
        (SPREAD + f"engine.fp8={{recipe: blockwise, params: true}} {SERVER}.placement=colocated", "engine.fp8.params"),
        (["rollout.replay_weights=any"], "replay_weights = any has no effect without replay"),
        # rollback, checkpoints, records
        ([ROLLBACK[0], "train.save_every=1"], "give one of above"),
        ([*ROLLBACK, "train.rollback.factor=2", "train.save_every=1"], "give one of above"),
        (ROLLBACK, "save_every = 0 writes none"),
        ([*ROLLBACK, "train.save_every=1", "rollout.replay=/x"], "the same rollouts would be read again"),
        (["train.keep_best.metric=accuracy/greedy", "evaluate.every=0"], "evaluate.every = 0 makes none"),
        (["train.save_every=1", "train.keep_best.metric=avg@4"], "no metric of this run; did you mean accuracy/avg@4?"),
        ([*ROLLBACK[1:], "train.save_every=1", "train.rollback.metric=los"], "rollback.metric = los is no … mean loss?"),
        (
            [*ROLLBACK[1:], "train.save_every=1", "train.rollback.metric=time/step"],
            "metric = time/step is no figure of the updates",
        ),
        *(
            ([*ROLLBACK, "train.save_every=1", f"train.rollback.metric={name}"], f"{name} is no figure of the updates")
            for name in AFTER_UPDATES
        ),
        (["train.callbacks=[{callback: early_stopping, kwargs: {metric: accuracy/avg@8}}]"], "did you mean accuracy/avg@4?"),
        *(
            ([*ROLLBACK[1:], "train.save_every=1", f"train.rollback.metric={metric}"], f"{metric} is in no row, since {reason}")
            for metric, reason in {
                "kl/reference": "the objective has no reference model",
                "distill/divergence": "teachers names none",
                "source/a/divergence": "teachers names none",
                "mismatch/weight": "objective.mismatch is null",
                "clip/bound_low": "objective.trust_region has no auto bound",
                "clip/share_u9": "a step has 4 updates",
                "sampling/kept_mean": "rollout.sampling leaves every token possible",
            }.items()
        ),
        *(
            (
                [*ROLLBACK[1:], "train.save_every=1", A, given, f"train.rollback.metric=distill/{name}"],
                f"distill.of is {reason}",
            )
            for given, name, reason in (
                (TEPO, "agreement", "neither all nor top_k"),
                (TEPO, "mass", "not top_k"),
                ("objective.distill={coefficient: 1, of: all}", "mass", "not top_k"),
            )
        ),
        *(
            ([*NO_NOISE, "train.save_every=1", f"train.keep_best.metric={metric}"], f"is in no row, since {reason}")
            for metric, reason in {
                "environment/turns": "the run has no environment",
                "staleness/dropped": "train.schedule = sync",
                "groups/kept": "rollout.filter_groups is null",
                "groups/drawn": "rollout.filter_groups is null",
                "groups/carried": "rollout.filter_groups is null",
                "sampling/kept_max": "rollout.sampling leaves every token possible",
                "entropy/noise/p50": "engine.noise_every = 0",
                "moe/aux_loss": "engine.moe_balance.kind = none",
                "mask/fraction": "the objective selects no tokens",
                "kl/masked": "the objective selects no tokens",
                "entropy/delta_unmasked": "the objective selects no tokens",
                "moe/layer_01/replay_differs": "rollout.server.routing_replay = false",
            }.items()
        ),
        (
            ["objective.trust_region.kind=none", "train.callbacks=[{callback: early_stopping, kwargs: {metric: clip/share}}]"],
            "clip/share is in no row, since objective.trust_region.kind = none",
        ),
        (
            ["rollout.canary.every=0", "train.callbacks=[{callback: early_stopping, kwargs: {metric: canary/drift}}]"],
            "canary/drift is in no row, since rollout.canary.every = 0",
        ),
        *(
            (["rollout.replay=/x", "train.save_every=1", f"train.keep_best.metric={name}"], f"{name} is in no row, since")
            for name in ("accuracy/greedy", "eval/s/avg@4", "heldout/reward_greedy", "idle/trainer", "groups/filtered/a")
        ),
        # servers of teachers
        *(
            (f"{FP32}objective.distill={{coefficient: 1, of: top_k}} {TAUGHT} teachers.a.server={{{given}}}", sentence)
            for given, sentence in {
                "load_format: dummy": "teachers.a: server.load_format = dummy: no update would ever bring",
                "transfer: gather": "server.transfer = gather is for the policy's servers",
                "routing_replay: true": "server.routing_replay = True is for the policy's servers",
                "head_dtype: float32": "teachers.a.server.head_dtype = float32 does nothing for servers in float32",
                "quantization: fp8_per_block": "teachers.a.server.quantization = fp8_per_block takes servers in bfloat16",
            }.items()
        ),
        (
            [TEPO, TAUGHT, f"{SERVER}={{placement: external, registry: r}}", "teachers.a.server=${rollout.server}"],
            "teachers.a.server.registry = r is the folder of rollout.server too, …; name another one",
        ),
        (["train.grace_s=1e10"], "train.grace_s: got 10000000000.0"),
        (["train.callbacks=[early_stopping]", "evaluate.every=0"], "early_stopping = accuracy/greedy is measured by eval"),
        ([SET, "train.save_every=1", "train.keep_best.metric=eval/s/maj@4"], "did you mean eval/s/avg@4?"),
        (
            ["log={token_samples: 2, token_samples_every: 10}", "train.steps=9"],
            "token_samples_every = 10 is more than train.steps = 9",
        ),
        # rewards of several components
        ([GDPO, "objective.advantage.weights=[1,2]"], "has 2 entries, … names none; a run has one … unless reward.weights"),
        ([GDPO, "reward.weights={a: 1, b: 2}"], "set objective.advantage.weights=[1, 2], in this order"),
        ([PENALISE, "rollout.overlong.buffer=2", "objective.preset=on_policy_distill", "teachers.a.path=x"], "read them"),
        (
            [OWN, "data.heldout=[{path: b/x.jsonl, verifier: 'o.py:g'}]"],
            "both have a source x, with other verifiers, …; give the held-out source another name",
        ),
        ([OWN, "data.heldout=b/x.jsonl"], "heldout = b/x.jsonl has no verifier, …: its default, last_word, would"),
        ([OWN, "data.heldout=[b/y.jsonl]"], "data.heldout = b/y.jsonl has no verifier"),
        ([OWN, SET], "evaluate.sets.s has no verifier, and nothing of data.train"),
        (["environment.name=calculator", SET], "evaluate.sets.s has no verifier, and nothing of data.train is scored"),
        ([GDPO, THREE, "objective.advantage.weights=[1,2]"], "has 2 entries, … names 3 components: a, b, c"),
        # W&B and MLflow
        (["log.mlflow={experiment_name: a, tracking_uri: 'postgresql://me:pw@host/db'}"], "an address with a password"),
        (["log.mlflow={experiment_name: a, tracking_uri: ./mlruns}"], "is a folder, which MLflow 3 cannot write to"),
        (["log.mlflow={experiment_name: a, tracking_uri: 'http://[::1'}"], "is no address"),
        (["log.wandb={project: team/mine}"], "W&B takes no / in the name of a project"),
        # teachers
        (TEPO, "teachers names none; set teachers.NAME.path to a model"),
        ("teachers.a.path=builtin:tiny", "teachers.a is never asked; set objective.distill"),
        (["teachers.a.path=builtin:tiny", "objective.distill.coefficient=0"], "a coefficient of 0 adds nothing"),
        (["teachers={a b: {path: x}}", TEPO], "cannot name a teacher"),
        ([A, B, TEPO], "the source addition of data.train names no teacher"),
        ([A, "data.train=[{path: 'builtin:addition', teacher: z}]", TEPO], "names the teacher z; teachers has a"),
        ([A, B, "data.train=[{path: 'builtin:addition', teacher: a}]", TEPO], "teachers.b is named by no source"),
        ([TAUGHT, "objective.distill.of=all"], "set place = ranks, or distill.of = top_k or sampled"),
        ([A, TOP_K], "teachers.a.place = ranks has the whole distribution; set distill.of = all"),
        ([TAUGHT, TOP_K, "objective.distill.k=65"], "got 65; allowed: an integer ≥ 1 and ≤ 64"),
        ([TAUGHT, TEPO, "objective.distill.k=3"], "k = 3 does nothing with of = sampled"),
        ([TAUGHT, TEPO, "rollout.sampling.temperature=0.5"], "scores at temperature 1"),
        ([A, TEPO, "rollout.sampling.top_k=5"], "a teacher may not reach the tokens"),
        (["teachers.a={path: x, server: {count: 2}}", TEPO], "server is for a teacher with place = server"),
        (["teachers.a={path: x, threads: 2}", TEPO], "threads = 2 does nothing with place = ranks"),
        (["teachers.a={path: x, place: server, server: {placement: colocated}}", TEPO], "takes turns with the trainer"),
        ([A, TEPO, "objective.distill.divergence=jsd"], "needs more than the sampled token; set distill.of = all, or top_k"),
        ([A, "objective.distill={of: all, beta: 0.3}"], "beta = 0.3 does nothing with divergence = reverse_kl"),
        # FP8
        (FP8 + "recipe=blockwise engine.fp8.amax_history_len=16", "amax_history_len = 16 does nothing with recipe = blockwise"),
        (FP8 + "recipe=mxfp8 engine.fp8={amax_compute_algo: max, margin: 0}", "amax_compute_algo = max does nothing with"),
        (FP8 + "recipe=delayed engine.fp8.first_layers_bf16=1", "1 layers in bfloat16 do not go with recipe = delayed"),
        (SPREAD + "engine.fp8={recipe: delayed, params: true}", "does not go with recipe = delayed"),
        (FP8 + "params=true engine.fp8.format=e4m3", "format, params has no effect while recipe = none"),
        (FP32 + "engine.fp8.recipe=tensorwise", "tensorwise with model.dtype = float32"),
        (FP8 + "recipe=tensorwise engine.fp8.params=true", "engine.fp8.params = true needs optimizer.distributed = true"),
        ("engine.layers=te engine.platform=cpu", "layers = te needs a GPU, and platform = cpu"),
        (FP8 + "recipe=delayed engine.layers=local", "needs Transformer Engine's layers on a GPU, but layers = local"),
        (FP8 + "recipe=delayed engine.platform=cpu", "needs Transformer Engine's layers on a GPU, but platform = cpu"),
        # optimizer states
        (BF16 + "optimizer.offload_fraction=0.5", "offload_fraction = 0.5 needs optimizer.distributed = true"),
        (BF16 + "optimizer.exp_avg_dtype=bfloat16", "exp_avg_dtype = bfloat16 needs optimizer.distributed"),
        (
            SPREAD + "optimizer={offload_fraction: 1, store_param_remainders: true}",
            "with offload_fraction, whose states are fp32",
        ),
        (SPREAD + "optimizer={exp_avg_sq_dtype: bfloat16, betas: [0.9, 0.999]}", "bfloat16 rounds a step of 0.001 of the mean"),
        (SPREAD + "optimizer.exp_avg_sq_dtype=fp8", "betas[1] below 0.9375"),
        (FP32 + "optimizer={distributed: true, exp_avg_dtype: bfloat16}", "float32: its Adam has fp32 masters of bfloat16"),
        (FP32 + "optimizer={distributed: true, offload_fraction: 1}", "optimizer.offload_fraction with model.dtype = float32"),
        (SPREAD + "optimizer.exp_avg_dtype=bfloat16 engine.platform=cpu", "Adam on a GPU, and engine.platform = cpu"),
        (
            SPREAD + "optimizer.exp_avg_dtype=fp8 rollout.server.placement=colocated",
            "FP8 cannot leave the GPU for the servers'",
        ),
        (SPREAD + "optimizer.offload_fraction=1 engine.fp8={recipe: blockwise, params: true}", "with engine.fp8.params = true"),
        # context and expert parallelism
        (CP + "cp_comm_type=a2a", "cp_comm_type = a2a is for context parallelism, and cp = 1"),
        (CP + "cp=2 engine.parallel.cp_comm_type=a2a engine.platform=cpu", "cp_comm_type = a2a … platform = cpu gathers"),
        (CP + "cp=2 engine.parallel.cp_comm_type=a2a engine.layers=local", "cp_comm_type = a2a … layers = local gathers"),
        (FP8 + "recipe=delayed engine.parallel.cp=2", "cp = 2 with fp8.recipe = delayed…blockwise"),
        (FP8 + "recipe=tensorwise engine.parallel.cp=2", "cp = 2 with fp8.recipe = tensorwise…mxfp8"),
        (CP + "cp=2 engine.parallel.ep=4", "ep × etp = 4 × 1 does not divide the 2 ranks of a pipeline stage"),
        (
            "engine.parallel={pp: 2, vpp: 2, dp: 2} rollout={prompts_per_step: 3, samples_per_prompt: 2} train.minibatches=2",
            "6 rollouts a step cannot fill train.minibatches = 2 on …2 for each, as …vpp = 2",
        ),
        # adapters
        (LORA + "dropout=0.1", "dropout must be 0: a training step draws no random numbers"),
        (LORA + "target_modules=[]", "target_modules is empty"),
        (LORA + "target_modules=[q_proj,q_proj]", "names a layer twice"),
        (LORA + "target_modules=[q_proj,all-linear]", "all-linear already means every layer"),
        ("model.lora.rank=600 model.lora.serve=adapter", "takes ranks up to 512, …rank = 600; set …merged"),
        (SERVED + "rollout.server.placement=colocated", "servers that keep their weights…serve = merged"),
        (SERVED + "rollout.server.load_format=dummy", "never sends the weights under the adapters; set …load_format = auto"),
        (SERVED + BF16 + PRECISE, "full precision, and …quantization = fp8_per_tensor; set model.lora.serve = merged"),
        ("model.lora.rank=4 " + FP8 + "recipe=tensorwise", "model.lora with engine.fp8.recipe = tensorwise"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_what_to_write(overrides: str | list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run(None, re.split(r" (?=[\w.]+=)", overrides) if isinstance(overrides, str) else overrides)
    (problem,) = caught.value.problems
    assert re.search(".*".join(map(re.escape, sentence.split("…"))), problem), problem
    assert "\n" not in problem


@pytest.mark.parametrize(
    "overrides",
    [
        [OVERLAP, "train.max_staleness=4", "objective.preset=decoupled_ppo"],
        [OVERLAP, FREE, OUTSIDE, "evaluate.every=0"],
        [OVERLAP, FREE, OUTSIDE, "environment.servers=[http://a:1]", "environment.key_file=/k"],
        [OUTSIDE],
        *(
            ["train.save_every=1", f"train.keep_best.metric={metric}", *given]
            for metric, *given in (
                ("clip/share_u4",),
                ("sampling/kept_mean", "rollout.sampling.top_k=8"),
                ("groups/kept", "rollout={partial: true, oversample: 1.5, uncorrected: true}"),
                ("groups/filtered/zero_variance", "rollout.filter_groups={}"),
                ("staleness/dropped", OVERLAP, FREE),
                ("entropy/noise/p50",),
                ("moe/aux_loss", AUX),
                ("environment/turns", "environment.name=calculator"),
                ("mask/fraction", "objective.preset=clip_cov"),
            )
        ),
        ["log.token_samples=2", "train.steps=10"],
        [GDPO, "reward.weights={a: 1, b: 1}"],
        [GDPO, "reward.weights={a: 1, b: 2}", "objective.advantage.weights=[3,1]"],
        ["reward.weights={a: 1, b: 2}"],
        [OWN, "data.heldout=[b/x.jsonl]"],
        [OWN, "data.heldout=b/x.jsonl", SET, "reward.verifier=last_word"],
        [ONE, A, "objective.preset=on_policy_distill"],
        [ONE, A, TEPO],
        ["engine.parallel={pp: 2, vpp: 2}", "rollout={prompts_per_step: 3, samples_per_prompt: 2}", "train.minibatches=2"],
    ],
)
def test_what_can_act_is_accepted(overrides: list[str]) -> None:
    load_run(None, overrides)


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
