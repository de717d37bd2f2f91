"""Settings of other trainers, by the table in ``peers.yaml``."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tepo_megatron.config.peer_files import resolved, sources
from tepo_megatron.errors import is_ours

_show = partial(json.dumps, ensure_ascii=False, default=str)


class _Key(NamedTuple):
    """What a key of another trainer is here; see ``peers.yaml``."""

    fields: tuple[str, ...]
    values: Mapping[Any, Any] | None = None
    unset: tuple[Any, ...] = ()
    made: bool = False
    note: str = ""
    unless: tuple[Any, ...] = ()
    otherwise: str = ""


class _Peer(NamedTuple):
    title: str
    reads: str
    defaults: Mapping[str, Any]
    keys: Mapping[str, _Key]


@cache
def peers() -> Mapping[str, _Peer]:
    text = files("tepo_megatron.config").joinpath("peers.yaml").read_text("utf-8")
    return {
        name: _Peer(
            raw["title"], raw.get("reads", ""), raw.get("defaults", {}), {key: _key(raw["keys"][key]) for key in raw["keys"]}
        )
        for name, raw in yaml.safe_load(text).items()
    }


def _key(raw: Any) -> _Key:
    if isinstance(raw, str):
        return _Key((raw,))
    fields = (raw["to"],) if "to" in raw else tuple(raw.get("made") or raw.get("near") or ())
    unset, unless = (tuple(raw.get(name, ())) for name in ("unset", "unless"))
    return _Key(fields, raw.get("values"), unset, "made" in raw, raw.get("note", ""), unless, raw.get("otherwise", ""))


def convert(name: str, text: str) -> tuple[dict[str, Any], list[str]]:
    """Returns settings by dotted name, and a sentence for each key without a counterpart. Raises ValueError."""
    peer, left = peers()[name], list[str]()
    written = resolved(text, left)
    if written and not any(part in peer.keys for key in written for part in (key, *_parents(key))):
        raise ValueError(f"the file has no setting of {peer.title}; give {peer.reads}, not a script that starts it")
    read = {**peer.defaults, **{key: value for key, value in written.items() if value is not None or key == _UNBOUNDED}}
    result: dict[str, Any] = {}
    for key, value in read.items():
        entry = peer.keys.get(key)
        if entry is None or (entry.note and value not in entry.unless):
            section = next((part for part in _parents(key) if entry is None and part in peer.keys), "")
            off = entry is None and (key.endswith("_target_") or value is False or value in ("", [], {}))
            why = (entry or peer.keys.get(section) or _Key(())).note or "no counterpart is known"
            sentence = f"{section or f'{key} = {_show(value)}'}: {why}"
            left += [sentence] if key in written and not off and sentence not in left else []
        elif not entry.made and not entry.note and value is not None and value not in entry.unset:
            _put(result, key, entry, value, peer.defaults.get(key), left)
    if result.get("engine.parallel.ep", 1) == 1:  # experts are divided as the rest then, and some models have none
        result.pop("engine.parallel.etp", None)
    try:
        made = {"trl": _trl, "verl": _verl, "nemo-rl": _nemo}[name](read, result, left)
        result |= {field: value for field, value in made.items() if value is not None}
        if "objective.kl.coefficient" not in result:
            _drop(result, "objective.kl.")
        longest = sum(result.get(field, 0) for field in ("data.max_prompt_tokens", "rollout.sampling.max_new_tokens"))
        result["evaluate.every"] = max(0, result.get("evaluate.every", 0))
        result["engine.micro_batch_tokens"] = max(result.get("engine.micro_batch_tokens", 4096), longest)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        if is_ours(error):
            raise
        raise ValueError(f"a key that must be a number is not, or is 0 ({error}); correct the file") from error
    for field in ("model.path", "data.train", "data.heldout"):
        if _ON_THE_HUB.fullmatch(path := str(result.get(field))) and not Path(path).exists():
            result[field] = f"hub:{path}"
    if name == "trl" and "data.train" in result and (folder := read.get("dataset_config") or "default") != "default":
        result["data.train"] = f"{result['data.train']}/{folder}"  # the folder's usual name
    if (revision := read.get("model_revision", "main")) != "main" and str(result.get("model.path")).startswith("hub:"):
        result["model.path"] = f"{result['model.path']}@{revision}"
    if "data.heldout" not in result:
        left += ["nothing is evaluated: give data.heldout and evaluate.every"] if result.get("evaluate.every") else []
        result["evaluate.every"] = 0
    return {field: value for field, value in result.items() if value is not None}, left


def _put(result: dict[str, Any], key: str, entry: _Key, value: Any, default: Any, left: list[str]) -> None:
    (field,) = entry.fields
    if field == "data.train" and isinstance(value, list) and len(value) > 1:
        left.append(f"{key}: here every file gives as many prompts; data.train's weight changes that")
    if entry.values is None:
        is_list = isinstance(value, list) and field.startswith("data.")
        result[field] = (value[0] if len(value) == 1 else sources(value)) if is_list else value
    elif isinstance(value, str | bool | int | float) and value in entry.values:
        result[field] = entry.values[value]
    elif value not in (False, ""):
        if default in entry.values:
            result[field] = entry.values[default]
        known = f"known are {', '.join(map(_show, entry.values))}"
        left.append(f"{key} = {_show(value)}: {'; '.join(filter(None, [known, entry.otherwise]))}")


def _parents(key: str) -> Iterator[str]:
    while key := key.rpartition(".")[0]:
        yield key


def _whole(value: float, what: str) -> int:
    if value < 1 or value != int(value):
        raise ValueError(f"{what} is {value:g}, and must be a whole number; change the file")
    return int(value)


def _machines(
    nodes: int, gpus: int, split: tuple[int, ...], result: Mapping[str, Any], left: list[str], apart: tuple[int, ...] = (0, 0)
) -> dict[str, Any]:
    """``split`` has tp, pp and cp of the trainer. Servers share its GPUs on one node, or have nodes of their own: at most half
    of them, so that whole copies of the model remain, or else as many more. ``apart``: nodes, or GPUs of one, that only sample.
    """
    tp, pp, cp = split
    served, train_nodes, rollout_nodes = int(result.get("rollout.server.tp", 1)), nodes, 0
    sampling, beside = apart[0], apart[1] or served
    if nodes > 1:
        experts = result.get("engine.parallel.ep", 1) * result.get("engine.parallel.etp", tp)
        whole = math.lcm(tp * cp, experts) * pp
        possible = (some for some in range(nodes // 2, 0, -1) if (nodes - some) * gpus % whole == 0)
        taken = sampling or next(possible, 0)
        rollout_nodes, train_nodes = taken or nodes // 2, nodes - taken
        shares = f"{nodes} nodes share trainer and servers there; here {train_nodes} train and {rollout_nodes} sample"
        left += [] if sampling else [shares]
    else:
        gpus -= apart[1]
    world = train_nodes * gpus
    dp = _whole(world / (tp * pp * cp), f"{world} GPUs over tp × pp × cp = {tp} × {pp} × {cp}, the data-parallel size,")
    shared = nodes == 1 and result.get("rollout.server.placement", "colocated") == "colocated"
    count = (world if shared else rollout_nodes * gpus if nodes > 1 else beside) // served
    return {
        "engine.platform": "cuda",
        **{f"engine.parallel.{name}": size for name, size in (("tp", tp), ("pp", pp), ("cp", cp), ("dp", dp))},
        "engine.parallel.sequence_parallel": tp > 1,
        "optimizer.distributed": dp * cp > 1,
        "cluster.train_nodes": train_nodes,
        "cluster.rollout_nodes": rollout_nodes,
        "cluster.gpus_per_node": gpus if nodes > 1 or shared else gpus + beside,
        "rollout.server.placement": "colocated" if shared else "local" if nodes == 1 else "external",
        "rollout.server.registry": None if nodes == 1 else f"{result.get('output', 'out/run')}/servers",
        "rollout.server.count": max(1, count),
    }


def _drop(result: dict[str, Any], *starts: str) -> None:
    """Of a section that is off."""
    for name in [name for name in result if name.startswith(starts)]:
        del result[name]


def _instead_of_fsdp(result: Mapping[str, Any], left: list[str]) -> tuple[int, int, int]:
    tp = int(result.get("rollout.server.tp", 1))
    left.append(f"FSDP divides weights over all ranks there; here engine.parallel.tp = {tp} does, as for the servers")
    return tp, 1, 1


def _floor(schedule: Any, lowest: float | None) -> float | None:
    return lowest if schedule in ("linear", "cosine") else None  # a constant rate does not fall to it


def _loggers(names: Any, project: str) -> dict[str, Any]:
    listed = [names] if isinstance(names, str) else list(names or ())
    return {"log.tensorboard": "tensorboard" in listed, "log.wandb.project": project if "wandb" in listed else None}


def _lora(name: str, read: Mapping[str, Any], place: str, rank: str, alpha: str, targets: str) -> dict[str, Any]:
    named = None if read.get(f"{place}match_all_linear") else read.get(f"{place}{targets}")
    listed = [named] if isinstance(named, str) else named or ["all-linear"]
    ours = peers()[name].keys[f"{place}{targets}"].values or {}
    made = {"model.lora.rank": read[f"{place}{rank}"], "model.lora.alpha": read[f"{place}{alpha}"]}
    return made | {"model.lora.target_modules": [module for item in listed for module in ours.get(item, [item])]}


def _clip(result: Mapping[str, Any], low: float, high: float, dual: float | None) -> dict[str, Any]:
    """``clip_weight``, of CISPO, bounds a weight by 1 + its ``high``."""
    preset = result.get("objective.preset")
    if preset == "cispo":
        return {"objective.trust_region.high": high}
    if preset in ("sapo", "kl_cov"):
        return {}
    bounds = {"objective.trust_region.low": low, "objective.trust_region.high": high}
    return bounds if preset in ("gmpo", "clip_cov") else {**bounds, "objective.trust_region.dual": dual}


def _trl(read: Mapping[str, Any], result: dict[str, Any], left: list[str]) -> dict[str, Any]:
    update = read["per_device_train_batch_size"] * read["num_processes"] * read["gradient_accumulation_steps"]
    generations = read.get("steps_per_generation") or read["gradient_accumulation_steps"]
    drawn = read.get("generation_batch_size") or update // read["gradient_accumulation_steps"] * generations
    updates = _whole(drawn / update, "generation_batch_size over an update's completions")
    steps, epsilon = read.get("max_steps") or 0, read["epsilon"]
    step = updates * read.get("num_iterations", 1)  # optimizer steps in ours

    def every(key: str, field: str) -> int | None:
        value = read.get(key) or 0
        if 0 < value < 1 and steps <= 0:
            left.append(f"{key} = {value} is of max_steps, which is not given; set {field}")
            return None
        return max(1, round(value * (steps if value < 1 else 1) / step)) if value else None

    generated = "steps_per_generation" if read.get("steps_per_generation") else "gradient_accumulation_steps"
    size = f"per_device_train_batch_size × {generated} × num_processes (of accelerate)"
    size = "generation_batch_size" if read.get("generation_batch_size") else size
    made: dict[str, Any] = {
        "rollout.prompts_per_step": _whole(drawn / read["num_generations"], f"{size} over num_generations"),
        "train.minibatches": updates,
        "train.steps": math.ceil(steps / step) if steps > 0 else None,
        "train.save_every": every("save_steps", "train.save_every"),
        "evaluate.every": every("eval_steps", "evaluate.every"),
        "optimizer.betas": [read["adam_beta1"], read["adam_beta2"]],
        # keys of open-r1, which makes messages of every prompt
        "data.chat_template": True if {"dataset_prompt_column", "system_prompt"} & read.keys() else None,
        **_machines(1, read["num_processes"], (1, 1, 1), result, left),
        **_clip(result, epsilon, read.get("epsilon_high") or epsilon, read.get("delta")),
    }
    name = "warmup_steps" if read.get("warmup_steps") else "warmup_ratio"
    warmup = read.get(name) or 0
    if warmup >= 1 or steps > 0:
        made["optimizer.warmup_steps"] = int(warmup) if warmup >= 1 else math.ceil(warmup * steps)
    elif warmup:
        left.append(f"{name} = {warmup} is of max_steps, which is not given; set optimizer.warmup_steps")
    if result.get("objective.preset") == "dr_grpo":
        made["objective.aggregation.constant"] = float(read["max_completion_length"])
        made["objective.advantage.kind"] = result.get("objective.advantage.kind", "group")
    if result.get("objective.preset") == "cispo":
        made["objective.trust_region.high"] = (read.get("epsilon_high") or 5.0) - 1  # the largest weight there
    if result.get("objective.preset") == "sapo":
        made["objective.trust_region.tau_positive"] = read.get("sapo_temperature_pos")
        made["objective.trust_region.tau_negative"] = read.get("sapo_temperature_neg")
    weighed = "objective.kl.coefficient" in result and result.get("objective.kl.weight") == "importance"
    if weighed and result.get("objective.ratio.kind") == "sequence":
        left.append("use_bias_correction_kl = true: the KL is weighed by each token's ratio here, by the sequence's there")
    if read.get("vllm_importance_sampling_correction", True):
        level, _, kind = str(read.get("vllm_importance_sampling_mode", "sequence_mask")).partition("_")
        cap, low = (read.get(f"vllm_importance_sampling_{name}") for name in ("cap", "clip_min"))  # cap: of older versions
        high = read.get(_UNBOUNDED, 3.0) if cap is None else cap
        high = 1e9 if high is None else float(high)  # a bound that no weight reaches
        bounds = {"cap": high} if kind == "truncate" else {"low": float(low or 0), "high": high}
        if low and kind == "truncate":
            left.append(f"vllm_importance_sampling_clip_min = {low}: weights that are truncated have no lower bound here")
        made["objective.mismatch"] = {"kind": kind, "level": level, **bounds}
    if read.get("use_peft"):
        made |= {**_lora("trl", read, "lora_", "r", "alpha", "target_modules"), "model.lora.rslora": read.get("use_rslora")}
    if "report_to" in read:
        made |= _loggers(read["report_to"], read.get("project", "trl"))
    return made | _reward(read.get("reward_funcs"), left)


def _reward(names: Any, left: list[str]) -> dict[str, Any]:
    listed = [names] if isinstance(names, str) else list(names or ())
    others = (name for name in listed if name != "accuracy_reward")
    left += [f"reward_funcs: {name}: write it as a verifier, docs/guides/rewards.md" for name in others]
    if "accuracy_reward" in listed:
        return {"reward.verifier": "math", "data.fields.answer": "solution"}
    return _unknown_verifier(str(listed[0]) if listed else "reward_funcs", left)


def _unknown_verifier(name: str, left: list[str]) -> dict[str, Any]:
    # without a name training would take the default verifier
    left.append(f"reward.verifier = {name} names no verifier, and training refuses it until you set one")
    return {"reward.verifier": name}


def _verl(read: Mapping[str, Any], result: dict[str, Any], left: list[str]) -> dict[str, Any]:
    actor = {key.removeprefix(_ACTOR): value for key, value in read.items() if key.startswith(_ACTOR)}
    batch, steps = read["data.train_batch_size"], read.get("trainer.total_training_steps")
    updates = _whole(batch / actor["ppo_mini_batch_size"], "data.train_batch_size over ppo_mini_batch_size")
    sizes = (f"megatron.{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "context"))
    split = tuple(int(actor.get(size) or 1) for size in sizes)
    strategy = "megatron" if any(key.startswith("megatron.") for key in actor) else "fsdp"
    if actor.get("strategy", strategy) != "megatron":
        _drop(result, "engine.parallel.")
        split = _instead_of_fsdp(result, left)
    else:  # enable_gradient_checkpointing is FSDP's
        result["engine.recompute"] = actor.get("megatron.override_transformer_config.recompute_granularity") or "none"
    usual, dual = actor["clip_ratio"], actor["clip_ratio_c"]
    low, high = (usual if (bound := actor.get(f"clip_ratio_{end}")) is None else bound for end in ("low", "high"))
    style, ratio = actor.get("optim.warmup_style"), actor.get("optim.min_lr_ratio") or 0
    schedule = style if style in ("constant", "cosine") else result.get("optimizer.schedule")
    preset = result.get("objective.preset")
    if preset in ("gspo", "gmpo", "sapo"):  # verl's have one aggregation, whatever loss_agg_mode says, and no dual clip
        result.pop("objective.aggregation.kind", None)
        dual = None
    made = {
        "train.minibatches": updates,
        "optimizer.betas": actor["optim.betas"],
        "optimizer.schedule": schedule,
        "optimizer.min_lr": _floor(schedule, actor.get("optim.min_lr") or ratio * actor["optim.lr"]),
        "objective.advantage.over": "tokens" if result.get("objective.advantage.kind") == "whitened" else None,
        **_clip(result, low, high, dual),
        # TRL's has no lower bound, and 1 or more bounds nothing in verl's
        **({"objective.trust_region.low": low} if preset == "cispo" and low < 1 else {}),
        **_verl_terms(read, actor, preset),
        **_verl_rollout(read, result, left),
        **_machines(read["trainer.nnodes"], read["trainer.n_gpus_per_node"], split, result, left),
        **({"engine.parallel.sequence_parallel": False} if actor.get("megatron.sequence_parallel") is False else {}),
    }
    warmup, ratio = actor.get("optim.lr_warmup_steps") or -1, actor.get("optim.lr_warmup_steps_ratio") or 0
    if warmup <= 0 and ratio and steps:
        warmup = math.ceil(ratio * steps)
    elif warmup <= 0 and ratio:
        left.append(f"optim.lr_warmup_steps_ratio = {ratio} is of a total not given; set optimizer.warmup_steps")
    if warmup > 0:
        made["optimizer.warmup_steps"] = updates * actor.get("ppo_epochs", 1) * warmup
    if actor.get("use_kl_loss"):
        made["objective.kl.coefficient"] = actor.get("kl_loss_coef", 0.001)
    if read.get("algorithm.use_kl_in_reward"):
        set_one = f"no KL is set; objective.kl.coefficient = {read.get('algorithm.kl_ctrl.kl_coef', 0.001)} sets one"
        left.append(f"algorithm.use_kl_in_reward = true: {'the KL is of use_kl_loss' if actor.get('use_kl_loss') else set_one}")
    if actor.get("entropy_coeff"):
        made["objective.entropy"] = {"kind": "fixed", "coefficient": actor["entropy_coeff"]}
    if result.get("objective.aggregation.kind") == "constant":
        made["objective.aggregation.constant"] = float(read["data.max_response_length"])
    if read["algorithm.adv_estimator"] == "grpo" and read.get("algorithm.norm_adv_by_std_in_grpo") is False:
        made["objective.advantage.kind"] = "no_std"
    for keys in (("lora_rank", "lora_alpha", "target_modules"), ("lora.rank", "lora.alpha", "lora.target_modules")):
        if read.get(f"actor_rollout_ref.model.{keys[0]}"):
            made |= _lora("verl", read, "actor_rollout_ref.model.", *keys)
    if "trainer.logger" in read:
        made |= _loggers(read["trainer.logger"], read.get("trainer.project_name", "verl"))
    places = ("reward.custom_reward_function", "custom_reward_function")  # the second of older versions
    custom = next((place for place in places if read.get(f"{place}.path")), None)
    made["data.fields.answer"] = "reward_model.ground_truth"
    if custom:
        made["reward.verifier"] = f"{read[f'{custom}.path']}:{read.get(f'{custom}.name') or 'compute_score'}"
        left.append("custom_reward_function: its function must take (problem, response), docs/guides/rewards.md")
    else:
        left.append("custom_reward_function: without one verl chooses a reward by data_source; last_number or math may do")
        made |= _unknown_verifier("default_compute_score", left)
    return made


def _verl_terms(read: Mapping[str, Any], actor: Mapping[str, Any], preset: Any) -> dict[str, Any]:
    made = {peers()["verl"].keys[f"{_ACTOR}{key}"].fields[0]: actor.get(key) for key in _OF_ONE_LOSS.get(preset, ())}
    if level := read.get("algorithm.rollout_correction.rollout_is"):
        low, _, high = str(read.get("algorithm.rollout_correction.rollout_is_threshold", 2.0)).rpartition("_")
        bounds = {"kind": "mask", "low": float(low)} if low else {"kind": "truncate"}
        made["objective.mismatch"] = {**bounds, "level": level, "high" if low else "cap": float(high)}
    return made


def _verl_rollout(read: Mapping[str, Any], result: Mapping[str, Any], left: list[str]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    most, size = read.get("algorithm.filter_groups.max_num_gen_batches"), read["data.train_batch_size"]
    if most is not None and "rollout.filter_groups.filters" in result:
        bound = math.ceil(most * (read.get("data.gen_batch_size") or size) / size)
        made["rollout.filter_groups.max_batches"] = bound if most > 0 else None
        unbounded = "prompts have no bound there; rollout.filter_groups.max_batches is one here"
        left += [] if most > 0 else [f"algorithm.filter_groups.max_num_gen_batches = {most}: {unbounded}"]
    for place in ("reward_model.overlong_buffer", "reward_model.reward_kwargs.overlong_buffer_cfg"):
        if read.get(f"{place}.enable"):
            made |= {"rollout.truncated": "penalise", "rollout.overlong.buffer": read.get(f"{place}.len")}
            made["rollout.overlong.penalty"] = read.get(f"{place}.penalty_factor")
            longest = read.get("reward_model.reward_kwargs.max_resp_len", read["data.max_response_length"])
            same = longest == read["data.max_response_length"]
            left += [] if same else [f"max_resp_len = {longest}: here the penalty ends at rollout.sampling.max_new_tokens"]
    return made


_OF_ONE_LOSS = {
    "sapo": ("tau_pos", "tau_neg"),
    "kl_cov": ("policy_loss.ppo_kl_coef", "policy_loss.kl_cov_ratio"),
    "clip_cov": ("policy_loss.clip_cov_ratio", "policy_loss.clip_cov_lb", "policy_loss.clip_cov_ub"),
}
_SHAPING = "grpo.reward_shaping."
_ACTOR = "actor_rollout_ref.actor."
_UNBOUNDED = "vllm_importance_sampling_clip_max"  # null is a value of its own there
_ON_THE_HUB = re.compile(r"(?!(?:models|data|checkpoints|out)/|.*\.(?:jsonl?|csv|parquet)$)[\w-][\w.-]*/[\w-][\w.-]*")


def _nemo(read: Mapping[str, Any], result: dict[str, Any], left: list[str]) -> dict[str, Any]:
    megatron = bool(read["policy.megatron_cfg.enabled"])
    part, lora = ("policy.megatron_cfg.", "peft.") if megatron else ("policy.dtensor_cfg.", "lora_cfg.")
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    names = sizes if megatron else ("tensor_parallel_size", "", "context_parallel_size")
    split = tuple(int(read.get(f"{part}{name}") or 1) for name in names)
    split = split if megatron or split[0] > 1 else _instead_of_fsdp(result, left)
    if not megatron:
        _drop(result, "engine.parallel.", "optimizer.schedule")
    drawn = read["grpo.num_prompts_per_step"] * read["grpo.num_generations_per_prompt"]
    updates = _whole(drawn / read["policy.train_global_batch_size"], "a step's samples over policy.train_global_batch_size")
    apart: tuple[int, ...] = (0, 0)
    if result.get("rollout.server.placement") == "local":
        apart = tuple(read.get(f"policy.generation.colocated.resources.{name}") or 0 for name in ("num_nodes", "gpus_per_node"))
    optimizer = "policy.megatron_cfg.optimizer." if megatron else "policy.optimizer.kwargs."
    longest, new = read.get("policy.max_total_sequence_length"), read.get("policy.generation.max_new_tokens")
    made: dict[str, Any] = {
        "train.minibatches": updates,
        "optimizer.lr": read.get(f"{optimizer}lr"),
        "optimizer.min_lr": _floor(result.get("optimizer.schedule"), read.get(f"{optimizer}min_lr")),
        "optimizer.weight_decay": read.get(f"{optimizer}weight_decay"),
        "optimizer.betas": _nemo_betas(read, optimizer),
        "optimizer.eps": read.get(f"{optimizer}adam_eps" if megatron else f"{optimizer}eps"),
        "rollout.sampling.max_new_tokens": new,
        "engine.recompute": "full" if read.get(f"{part}activation_checkpointing") else None,
        "data.chat_template": True,  # its processors make a message of a prompt
        "reward.verifier": "math",
        **_nemo_advantage(read, result.get("objective.advantage.kind", "group"), left),
        **_nemo_loss(read, result),
        **_nemo_mismatch(read, left),
        **_machines(read["cluster.num_nodes"], read["cluster.gpus_per_node"], split, result, left, apart),
    }
    if "rollout.filter_groups.filters" in result:
        batches = read.get("grpo.dynamic_sampling_max_gen_batches", 10)
        made["rollout.filter_groups.max_batches"] = math.ceil(batches * read.get("grpo.batch_multiplier", 1))
    if read.get(f"{part}{lora}enabled"):
        made |= _lora("nemo-rl", read, f"{part}{lora}", "dim", "alpha", "target_modules")
    if megatron and (warmup := read.get("policy.megatron_cfg.scheduler.lr_warmup_iters")):
        made["optimizer.warmup_steps"] = updates * warmup
    if new is not None and longest is not None and new >= longest:  # prompts need room here
        prompt = min(longest // 2, result.pop("data.max_prompt_tokens", None) or longest)
        made |= {"rollout.sampling.max_new_tokens": longest - prompt, "data.max_prompt_tokens": prompt}
        left.append(f"policy.generation.max_new_tokens = {new} is the whole context; here half of it is the prompt's")
    if read.get(f"{_SHAPING}enabled") and read.get(f"{_SHAPING}stop_properly_penalty_coef") is None:
        made |= {"rollout.truncated": "penalise", "rollout.overlong.buffer": read.get(f"{_SHAPING}overlong_buffer_length")}
        made["rollout.overlong.penalty"] = read.get(f"{_SHAPING}overlong_buffer_penalty")
        either = "rollout.truncated is either mask or penalise; here the penalty is kept"
        left += [f"grpo.overlong_filtering = true: {either}"] if result.get("rollout.truncated") == "mask" else []
        length, ours = read.get(f"{_SHAPING}max_response_length"), made["rollout.sampling.max_new_tokens"]
        differs = f"{_SHAPING}max_response_length = {length}: here the penalty ends at rollout.sampling.max_new_tokens"
        left += [] if length in (None, ours) else [differs]
    if read.get("grpo.async_grpo.enabled"):
        made["train.max_staleness"] = read.get("grpo.async_grpo.max_trajectory_age_steps", 1)
        updates_in_flight = read.get("grpo.async_grpo.in_flight_weight_updates")
        if updates_in_flight and not read.get("grpo.async_grpo.recompute_kv_cache_after_weight_updates"):
            made["train.kv_cache"] = "keep"
    if read.get("logger.wandb_enabled"):
        project, run = read.get("logger.wandb.project", "nemo-rl"), read.get("logger.wandb.name")
        made |= {"log.wandb.project": project, "log.wandb.name": run}
    return made


def _nemo_advantage(read: Mapping[str, Any], kind: str, left: list[str]) -> dict[str, Any]:
    keys = ("normalize_rewards", "use_leave_one_out_baseline")  # older versions read them one level above
    normalized, without_itself = (read.get(f"grpo.adv_estimator.{key}", read[f"grpo.{key}"]) for key in keys)
    if kind == "whitened":
        return {"objective.advantage.over": "tokens"}
    if kind == "group" and not normalized:
        kind = "leave_one_out" if without_itself else "no_std"
    elif without_itself:
        other = " (objective.advantage.kind = leave_one_out is without the deviation)" if kind == "group" else ""
        itself = "here the group's mean and deviation include the response itself"
        left.append(f"grpo.use_leave_one_out_baseline = true: {itself}{other}")
    if kind == "gdpo" and not normalized:
        left.append("normalize_rewards = false: here gdpo divides each component by its deviation in the group")
    return {"objective.advantage.kind": kind}


def _nemo_loss(read: Mapping[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    cispo = {"objective.preset": "cispo"} if read.get("loss_fn.use_cispo") else {}
    if cispo and read["loss_fn.ratio_clip_min"] >= 1:  # which bounds nothing there
        result.pop("objective.trust_region.low")
    if read.get("loss_fn.use_kl_in_reward"):  # the loss has none then
        result.pop("objective.kl.coefficient", None)
    # also without use_on_policy_kl_approximation the KL there has the gradient of the probability that sampled it
    return {**cispo, "objective.kl.weight": "importance", "objective.kl.estimator": read["loss_fn.reference_policy_kl_type"]}


def _nemo_mismatch(read: Mapping[str, Any], left: list[str]) -> dict[str, Any]:
    if not read.get("loss_fn.use_importance_sampling_correction"):
        return {}
    kind, low, high = (read.get(f"loss_fn.truncated_importance_sampling_{key}") for key in ("type", "ratio_min", "ratio"))
    weights = {"kind": "truncate", "level": "sequence" if read.get("loss_fn.sequence_level_importance_ratios") else "token"}
    if high is not None and kind == "icepop":
        return {"objective.mismatch": {**weights, "kind": "mask", "low": low, "high": high}}
    if high is not None and kind != "seq-mask-tis":
        return {"objective.mismatch": {**weights, "cap": high}}
    left.append(
        "loss_fn.use_importance_sampling_correction: nothing bounds its weights there; here objective.mismatch.cap = 2 does"
    )
    rejection = None if high is None else {"level": "geometric", "low": low, "high": high}
    return {"objective.mismatch": weights, "objective.rejection": rejection}


def _nemo_betas(read: Mapping[str, Any], optimizer: str) -> Any:
    usual = {f"{optimizer}adam_beta1": 0.9, f"{optimizer}adam_beta2": 0.999}
    betas = [read.get(name, beta) for name, beta in usual.items()]
    return betas if usual.keys() & read.keys() else read.get(f"{optimizer}betas")
