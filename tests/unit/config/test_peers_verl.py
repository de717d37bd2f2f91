"""Settings that only verl has."""

import re

import pytest

from tepo_megatron.config.load import as_yaml, load_run
from tepo_megatron.config.peers import convert


def test_gspo_of_verl_has_its_own_aggregation_and_no_dual_clip() -> None:
    made = convert("verl", "{actor_rollout_ref: {actor: {policy_loss: {loss_mode: gspo}, clip_ratio: 3.0e-4}}}")[0]
    objective = load_run(None, [f"{name}={made[name]}" for name in made if name.startswith("objective.")]).objective
    assert objective == load_run(None, ["objective={preset: gspo, trust_region: {low: 3.0e-4, high: 3.0e-4}}"]).objective


DAPO = "{preset: dapo, trust_region: {low: 0.2, high: 0.3, dual: 3.0}"


@pytest.mark.parametrize(
    ("actor", "low", "objective"),
    [
        ("policy_loss: {loss_mode: geo_mean}", 0.2, "{preset: gmpo, trust_region: {low: 0.2, high: 0.3}}"),
        ("policy_loss: {loss_mode: sapo}, tau_pos: 2.0", 0.2, "{preset: sapo, trust_region: {tau_positive: 2.0}}"),
        ("tau_pos: 1.0, tau_neg: 1.05", 0.2, f"{DAPO}}}"),
        ("policy_loss: {loss_mode: cispo}", 0.2, "{preset: cispo, trust_region: {low: 0.2, high: 0.3}}"),
        ("policy_loss: {loss_mode: cispo}", 10, "{preset: cispo, trust_region: {high: 0.3}}"),
        ("use_kl_loss: true, kl_loss_type: k3+", 0.2, f"{DAPO}, kl: {{coefficient: 0.001, estimator: k2}}}}"),
        ("use_kl_loss: true, kl_loss_type: mse", 0.2, f"{DAPO}, kl: {{coefficient: 0.001, estimator: k2}}}}"),
        ("use_kl_loss: false, kl_loss_type: k3+", 0.2, f"{DAPO}}}"),
        ("policy_loss: {loss_mode: clip_cov}", 0.2, "{preset: clip_cov, trust_region: {low: 0.2, high: 0.3}}"),
    ],
)
def test_losses_of_verl_keep_their_bounds_and_aggregation(actor: str, low: float, objective: str) -> None:
    made = convert("verl", f"{{actor_rollout_ref: {{actor: {{{actor}, clip_ratio_low: {low}, clip_ratio_high: 0.3}}}}}}")[0]
    result = load_run(None, [f"{name}={made[name]}" for name in made if name.startswith("objective.")]).objective
    assert result == load_run(None, [f"objective={objective}"]).objective


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("adv_estimator: gae", 'algorithm.adv_estimator = "gae": .*; group advantages are used instead'),
        ("use_kl_in_reward: true", r"no KL is set; objective\.kl\.coefficient = 0\.001 sets one"),
        ("use_kl_in_reward: true, kl_ctrl: {kl_coef: 0.2}", r"no KL is set; objective\.kl\.coefficient = 0\.2 sets one"),
    ],
)
def test_another_algorithm_of_verl_is_said(text: str, said: str) -> None:
    made, left = convert("verl", f"algorithm: {{{text}}}")
    assert any(re.search(said, sentence) for sentence in left)
    assert "objective.kl.coefficient" not in made


LONG = "data: {{max_response_length: 512}}, reward_model: {{{}}}"
KWARGS = "reward_kwargs: {{max_resp_len: {}, overlong_buffer_cfg: {{enable: {}, len: 128, penalty_factor: 0.5, log: false}}}}"
GROUPS = "algorithm: {{filter_groups: {{enable: {}, max_num_gen_batches: {}}}}}, data: {{train_batch_size: 512{}}}"
PENALISED = "{truncated: penalise, overlong: {buffer: 128, penalty: 0.5}}"


@pytest.mark.parametrize(
    ("text", "rollout", "said"),
    [
        (LONG.format("overlong_buffer: {enable: true, len: 128, penalty_factor: 0.5}"), PENALISED, None),
        (LONG.format(KWARGS.format(512, "true")), PENALISED, None),
        (LONG.format(KWARGS.format(400, "true")), PENALISED, "max_resp_len = 400: here the penalty ends at"),
        (LONG.format(KWARGS.format(512, "false")), "{}", None),
        (GROUPS.format("true", 4, ""), "{filter_groups: {max_batches: 4}}", None),
        (GROUPS.format("true", 4, ", gen_batch_size: 1024"), "{filter_groups: {max_batches: 8}}", "rollout.oversample draws"),
        (GROUPS.format("true", 0, ""), "{filter_groups: {max_batches: 10}}", "prompts have no bound there"),
        (GROUPS.format("false", 4, ""), "{}", None),
        ("actor_rollout_ref: {rollout: {dtype: float32}}", "{server: {dtype: float32}}", None),
        ("actor_rollout_ref: {rollout: {dtype: float16}}", "{}", "known are"),
        ("actor_rollout_ref: {actor: {use_kl_loss: true, kl_loss_type: full}}", "{}", 'kl_loss_type = "full": known are'),
    ],
)
def test_what_verl_samples_with_is_kept_or_said(text: str, rollout: str, said: str | None) -> None:
    made, left = convert("verl", f"{{{text}}}")
    names = [field for field in made if re.match(r"rollout\.(truncated|overlong|filter_groups|server\.dtype)", field)]
    result = load_run(None, [f"{name}={made[name]}" for name in names]).rollout
    assert result == load_run(None, [f"rollout={rollout}"]).rollout
    assert said is None or any(said in sentence for sentence in left)
    assert not any(re.search("no counterpart|asks a model", sentence) for sentence in left)


@pytest.mark.parametrize(("name", "function"), [(", name: f", "f"), ("", "compute_score")])
@pytest.mark.parametrize("place", ["custom_reward_function: {}", "reward: {{custom_reward_function: {}}}"])
def test_a_reward_function_of_verl_is_the_verifier(place: str, name: str, function: str) -> None:
    made, left = convert("verl", f"{{{place.format(f'{{path: my.py{name}}}')}}}")
    assert made["reward.verifier"] == f"my.py:{function}"
    assert not any("no counterpart" in sentence or "default_compute_score" in sentence for sentence in left)


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["a.parquet", "b.parquet"], ["a", "b"]),
        (["/d/gsm8k/train.parquet", "/d/math/train.parquet"], ["gsm8k", "math"]),
        (["/d/gsm8k/v1/train.parquet", "/d/math/v1/train.parquet"], ["gsm8k", "math"]),
        (["d/math/a.json", "d/math/b.json", "d/1 gsm8k/a.json"], ["math-a", "math-b", "gsm8k-a"]),
    ],
)
def test_a_list_of_files_is_a_list_of_sources(paths: list[str], names: list[str]) -> None:
    made, left = convert("verl", f"data: {{train_files: {paths}, val_files: {paths}}}")
    config = load_run(None, [f"data.{field}={as_yaml(made[f'data.{field}'])}" for field in ("train", "heldout")])
    assert [(source.path, source.called) for source in config.data.train_sources] == list(zip(paths, names, strict=True))
    assert made["data.heldout"] == made["data.train"]
    assert any("every file gives as many prompts" in sentence for sentence in left)
