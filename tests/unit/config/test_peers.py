"""Configurations of TRL, verl and NeMo-RL, and single keys of theirs."""

import re
from pathlib import Path
from typing import Any

import pytest

from tepo_megatron.config.load import ConfigError, load_run
from tepo_megatron.config.peers import convert, peers
from tepo_megatron.config.schema import schema_rows
from tepo_megatron.tasks.reward.verifiers import resolve_verifier
from tests.support.cli import invoke

FILES = Path(__file__).parent / "peers"

EXPECTED: dict[str, dict[str, Any]] = {
    "trl": {
        "train.steps": 100,  # 400 updates, four a step
        "rollout.prompts_per_step": 32,
        "optimizer.warmup_steps": 20,
        "train.save_every": 12,
        "objective.trust_region.high": 0.28,
        "objective.advantage.kind": "group",
        "objective.mismatch.cap": 3.0,
        "model.lora.rank": 32,
        "objective.kl": None,
        "model.path": "hub:Qwen/Qwen2.5-7B",
        "data.train": "hub:trl-lib/DeepMath-103K",
        "data.fields.answer": "solution",
    },
    "verl": {
        "train.minibatches": 4,
        "optimizer.lr": 1e-6,
        "optimizer.warmup_steps": 40,
        "objective.aggregation.kind": "sequence_mean",
        "objective.trust_region.dual": 10.0,
        "objective.kl.estimator": "k3",
        "engine.parallel.tp": 2,
        "data.heldout": "data/gsm8k/test.parquet",
        "data.fields.answer": "reward_model.ground_truth",
        "model.path": "models/Qwen2.5-7B",
        "rollout.server.count": 4,
    },
    "nemo-rl": {
        "train.minibatches": 4,
        "rollout.server.max_model_len": 4096,
        "optimizer.lr": 5e-6,
        "objective.advantage.kind": "group",
        "objective.trust_region.high": 0.28,
        "cluster.rollout_nodes": 1,
        "data.fields.answer": "output",
    },
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_configuration_of_another_trainer_becomes_a_run_that_fits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = Path("run.yaml")
    run.write_text(invoke("config", f"from-{name}", FILES / f"{name}.yaml").stdout)
    config = load_run(run)
    for field, expected in EXPECTED[name].items():
        value: Any = config
        for part in field.split("."):
            value = getattr(value, part)
        assert value == expected, field
    comments = [line for line in run.read_text().splitlines() if line.startswith("#")]
    assert any("computed" in line or "rewards.md" in line or "critic" in line for line in comments)
    invoke("plan", run)


def test_every_field_that_the_table_names_is_one() -> None:
    known = {row.path for row in schema_rows()}
    known |= {path[:end] for path in known for end, sign in enumerate(path) if sign == "."}
    named = {field.removesuffix(".kind") for peer in peers().values() for entry in peer.keys.values() for field in entry.fields}
    assert named <= known
    assert sum(len(peer.keys) for peer in peers().values()) > 90


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.max_response_length=9", "did you mean rollout.sampling.max_new_tokens?"),
        ("loss_type=grpo", "did you mean objective.preset?"),
        ("per_device_train_batch_size=9", "did you mean rollout.prompts_per_step or train.minibatches?"),
        ("train.ppo_epochs=2", "did you mean train.epochs_per_batch?"),
        ("grpo={num_prompts_per_step: 8}", "section of NeMo-RL, such as grpo.num_prompts_per_step: tepo config from-nemo-rl"),
        ("actor_rollout_ref={rollout: {n: 8}}", "it is a section of verl"),
        ("report_to=wandb", "did you mean log.tensorboard or log.wandb?"),
    ],
)
def test_a_key_of_another_trainer_is_answered_with_the_field(override: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_run(None, [override])
    assert said in str(error.value)


def test_passes_over_a_batch_are_counted_in_the_steps_that_were_updates_there() -> None:
    text = "{num_iterations: 2, steps_per_generation: 4, max_steps: 80, save_steps: 16}"
    made = convert("trl", text)[0]
    assert (made["train.epochs_per_batch"], made["train.steps"], made["train.save_every"]) == (2, 10, 2)
    text = "{actor_rollout_ref: {actor: {ppo_epochs: 3, optim: {lr_warmup_steps: 5}}}}"
    made = convert("verl", text)[0]
    assert made["optimizer.warmup_steps"] == 5 * made["train.minibatches"] * (made["train.epochs_per_batch"] or 0) == 60


COV = "ppo_kl_coef: 0.2, kl_cov_ratio: 0.02, clip_cov_ratio: 0.001, clip_cov_lb: 2.0, clip_cov_ub: 4.0"
CLIP_COV = "{preset: clip_cov, trust_region: {low: 0.2, high: 0.2, fraction: 0.001, cov_low: 2.0, cov_high: 4.0}}"
VLLM = "vllm_importance_sampling"
MASKED = "mismatch: {{kind: mask, level: sequence, low: {}, high: {}}}"
USUAL = "{{preset: dapo, trust_region: {{high: 0.2}}, {}}}"
DUAL = "{{preset: dapo, trust_region: {{high: 0.2, dual: 3.0}}, {}}}"
CORRECTED = "algorithm.rollout_correction: {{rollout_is: {}, bypass_mode: false}}"
CISPO = "use_cispo: true, reference_policy_kl_penalty: 0"
SAPO = "sapo_temperature_pos: 2.0, sapo_temperature_neg: 3.0, vllm_importance_sampling_correction: false"
SEQUENCE = f"importance_sampling_level: sequence, {SAPO}"
BY_SEQUENCE = "ratio: {kind: sequence}"
WEIGHED = "kl: {coefficient: 0.1, weight: importance}"
WEIGHTS = "use_importance_sampling_correction: true, reference_policy_kl_penalty: 0"
TRUNCATED = "truncated_importance_sampling"
BOUNDED = f"loss_fn: {{{{{WEIGHTS}, {TRUNCATED}_type: {{}}, {TRUNCATED}_ratio_min: {{}}, {TRUNCATED}_ratio: 5}}}}"
ICEPOP = "mismatch: {{kind: mask, low: {}, high: {}}}"
REJECTED = "mismatch: {kind: truncate}, rejection: {low: 0.9, high: 5.0}"
K1 = "kl: {coefficient: 0.01, estimator: k1, weight: importance}"


@pytest.mark.parametrize(
    ("name", "text", "objective"),
    [
        ("verl", "actor_rollout_ref.actor.policy_loss: {loss_mode: kl_cov}", "{preset: kl_cov, kl_cov: {coefficient: 0.1}}"),
        (
            "verl",
            f"actor_rollout_ref.actor.policy_loss: {{loss_mode: kl_cov, {COV}}}",
            "{preset: kl_cov, kl_cov: {coefficient: 0.2, fraction: 0.02}}",
        ),
        ("verl", f"actor_rollout_ref.actor.policy_loss: {{loss_mode: clip_cov, {COV}}}", CLIP_COV),
        ("trl", f"{VLLM}_cap: 2.0, {VLLM}_clip_max: 4.0", USUAL.format(MASKED.format(0.0, 2.0))),
        ("trl", f"{VLLM}_clip_max: 4.0, {VLLM}_clip_min: 0.5", USUAL.format(MASKED.format(0.5, 4.0))),
        ("trl", f"{VLLM}_clip_max: null, {VLLM}_clip_min: 0.5", USUAL.format(MASKED.format(0.5, 1e9))),
        ("trl", f"{VLLM}_clip_max: null, {VLLM}_cap: 2.0", USUAL.format(MASKED.format(0.0, 2.0))),
        ("trl", f"loss_type: grpo, delta: 4.0, {SAPO}", "{preset: grpo, trust_region: {dual: 4.0}}"),
        ("trl", f"loss_type: cispo, delta: 4.0, {SAPO}", "{preset: cispo}"),
        ("trl", f"loss_type: sapo, delta: 4.0, {SAPO}", "{preset: sapo, trust_region: {tau_positive: 2.0, tau_negative: 3.0}}"),
        ("trl", f"beta: 0.1, use_bias_correction_kl: true, {SAPO}", USUAL.format(WEIGHED)),
        ("trl", f"use_bias_correction_kl: true, {SAPO}", USUAL.format("kl: null")),
        ("trl", f"beta: 0.1, use_bias_correction_kl: true, {SEQUENCE}", USUAL.format(f"{BY_SEQUENCE}, {WEIGHED}")),
        ("trl", f"beta: 0.1, {SEQUENCE}", USUAL.format(f"{BY_SEQUENCE}, kl: {{coefficient: 0.1}}")),
        ("trl", f"beta: 0.0, use_bias_correction_kl: true, {SEQUENCE}", USUAL.format(BY_SEQUENCE)),
        ("trl", f"entropy_coef: 0.01, use_adaptive_entropy: false, {SAPO}", USUAL.format("entropy: {coefficient: 0.01}")),
        ("trl", f"entropy_coef: 0.0, multi_objective_aggregation: sum_then_normalize, {SAPO}", USUAL.format("kl: null")),
        ("verl", CORRECTED.format("sequence, rollout_is_threshold: 3.0"), DUAL.format("mismatch: {level: sequence, cap: 3.0}")),
        ("verl", CORRECTED.format("token, rollout_is_threshold: 0.5_2.0"), DUAL.format(ICEPOP.format(0.5, 2.0))),
        ("nemo-rl", "loss_fn: {reference_policy_kl_type: k1, use_on_policy_kl_approximation: false}", USUAL.format(K1)),
        ("nemo-rl", f"loss_fn: {{{CISPO}, ratio_clip_min: 1.0}}", "{preset: cispo, trust_region: {high: 0.2}}"),
        ("nemo-rl", f"loss_fn: {{{CISPO}, ratio_clip_min: 0.3}}", "{preset: cispo, trust_region: {low: 0.3, high: 0.2}}"),
        ("nemo-rl", "loss_fn: {use_kl_in_reward: true}", USUAL.format("kl: null")),
        ("nemo-rl", BOUNDED.format("icepop", 0.4), USUAL.format(ICEPOP.format(0.4, 5.0))),
        (
            "nemo-rl",
            f"loss_fn: {{{WEIGHTS}, {TRUNCATED}_ratio: 5, sequence_level_importance_ratios: true, token_level_loss: false}}",
            "{preset: grpo, ratio: {kind: sequence}, mismatch: {level: sequence, cap: 5.0}}",
        ),
        ("nemo-rl", BOUNDED.format("seq-mask-tis", 0.9), USUAL.format(REJECTED)),
    ],
)
@pytest.mark.filterwarnings("ignore:objective.ratio.kind")
def test_terms_of_other_losses_and_weights_for_their_samplers_are_kept(name: str, text: str, objective: str) -> None:
    section, _, values = text.partition(": ") if name != "trl" else ("", "", f"{{{text}, reward_funcs: accuracy_reward}}")
    for part in reversed(section.split(".") if section else ()):
        values = f"{{{part}: {values}}}"
    made, left = convert(name, values)
    result = load_run(None, [f"{field}={made[field]}" for field in made if field.startswith("objective.")]).objective
    assert result == load_run(None, [f"objective={objective}"]).objective
    assert not any("no counterpart" in sentence for sentence in left)
    assert any("nothing bounds its weights" in sentence for sentence in left) == ("seq-mask-tis" in text)
    both = BY_SEQUENCE in objective and WEIGHED in objective
    assert any("each token's ratio here, by the sequence's there" in sentence for sentence in left) == both


MCORE = "optimizer: {{lr: 2.0e-6, min_lr: 2.0e-7}}, scheduler: {{lr_decay_style: {}}}"


@pytest.mark.parametrize(
    ("name", "text", "schedule", "lowest"),
    [
        ("verl", "lr: 2.0e-6, min_lr_ratio: 0.1, lr_scheduler_type: cosine", "cosine", 2e-7),
        ("verl", "lr: 2.0e-6, min_lr_ratio: 0.1, warmup_style: cosine", "cosine", 2e-7),
        ("verl", "lr: 2.0e-6, min_lr_ratio: 0.1", "constant", 0.0),
        ("verl", "lr: 2.0e-6, min_lr: 2.0e-7, lr_decay_style: linear", "linear", 2e-7),
        ("nemo-rl", "enabled: true, " + MCORE.format("cosine"), "cosine", 2e-7),
        ("nemo-rl", "enabled: true, " + MCORE.format("constant"), "constant", 0.0),
        ("nemo-rl", MCORE.format("cosine"), "constant", 0.0),
    ],
)
def test_the_lowest_rate_is_kept_where_the_rate_falls(name: str, text: str, schedule: str, lowest: float) -> None:
    whole = "actor_rollout_ref: {{actor: {{optim: {{{}}}}}}}" if name == "verl" else "policy: {{megatron_cfg: {{{}}}}}"
    made, left = convert(name, f"{{{whole.format(text)}}}")
    optimizer = load_run(None, [f"{field}={made[field]}" for field in made if field.startswith("optimizer.")]).optimizer
    assert optimizer.schedule == schedule
    assert optimizer.min_lr == pytest.approx(lowest)
    assert not any(re.search("min_lr|lr_decay_style", sentence) for sentence in left)


def test_what_other_trainers_optimize_with_is_kept() -> None:
    verl = convert("verl", "{actor_rollout_ref: {actor: {optim: {lr_scheduler_type: cosine}}}}")[0]
    assert (verl["optimizer.schedule"], verl["optimizer.betas"]) == ("cosine", [0.9, 0.999])
    both = convert("verl", "{actor_rollout_ref: {actor: {optim: {warmup_style: cosine, lr_scheduler_type: constant}}}}")[0]
    assert both["optimizer.schedule"] == "cosine"  # which verl takes
    unknown = convert("verl", "{actor_rollout_ref: {actor: {optim: {warmup_style: x}}}}")[1]
    assert any("known are" in sentence for sentence in unknown)
    assert (
        convert("verl", "algorithm: {adv_estimator: reinforce_plus_plus_baseline}")[0]["objective.advantage.over"] == "tokens"
    )
    assert (verl["rollout.server.tp"], verl["rollout.server.gpu_memory_utilization"]) == (2, 0.5)
    for text, recompute in (("", "none"), ("override_transformer_config: {recompute_granularity: selective}", "selective")):
        made = convert("verl", f"{{actor_rollout_ref: {{actor: {{strategy: megatron, megatron: {{{text}}}}}}}}}")[0]
        assert (verl["engine.recompute"], made["engine.recompute"]) == ("full", recompute)
    adam = "{enabled: true, optimizer: {adam_beta1: 0.9, adam_beta2: 0.999, adam_eps: 1.0e-9}}"
    nemo, left = convert("nemo-rl", f"policy: {{megatron_cfg: {adam}}}")
    assert (nemo["optimizer.betas"], nemo["optimizer.eps"]) == ([0.9, 0.999], 1e-9)
    assert not any("adam" in sentence for sentence in left)
    assert any("use_leave_one_out_baseline = true" in sentence for sentence in left)  # as NeMo-RL does without the key
    trl, left = convert("trl", "{vllm_importance_sampling_mode: token_truncate, vllm_importance_sampling_clip_min: 0.5}")
    assert (trl["objective.mismatch"]["cap"], trl["rollout.sampling.max_new_tokens"]) == (3.0, 512)
    assert any("clip_min = 0.5: weights that are truncated have no lower bound" in sentence for sentence in left)


@pytest.mark.parametrize(
    ("name", "text", "verifier"),
    [
        ("trl", "reward_funcs: my_rewards.fmt", "my_rewards.fmt"),
        ("trl", "reward_funcs: [think_format_reward, my.f]", "think_format_reward"),
        ("trl", "max_steps: 9", "reward_funcs"),
        ("verl", "data: {train_files: a.parquet}", "default_compute_score"),
    ],
)
def test_a_reward_that_is_not_here_is_refused_until_one_is_set(name: str, text: str, verifier: str) -> None:
    made, left = convert(name, text)
    assert made["reward.verifier"] == verifier
    assert any(f"reward.verifier = {verifier} names no verifier" in sentence for sentence in left)
    with pytest.raises(ValueError, match=f"unknown verifier '{verifier}'"):
        resolve_verifier(verifier)
    assert convert("trl", "reward_funcs: [my.f, accuracy_reward]")[0]["reward.verifier"] == "math"


EXPERTS = "pipeline_model_parallel_size: 2, expert_model_parallel_size: 4, expert_tensor_parallel_size: 1"
FIRST = "num_layers_in_first_pipeline_stage: 5"


@pytest.mark.parametrize(
    ("name", "text", "sizes"),
    [
        ("nemo-rl", f"policy: {{megatron_cfg: {{enabled: true, {EXPERTS}, {FIRST}}}}}", (4, 1, 5, None)),
        ("nemo-rl", f"policy: {{megatron_cfg: {{enabled: false, {EXPERTS}}}}}", (None, None, None, None)),
        (
            "verl",
            f"actor_rollout_ref: {{actor: {{strategy: megatron, megatron: {{{EXPERTS}, "
            f"virtual_pipeline_model_parallel_size: 2, override_transformer_config: {{{FIRST}}}}}}}}}",
            (4, 1, 5, 2),
        ),
        ("verl", f"actor_rollout_ref: {{actor: {{strategy: fsdp, megatron: {{{EXPERTS}}}}}}}", (None, None, None, None)),
        ("verl", f"actor_rollout_ref: {{actor: {{megatron: {{{EXPERTS}}}}}}}", (4, 1, None, None)),
        ("verl", "actor_rollout_ref: {actor: {megatron: {expert_tensor_parallel_size: 1}}}", (None, None, None, None)),
    ],
)
def test_the_division_of_experts_and_stages_is_kept(name: str, text: str, sizes: tuple[int | None, ...]) -> None:
    made = convert(name, text)[0]
    assert tuple(made.get(f"engine.parallel.{size}") for size in ("ep", "etp", FIRST.partition(":")[0], "vpp")) == sizes


@pytest.mark.parametrize(("name", "path"), [("main", "hub:openai/gsm8k/main"), ("default", "hub:openai/gsm8k")])
def test_a_configuration_of_a_data_set_is_its_folder(name: str, path: str) -> None:
    made, left = convert("trl", f"{{dataset_name: openai/gsm8k, dataset_config: {name}, dataset_train_split: t}}")
    assert made["data.train"] == path
    assert not any("dataset_config" in sentence for sentence in left)
    assert any('dataset_train_split = "t": data.train names a split' in sentence for sentence in left)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("Qwen/Qwen2.5-7B, model_revision: v1.0", "hub:Qwen/Qwen2.5-7B@v1.0"),
        ("Qwen/Qwen2.5-7B, model_revision: main", "hub:Qwen/Qwen2.5-7B"),
        ("models/mine, model_revision: v1.0", "models/mine"),  # where TRL reads no revision
    ],
)
def test_keys_of_open_r1_are_kept(text: str, path: str) -> None:
    made, left = convert("trl", f"{{model_name_or_path: {text}, dataset_prompt_column: problem, system_prompt: Think.}}")
    assert made["model.path"] == path
    config = load_run(None, [f"{field}={made[field]}" for field in made if re.match(r"data\.(fields|system|chat)", field)])
    assert (config.data.fields.prompt, config.data.system_prompt, config.data.chat_template) == ("problem", "Think.", True)
    assert "data.chat_template" not in convert("trl", "max_steps: 9")[0]
    assert not any("no counterpart" in sentence for sentence in left)


QKV = ("q_proj", "k_proj", "v_proj")
MODEL = "actor_rollout_ref: {{model: {{{}}}}}"
PEFT = "peft: {{enabled: true, {}}}}}, dtensor_cfg: {{lora_cfg: {{enabled: true, {}}}}}}}"
LORA = f"policy: {{{{megatron_cfg: {{{{enabled: {{}}, {PEFT}"
SIXTEEN = "dim: 16, alpha: 64, target_modules: [{}]"
ALL = "all-linear"


@pytest.mark.parametrize(
    ("name", "text", "lora"),
    [
        ("trl", "use_peft: true, lora_target_modules: all-linear", (16, 32.0, ALL)),
        ("trl", "use_peft: true, lora_target_modules: [o_proj]", (16, 32.0, "o_proj")),
        ("trl", "use_peft: true, lora_target_modules: null", (16, 32.0, "q_proj", "v_proj")),
        ("trl", "use_peft: true, lora_r: 8", (8, 32.0, "q_proj", "v_proj")),
        ("trl", "lora_r: 8", None),
        ("verl", MODEL.format("lora_rank: 8"), (8, 16.0, ALL)),
        ("verl", MODEL.format("lora_rank: 8, lora_alpha: 24, target_modules: [q_proj, o_proj]"), (8, 24.0, "q_proj", "o_proj")),
        ("verl", MODEL.format("lora: {rank: 8}"), (8, 32.0, ALL)),
        ("verl", MODEL.format("lora: {rank: 8, alpha: 24, target_modules: [linear_qkv]}"), (8, 24.0, *QKV)),
        ("verl", MODEL.format("lora_rank: 0, lora: {rank: 0, target_modules: [linear_qkv]}"), None),
        ("nemo-rl", LORA.format("false", SIXTEEN.format("linear_qkv"), ""), (8, 32.0, ALL)),
        ("nemo-rl", LORA.format("false", "", SIXTEEN.format("o_proj") + ", match_all_linear: false"), (16, 64.0, "o_proj")),
        ("nemo-rl", LORA.format("false", "", SIXTEEN.format("o_proj") + ", match_all_linear: true"), (16, 64.0, ALL)),
        ("nemo-rl", LORA.format("true", SIXTEEN.format(""), ""), (16, 64.0, ALL)),
        ("nemo-rl", LORA.format("true", SIXTEEN.format("linear_qkv, linear_proj"), ""), (16, 64.0, *QKV, "o_proj")),
        ("nemo-rl", "policy: {megatron_cfg: {enabled: true, peft: {enabled: false, dim: 8}}}", None),
    ],
)
def test_adapters_are_those_of_the_other_trainer(name: str, text: str, lora: tuple[Any, ...] | None) -> None:
    made, left = convert(name, f"{{{text}}}")
    result = load_run(None, [f"{field}={made[field]}" for field in made if field.startswith("model.lora.")]).model.lora
    assert lora == (None if result is None else (result.rank, result.alpha, *result.target_modules))
    assert not any("lora" in sentence or "peft" in sentence for sentence in left)


@pytest.mark.parametrize(
    ("name", "text"), [("trl", "vllm_mode: false"), ("nemo-rl", "policy: {generation: {colocated: {enabled: ''}}}")]
)
def test_servers_without_a_place_share_the_trainers_gpus(name: str, text: str) -> None:
    assert convert(name, text)[0]["rollout.server.placement"] == "colocated"


SIZES = "tensor_model_parallel_size: 4, pipeline_model_parallel_size: {}"
SPLIT = f"rollout: {{{{tensor_model_parallel_size: 2}}}}, actor: {{{{strategy: megatron, megatron: {{{{{SIZES}}}}}}}}}"
NODES = f"trainer: {{{{nnodes: {{}}}}}}, actor_rollout_ref: {{{{{SPLIT}}}}}"
APART = "cluster: {{num_nodes: {}}}, policy: {{generation: {{colocated: {{enabled: false, resources: {{{}}}}}}}}}"


@pytest.mark.parametrize(
    ("name", "text", "nodes", "dp", "servers", "said"),
    [
        ("verl", NODES.format(2, 4), (2, 1), 1, 4, True),
        ("verl", NODES.format(5, 4), (4, 1), 2, 4, True),
        ("verl", NODES.format(5, 2), (3, 2), 3, 8, True),
        ("verl", NODES.format(5, "2, expert_model_parallel_size: 2, expert_tensor_parallel_size: 4"), (4, 1), 4, 4, True),
        ("nemo-rl", APART.format(4, "num_nodes: 1, gpus_per_node: 8"), (3, 1), 24, 8, False),
        ("nemo-rl", APART.format(1, "gpus_per_node: 3"), (1, 0), 5, 3, False),
    ],
)
def test_nodes_that_sample_leave_whole_copies_of_the_model(
    name: str, text: str, nodes: tuple[int, int], dp: int, servers: int, said: bool
) -> None:
    made, left = convert(name, f"{{{text}}}")
    assert (made["cluster.train_nodes"], made["cluster.rollout_nodes"]) == nodes
    assert (made["engine.parallel.dp"], made["rollout.server.count"], made["cluster.gpus_per_node"]) == (dp, servers, 8)
    assert any("share trainer and servers" in sentence for sentence in left) == said
    assert not any("resources" in sentence for sentence in left)


@pytest.mark.parametrize(
    ("name", "text", "field"),
    [
        ("trl", "warmup_ratio: 0.1", "optimizer.warmup_steps"),
        ("trl", "warmup_steps: 0.1", "optimizer.warmup_steps"),
        ("trl", "save_steps: 0.1", "train.save_every"),
        ("verl", "actor_rollout_ref: {actor: {optim: {lr_warmup_steps_ratio: 0.1}}}", "optimizer.warmup_steps"),
    ],
)
def test_a_share_of_unknown_steps_is_said(name: str, text: str, field: str) -> None:
    made, left = convert(name, text)
    assert field not in made
    assert any(re.search(rf"= 0\.1 is of .* not given; set {field}", sentence) for sentence in left)


VERL_HELDOUT = "{{data: {{val_files: b.json}}, trainer: {{{}}}}}"
NEMO_HELDOUT = "{{data: {{val_data_path: b.json}}, grpo: {{{}}}}}"


@pytest.mark.parametrize(
    ("name", "text", "every"),
    [
        ("verl", VERL_HELDOUT.format("test_freq: 5"), 5),
        ("verl", VERL_HELDOUT.format("test_freq: -1"), 0),
        ("verl", VERL_HELDOUT.format(""), 0),
        ("nemo-rl", NEMO_HELDOUT.format("val_period: 0"), 0),
        ("nemo-rl", NEMO_HELDOUT.format("val_period: -1"), 0),
        ("nemo-rl", NEMO_HELDOUT.format(""), 10),
    ],
)
def test_a_run_that_is_never_evaluated_there_is_not_here(name: str, text: str, every: int) -> None:
    made, left = convert(name, text)
    assert (made["data.heldout"], made["evaluate.every"]) == ("b.json", every)
    assert not any("nothing is evaluated" in sentence for sentence in left)


@pytest.mark.parametrize(
    ("text", "field", "steps"),
    [
        ("warmup_steps: 0.05", "optimizer.warmup_steps", 20),
        ("warmup_ratio: 0.05", "optimizer.warmup_steps", 20),
        ("warmup_steps: 30, warmup_ratio: 0.1", "optimizer.warmup_steps", 30),
        ("save_steps: 0.1, eval_steps: 0.5, eval_strategy: steps", "train.save_every", 40),
    ],
)
def test_a_warm_up_or_an_interval_of_trl_is_steps_or_a_share_of_them(text: str, field: str, steps: int) -> None:
    assert convert("trl", f"{{{text}, max_steps: 400}}")[0][field] == steps


def test_a_problem_of_a_converted_file_names_it(tmp_path: Path) -> None:
    (tmp_path / "grpo.yaml").write_text("{use_peft: true, lora_r: 0}")
    assert f"{tmp_path}/grpo.yaml: 1 problem" in invoke("config", "from-trl", tmp_path / "grpo.yaml", code=1).output


def test_a_logger_that_is_off_stays_off() -> None:
    wandb = "wandb: {project: dev, name: mine}"
    assert not any(name.startswith("log.wandb") for name in convert("nemo-rl", f"logger: {{wandb_enabled: false, {wandb}}}")[0])
    assert convert("nemo-rl", f"logger: {{wandb_enabled: true, {wandb}}}")[0]["log.wandb.name"] == "mine"


NO_NUMBER = "a key that must be a number is not"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "trl",
            "{per_device_train_batch_size: 8, num_generations: 10}",
            r"^per_device_.* × gradient_accumulation_steps × num_processes \(of accelerate\) over num_generations is 0\.8",
        ),
        ("trl", "{generation_batch_size: 8, num_generations: 10}", r"^generation_batch_size over num_generations is 0\.8"),
        ("trl", "{steps_per_generation: 3, num_generations: 10}", r"× steps_per_generation × .* over num_generations is 2\.4"),
        ("verl", "- 1", "the file has no settings"),
        ("verl", "foo: 1", r"the file has no setting of verl; give the configuration of .*main_ppo"),
        ("nemo-rl", "{", "not valid YAML"),
        ("verl", "data: {train_batch_size: many}", NO_NUMBER),
        ("verl", "{actor_rollout_ref: {actor: {ppo_max_token_len_per_gpu: many}}}", NO_NUMBER),
        ("verl", "actor_rollout_ref: {actor: {ppo_mini_batch_size: 0}}", NO_NUMBER),
        ("verl", "actor_rollout_ref: {rollout: {tensor_model_parallel_size: 0}}", NO_NUMBER),
        ("trl", "num_generations: 0", NO_NUMBER),
        ("trl", "gradient_accumulation_steps: 0", NO_NUMBER),
        ("trl", "vllm_tensor_parallel_size: two", NO_NUMBER),
        ("trl", "max_completion_length: many", NO_NUMBER),
        ("nemo-rl", "policy: {train_global_batch_size: 0}", NO_NUMBER),
    ],
)
def test_what_cannot_be_converted_is_refused(name: str, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        convert(name, text)


def test_what_is_off_or_of_one_section_is_not_said_each_time() -> None:
    mtp = "{enable: false, layers: [], kept: 1, also: '${oc.select:mtp.enable,true}', new: '${oc.select:data.new,1}'}"
    text = f"{{data: {{new: 0, shuffle: false}}, critic: {{a: 1, b: {{_target_: x, c: 2}}}}, mtp: {mtp}}}"
    made, left = convert("verl", text)
    assert made["data.order"] == "as_given"
    assert [sentence for sentence in left if re.match("data|critic|mtp", sentence)] == [
        "data.new = 0: no counterpart is known",
        "critic: there is no critic",
        "mtp.kept = 1: no counterpart is known",
        "mtp.new = 0: no counterpart is known",
    ]


def test_what_is_unknown_is_said_or_refused_when_the_run_is_read() -> None:
    assert convert("nemo-rl", "{}")[0]["objective.trust_region.high"] == 0.2
    assert all(convert("trl", text)[0]["objective.preset"] == "dapo" for text in ("loss_type: new", "loss_type: null", "{}"))
    listed = ", ".join(f'"{name}"' for name in ("grpo", "dapo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo"))
    assert convert("trl", "{loss_type: new, reward_funcs: accuracy_reward}")[1] == [f'loss_type = "new": known are {listed}']
    made, left = convert("trl", "{scale_rewards: batch, reward_funcs: accuracy_reward}")
    assert "objective.advantage.kind" not in made
    (sentence,) = left
    assert re.search('scale_rewards = "batch": .*; advantages are divided by each group', sentence)
    mode = convert("trl", "vllm_importance_sampling_mode: token")[0]["objective.mismatch"]
    with pytest.raises(ConfigError, match=r"objective\.mismatch"):
        load_run(None, [f"objective.mismatch={mode}"])
