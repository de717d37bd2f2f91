"""Settings that only NeMo-RL has."""

import json
import re
from typing import Any

import pytest

from tepo_megatron.config.load import load_run
from tepo_megatron.config.peers import convert


def test_data_of_nemo_rl_is_found_in_both_of_its_places() -> None:
    new = "{data: {train: {data_path: a.json, input_key: question, output_key: y}, validation: {data_path: b.json}}}"
    old = "{data: {train_data_path: a.json, val_data_path: b.json, input_key: question, output_key: y}}"
    expected, made = convert("nemo-rl", old)[0], convert("nemo-rl", new)[0]
    assert (made["data.train"], made["data.heldout"], made) == ("a.json", "b.json", expected)


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ("use_leave_one_out_baseline: true, normalize_rewards: true", "group", True),
        ("use_leave_one_out_baseline: true, normalize_rewards: false", "leave_one_out", False),
        ("use_leave_one_out_baseline: false, adv_estimator: {name: grpo, normalize_rewards: false}", "no_std", False),
        ("adv_estimator: {name: grpo, normalize_rewards: false}", "leave_one_out", False),
        ("adv_estimator: {name: gdpo, use_leave_one_out_baseline: false}", "gdpo", False),
        ("adv_estimator: {name: gdpo, use_leave_one_out_baseline: false, normalize_rewards: false}", "gdpo", False),
        ("adv_estimator: {name: gdpo, normalize_rewards: false}", "gdpo", True),
        ("adv_estimator: {name: reinforce_plus_plus}", "whitened", False),
    ],
)
def test_an_advantage_of_nemo_rl_is_kept_or_said(text: str, kind: str, said: bool) -> None:
    made, left = convert("nemo-rl", f"grpo: {{{text}}}")
    assert (made["objective.advantage.kind"], made["data.chat_template"]) == (kind, True)
    assert made.get("objective.advantage.over") == ("tokens" if kind == "whitened" else None)
    assert not any("no counterpart" in sentence for sentence in left)
    assert any("use_leave_one_out_baseline" in sentence for sentence in left) == said
    assert any("kind = leave_one_out is" in sentence for sentence in left) == (said and kind == "group")
    divided = any("normalize_rewards = false: here gdpo divides" in sentence for sentence in left)
    assert divided == (kind == "gdpo" and "normalize_rewards: false" in text)


SHAPING = "reward_shaping: {{enabled: {}, overlong_buffer_length: 128, overlong_buffer_penalty: 0.5, {}}}"
DYNAMIC = "use_dynamic_sampling: {}, dynamic_sampling_max_gen_batches: 6, batch_multiplier: 1.5"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (SHAPING.format("true", ""), ("penalise", 128, 0.5, None)),
        (SHAPING.format("false", ""), ("train", None, None, None)),
        (f"{SHAPING.format('true', '')}, overlong_filtering: true", ("penalise", 128, 0.5, None)),
        (f"{SHAPING.format('false', '')}, overlong_filtering: true", ("mask", None, None, None)),
        (SHAPING.format("true", "max_response_length: 512"), ("penalise", 128, 0.5, None)),
        (SHAPING.format("true", "max_response_length: 640"), ("penalise", 128, 0.5, None)),
        (SHAPING.format("false", "max_response_length: 640"), ("train", None, None, None)),
        (SHAPING.format("true", "stop_properly_penalty_coef: 0.5"), ("train", None, None, None)),
        (DYNAMIC.format("true"), ("train", None, None, 9)),
        (DYNAMIC.format("false"), ("train", None, None, None)),
    ],
)
def test_penalties_and_batches_of_nemo_rl_are_kept(text: str, expected: tuple[Any, ...]) -> None:
    made, left = convert("nemo-rl", f"{{grpo: {{{text}}}, policy: {{generation: {{max_new_tokens: 512}}}}}}")
    config = load_run(
        None, [f"{field}={made[field]}" for field in made if re.match(r"rollout\.(trunc|over|filter|sampl)", field)]
    )
    overlong, groups = config.rollout.overlong, config.rollout.filter_groups
    penalty = (None, None) if overlong is None else (overlong.buffer, overlong.penalty)
    assert (config.rollout.truncated, *penalty, None if groups is None else groups.max_batches) == expected
    assert not any("no counterpart" in sentence for sentence in left)
    assert any("are not scaled; rollout.truncated says" in sentence for sentence in left) == ("stop_properly" in text)
    differs = config.rollout.truncated == "penalise" and "max_response_length: 640" in text
    assert any(re.search("penalty.* ends at rollout.sampling", sentence) for sentence in left) == differs
    both = config.rollout.truncated == "penalise" and "overlong_filtering" in text
    assert any("either mask or penalise; here the penalty is kept" in sentence for sentence in left) == both


def test_a_penalty_of_nemo_rl_ends_at_the_length_that_remains_beside_the_prompt() -> None:
    shaping = SHAPING.format("true", "max_response_length: 1024")
    made, left = convert(
        "nemo-rl", f"{{grpo: {{{shaping}}}, policy: {{max_total_sequence_length: 1024, generation: {{max_new_tokens: 1024}}}}}}"
    )
    assert made["rollout.sampling.max_new_tokens"] == 512
    assert any("max_response_length = 1024: here the penalty ends" in sentence for sentence in left)


@pytest.mark.parametrize(
    ("enabled", "in_flight", "recomputes", "kept"),
    [(True, True, False, True), (True, True, True, False), (True, False, False, False), (False, True, False, False)],
)
def test_keys_and_values_of_nemo_rl_are_kept_in_updates_in_flight(
    enabled: bool, in_flight: bool, recomputes: bool, kept: bool
) -> None:
    keys = {"in_flight_weight_updates": in_flight, "recompute_kv_cache_after_weight_updates": recomputes}
    made, left = convert("nemo-rl", json.dumps({"grpo": {"async_grpo": {"enabled": enabled, **keys}}}))
    assert made.get("train.kv_cache") == ("keep" if kept else None)
    assert not any("weight_updates" in sentence for sentence in left)
