"""Settings of a run that cannot act, or contradict each other, are refused when the configuration is read."""

from __future__ import annotations

import pytest

from tepo_megatron.config.load import ConfigError, load_run

OVERLAP, PENALISE = "train.schedule=overlap", "rollout.truncated=penalise"
FILTERS, SERVER = "rollout.filter_groups", "rollout.server"
FREE, GDPO, THREE = "rollout.uncorrected=true", "objective.preset=gdpo", "reward.weights={a: 1, b: 1, c: 1}"
FP8 = ["engine.fp8={recipe: blockwise, params: true}", "optimizer.distributed=true", "model.dtype=bfloat16"]
ROLLBACK = ["train.rollback.metric=loss", "train.rollback.above=1"]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        # schedules
        ([OVERLAP], r"objective\.mismatch = null with train\.schedule = overlap: train\.max_staleness = 1"),
        ([OVERLAP, FREE, f"{SERVER}.placement=colocated"], r"schedule = overlap with rollout\.server\.placement = colocated"),
        (["train.max_staleness=2"], r"max_staleness = 2 does nothing with schedule = sync"),
        (["train.stale=keep"], r"stale = keep does nothing with schedule = sync"),
        (["train.kv_cache=keep"], r"kv_cache = keep does nothing with schedule = sync"),
        ([OVERLAP, "train.max_staleness=0"], r"train\.max_staleness: got 0; allowed: an integer ≥ 1"),
        ([OVERLAP, FREE, f"{SERVER}.cpu_threads=all"], r"leaves the trainer no core"),
        # groups and long responses
        ([PENALISE], r"truncated = penalise needs overlong\.buffer"),
        (["rollout.overlong.buffer=2"], r"truncated = train and overlong belong together"),
        (["rollout.truncated=mask", "rollout.overlong.buffer=2"], r"truncated = mask and overlong belong together"),
        ([PENALISE, "rollout.overlong.buffer=999"], r"even an empty response would be punished"),
        ([PENALISE, "rollout.overlong.buffer=2", "objective.preset=max_rl"], r"divides by their mean"),
        ([PENALISE, "rollout.overlong.buffer=2", GDPO], r"a component of its own"),
        (["rollout.oversample=1.5"], r"set filter_groups or partial, or leave it out"),
        (["rollout.partial=true"], r"oversample = 1 begins no more groups than a step needs"),
        (["rollout.partial=true", "rollout.oversample=1.5"], r"which biases the gradient; set objective\.mismatch\.kind"),
        (["rollout.oversample=2.5"], r"oversample"),
        ([f"{FILTERS}.filters=[]"], r"filters is empty"),
        ([f"{FILTERS}.filters=[variance]"], r"'variance' is no filter; known: zero_variance"),
        ([f"{FILTERS}.filters=[too_long]"], r"the filter too_long needs max_truncated"),
        ([f"{FILTERS}.max_truncated=0.5"], r"max_truncated is for the filter too_long"),
        ([f"{FILTERS}={{filters: [reward_range], reward_range: [1, 0]}}"], r"holds no number"),
        ([f"{FILTERS}.filters=['a:keep', 'b.py:keep']"], r"two filters are called keep"),
        ([f"{FILTERS}={{}}", "rollout.samples_per_prompt=1"], r"refuses every group of samples_per_prompt = 1"),
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
        (["log.token_samples=2", "train.steps=9"], r"token_samples_every = 10 is more than train\.steps = 9"),
        # rewards of several components
        ([GDPO, "objective.advantage.weights=[1,2]"], r"names 2 rewards, but a run has one .* unless reward\.weights"),
        ([GDPO, "reward.weights={a: 1, b: 2}"], r"set objective\.advantage\.weights=\[1, 2\], in this order"),
        ([GDPO, THREE, "objective.advantage.weights=[1,2]"], r"has 2 entries, .* names 3 components: a, b, c"),
        # W&B and MLflow
        (["log.mlflow={experiment_name: a, tracking_uri: 'postgresql://me:pw@host/db'}"], r"an address with a password"),
        (["log.mlflow={experiment_name: a, tracking_uri: ./mlruns}"], r"is a folder, which MLflow 3 cannot write to"),
        (["log.mlflow={experiment_name: a, tracking_uri: 'http://[::1'}"], r"is no address"),
        (["log.mlflow={}"], r"log\.mlflow\.experiment_name"),
        (["log.wandb={project: team/mine}"], r"W&B takes no / in the name of a project"),
        (["log.wandb={project: mine, mode: disabled}"], r'allowed: "online", "offline"'),
        (["log.wandb.api_key=abc"], r"log\.wandb\.api_key"),
    ],
)
def test_what_cannot_act_is_refused(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_run(None, overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        [OVERLAP, FREE, "model.lora.serve=adapter"],
        [OVERLAP, FREE, "rollout.oversample=1.5", "rollout.partial=true"],
        [OVERLAP, "train.max_staleness=4", "objective.preset=decoupled_ppo"],
        ["log.token_samples=2", "train.steps=10"],
        [GDPO, "reward.weights={a: 1, b: 1}"],
        [GDPO, "reward.weights={a: 1, b: 2}", "objective.advantage.weights=[3,1]"],
        ["reward.weights={a: 1, b: 2}"],
    ],
)
def test_what_can_act_is_accepted(overrides: list[str]) -> None:
    load_run(None, overrides)
