"""Checks across sections; each raises ValueError with what to change."""

import warnings

from tepo_megatron.config.data import is_custom, show_paths
from tepo_megatron.config.objective.choices import GDPOAdvantage
from tepo_megatron.config.sections import RunSections


def _biases_are_trained(run: RunSections) -> None:
    if run.engine.moe_balance.kind == "expert_bias" and run.model.lora is not None:
        raise ValueError(
            "engine.moe_balance.kind = expert_bias moves biases of the model, which model.lora leaves as it is, and a "
            "folder of adapters has no place for them; set kind = aux_loss or none, or leave model.lora out"
        )


def _minibatches_have_work(run: RunSections) -> None:
    sequences = run.rollout.prompts_per_step * run.rollout.samples_per_prompt
    parallel = run.engine.parallel
    if sequences < run.fewest_sequences:
        group = f", {parallel.pp} for each, as engine.parallel.vpp = {parallel.vpp} needs" if parallel.vpp > 1 else ""
        raise ValueError(
            f"{sequences} rollouts a step cannot fill train.minibatches = {run.train.minibatches} on "
            f"engine.parallel.dp = {parallel.dp} ranks{group}; raise rollout.prompts_per_step or "
            "samples_per_prompt, or lower train.minibatches"
        )


def _fp8_has_what_it_needs(run: RunSections) -> None:
    fp8 = run.engine.fp8
    if fp8.enabled and run.model.dtype != "bfloat16":
        raise ValueError(
            f"engine.fp8.recipe = {fp8.recipe} with model.dtype = {run.model.dtype}: Transformer Engine's FP8 layers take "
            "and give bfloat16; set model.dtype = bfloat16"
        )
    if fp8.params and not run.optimizer.distributed:
        raise ValueError(
            "engine.fp8.params = true needs optimizer.distributed = true: only Megatron's distributed optimizer makes FP8 "
            "weights from its fp32 masters; set it, or engine.fp8.params = false"
        )
    if fp8.params and run.rollout.server.placement == "colocated" and run.rollout.replay is None:
        raise ValueError(
            "engine.fp8.params = true with rollout.server.placement = colocated: weights kept in FP8 cannot leave the GPU "
            "for the servers' turn, nor be read there by them; set engine.fp8.params = false, or another placement"
        )


def _lean_optimizer_has_what_it_needs(run: RunSections) -> None:
    optimizer, engine, dtype = run.optimizer, run.engine, run.model.dtype
    name = "offload_fraction" if optimizer.offload_fraction else next(iter(optimizer.reduced_fields), "")
    if optimizer.own_masters and engine.fp8.params:
        raise ValueError(
            f"optimizer.{name} with engine.fp8.params = true: FP8 weights are made from fp32 masters in Megatron's "
            f"optimizer, and with {name} they are in Adam; leave one of them out"
        )
    if optimizer.precision_aware and engine.platform == "cpu":
        raise ValueError(
            f"optimizer.{name} needs Transformer Engine's Adam on a GPU, and engine.platform = cpu; leave it out, or use "
            "optimizer.offload_fraction, which a CPU has too"
        )
    if optimizer.own_masters and dtype != "bfloat16":
        raise ValueError(
            f"optimizer.{name} with model.dtype = {dtype}: there an Adam of its own kind has the fp32 masters of bfloat16 "
            "weights, and float32 weights are their own; set model.dtype = bfloat16"
        )
    turns = run.rollout.server.placement == "colocated" and run.rollout.replay is None
    if turns and "fp8" in (optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype):
        raise ValueError(
            "optimizer.exp_avg_dtype or exp_avg_sq_dtype = fp8 with rollout.server.placement = colocated: states kept in "
            "FP8 cannot leave the GPU for the servers' turn; use bfloat16 or float16, or another placement"
        )


def _adapters_are_not_in_fp8(run: RunSections) -> None:
    if run.model.lora is not None and run.engine.fp8.enabled:
        raise ValueError(
            f"model.lora with engine.fp8.recipe = {run.engine.fp8.recipe}: merged weights are made anew in each "
            "layer's pass, and Transformer Engine would not quantise them again; set engine.fp8.recipe = none, or leave "
            "model.lora out"
        )


def _there_are_weights_to_gather(run: RunSections) -> None:
    if run.engine.overlap_param_gather and not run.optimizer.distributed:
        raise ValueError(
            "engine.overlap_param_gather = true gathers weights of which each data-parallel rank has updated a share, and "
            "only optimizer.distributed = true shares them; set it, or engine.overlap_param_gather = false"
        )


def _noise_is_measured_where_it_is_used(run: RunSections) -> None:
    if "entropy_noise" in run.objective.needs and not run.engine.noise_every:
        raise ValueError(
            "objective.kl_mask.tolerance = auto takes the rounding noise that the run measures, but engine.noise_every = 0 "
            "measures none; set engine.noise_every = 50, or a tolerance in nats"
        )


def _the_mask_can_act(run: RunSections) -> None:
    mask = run.objective.kl_mask
    if mask is not None and mask.against == "old" and run.train.minibatches == 1:
        warnings.warn(
            "objective.kl_mask adds nothing with train.minibatches = 1: at a step's only update the policy is still the "
            "one before it, their KL is 0, and so is its gradient; 4 is usual",
            stacklevel=2,
        )


def _heldout_matches_train(run: RunSections) -> None:
    train, heldout = run.data.train, run.data.heldout
    if heldout is None and run.evaluate.every and not run.evaluate.sets:
        raise ValueError(
            f"evaluate.every = {run.evaluate.every}, but there are no held-out problems; give data.heldout or "
            "evaluate.sets, or set evaluate.every = 0"
        )
    if heldout is not None and is_custom(train) != is_custom(heldout):
        raise ValueError(
            f"data.train = {show_paths(train)} with data.heldout = {show_paths(heldout)}: one is your own, the other "
            "the demonstration's, and a model is "
            "examined in what it is trained in; give both, or data.heldout = null to evaluate nothing"
        )


def _a_group_can_be_compared(run: RunSections) -> None:
    if run.rollout.samples_per_prompt == 1:
        raise ValueError(
            "rollout.samples_per_prompt = 1: an advantage compares the responses to one prompt, and that of a single one "
            "is 0, so that nothing would be learnt; set 2 or more, 8 is usual"
        )


def _best_is_measured(run: RunSections) -> None:
    best = run.train.keep_best
    if best is not None and best.metric.startswith("eval/"):
        name = best.metric.split("/")[1]
        if name not in run.evaluate.sets or not run.evaluate.every_of(name):
            raise ValueError(
                f"train.keep_best.metric = {best.metric} is measured on evaluate.sets.{name}, which "
                f"{'is never evaluated; set its every' if name in run.evaluate.sets else 'is not given'}"
            )
    heldout = best is not None and best.metric.startswith(("accuracy/", "heldout/"))
    if heldout and best is not None and run.data.heldout is None:
        raise ValueError(
            f"train.keep_best.metric = {best.metric} is measured on data.heldout, which is not given; give it, or another "
            "metric"
        )
    if heldout and best is not None and not run.evaluate.every:
        raise ValueError(
            f"train.keep_best.metric = {best.metric} is measured by evaluations, but evaluate.every = 0 makes none; set "
            "evaluate.every, or another metric"
        )


def _tokens_are_recorded(run: RunSections) -> None:
    log = run.log
    if log.token_samples and log.token_samples_every > run.train.steps:
        raise ValueError(
            f"log.token_samples_every = {log.token_samples_every} is more than train.steps = {run.train.steps}: token values "
            f"of no step would be written; set it to {run.train.steps} or less"
        )


def _rewards_are_weighed(run: RunSections) -> None:
    """GDPO weighs normalised components, a plain reward raw ones: neither weights replace the other."""
    advantage, weights = run.objective.advantage, run.reward.weights
    if not isinstance(advantage, GDPOAdvantage):
        return
    other = next((source.called for source in run.data.train_sources if source.verifier is not None), None)
    if other is not None:
        raise ValueError(
            f"objective.advantage.kind = gdpo weighs the components that one verifier returns, and the source {other} of "
            "data.train has a verifier of its own; set another advantage, or reward.verifier for all sources"
        )
    if advantage.weights is None:
        if weights is not None and len(set(weights.values())) > 1:
            values = ", ".join(f"{weight:g}" for weight in weights.values())
            raise ValueError(
                "reward.weights differ, but objective.advantage.kind = gdpo without weights weighs all components the "
                f"same; set objective.advantage.weights=[{values}], in this order, or reward.weights to 1 each"
            )
    elif weights is None:
        raise ValueError(
            f"objective.advantage.weights names {len(advantage.weights)} rewards, but a run has one for each response "
            "unless reward.weights names the components that reward.verifier returns; set that, or leave "
            "objective.advantage.weights out"
        )
    elif len(weights) != len(advantage.weights):
        raise ValueError(
            f"objective.advantage.weights has {len(advantage.weights)} entries, but reward.weights names {len(weights)} "
            f"components: {', '.join(weights)}; give one for each, in this order"
        )


def _punishment_is_felt(run: RunSections) -> None:
    advantage = run.objective.advantage.kind
    if run.rollout.truncated == "penalise" and advantage == "gdpo":
        raise ValueError(
            "rollout.truncated = penalise lowers the reward, and objective.advantage.kind = gdpo takes the components "
            "of it instead; give the length a component of its own, or set rollout.truncated = mask"
        )
    if run.rollout.truncated == "penalise" and advantage == "divide_by_mean":
        raise ValueError(
            "rollout.truncated = penalise makes rewards negative, and objective.advantage.kind = divide_by_mean divides by "
            "their mean; set rollout.truncated = mask, or another advantage"
        )


def _programs_are_run_knowingly(run: RunSections) -> None:
    """``EnvironmentConfig`` asks the same of environments."""
    verifiers = {"reward.verifier": run.reward.verifier}
    verifiers |= {f"evaluate.sets.{name}.verifier": item.verifier or "" for name, item in run.evaluate.sets.items()}
    verifiers |= {f"the verifier of the source {item.called}": item.verifier or "" for item in run.data.train_sources}
    verifiers |= {f"the verifier of the source {item.called}": item.verifier or "" for item in run.data.heldout_sources}
    field = next((field for field, verifier in verifiers.items() if verifier == "python_tests"), None)
    if field is None:
        return
    if not run.reward.run_code:
        raise ValueError(
            f"{field} = python_tests runs programs that the model writes; set reward.run_code = true if you mean it"
        )
    if run.reward.network:
        raise ValueError(f"{field} = python_tests has no network; leave reward.network out")


_MAX_SERVED_RANK = 512
"""vLLM 0.32's highest LoRA rank."""


def _older_weights_are_corrected(run: RunSections) -> None:
    if run.rollout.oversample > 1 and run.objective.mismatch is None and not run.rollout.uncorrected:
        raise ValueError(
            f"rollout.oversample = {run.rollout.oversample:g} trains on groups that a step has left over for the next "
            "one, of older weights than are trained, which biases the gradient; set objective.mismatch.kind = truncate, or "
            "rollout.uncorrected = true to go on without a correction"
        )


def _rollback_can_help(run: RunSections) -> None:
    if run.train.rollback is not None and run.rollout.replay is not None:
        raise ValueError(
            "train.rollback with rollout.replay: the same rollouts would be read again, and lead to the same step; leave "
            "one of them out"
        )


def _overlap_can_be_borne(run: RunSections) -> None:
    if run.train.schedule == "sync":
        return
    if run.rollout.server.placement == "colocated":
        raise ValueError(
            "train.schedule = overlap with rollout.server.placement = colocated: trainer and servers take turns on the "
            "same GPUs, and neither can work while the other does; set placement = local or external, or schedule = sync"
        )
    if run.rollout.server.cpu_threads == "all" and run.rollout.server.placement == "local":
        raise ValueError(
            "rollout.server.cpu_threads = all with train.schedule = overlap would leave the trainer no core of its own; "
            "both work at a time. Name the servers' cores, such as cpu_threads = 0; engine.cpu_threads = auto is the rest"
        )
    if run.objective.mismatch is None and not run.rollout.uncorrected:
        raise ValueError(
            f"objective.mismatch = null with train.schedule = overlap: train.max_staleness = {run.train.max_staleness} "
            f"lets older weights draw the rollouts, and preset {run.objective.preset} takes them for those of the policy "
            "before the update; set objective.mismatch.kind = truncate, or rollout.uncorrected = true to go on without "
            "a correction"
        )


def _episodes_can_be_played(run: RunSections) -> None:
    if run.environment is None or run.rollout.replay is not None:
        return
    default = type(run.reward)()  # which a complete configuration (resolved.yaml) names too
    if (run.reward.verifier, run.reward.kwargs) != (default.verifier, default.kwargs):
        raise ValueError(
            f"reward.verifier = {run.reward.verifier} with environment.name = {run.environment.name}: rewards come from "
            "the environment; leave reward.verifier and reward.kwargs out, or give them to the environment by its kwargs"
        )
    other = next((source.called for source in run.data.train_sources if source.verifier is not None), None)
    if other is not None:
        raise ValueError(
            f"the source {other} of data.train has a verifier, with environment.name = {run.environment.name}: rewards "
            "come from the environment; leave the verifier out"
        )
    if run.rollout.partial:
        raise ValueError(
            "rollout.partial = true with environment: an episode cannot be put aside, since what its environment knows is "
            "gone with it; leave partial out"
        )
    if run.rollout.truncated == "penalise":
        raise ValueError(
            "rollout.truncated = penalise with environment: rollout.sampling.max_new_tokens bounds a turn, and not the "
            "episode whose length would be punished; have the environment do it, or set rollout.truncated = mask"
        )
    if run.environment.max_tokens is not None and run.environment.max_tokens < 2:
        raise ValueError("environment.max_tokens = 1 leaves no room for an answer behind a turn; raise it")
    if run.environment is not None and run.rollout.collect is not None:
        raise ValueError(
            f"rollout.collect = {run.rollout.collect} draws single responses, and environment.name = "
            f"{run.environment.name} plays episodes; leave one of the two out"
        )


def _adapters_can_be_served(run: RunSections) -> None:
    server, lora = run.rollout.server, run.model.lora
    if lora is None or lora.serve == "merged":
        return
    if lora.rank > _MAX_SERVED_RANK:
        raise ValueError(
            f"model.lora.serve = adapter takes ranks up to {_MAX_SERVED_RANK}, as vLLM does, and model.lora.rank = "
            f"{lora.rank}; set model.lora.serve = merged"
        )
    if server.placement == "colocated":
        raise ValueError(
            "model.lora.serve = adapter needs servers that keep their weights, and those of rollout.server.placement = "
            "colocated let them go whenever the trainer has the GPU; set model.lora.serve = merged"
        )
    if server.quantization != "none":
        raise ValueError(
            f"model.lora.serve = adapter is for servers in full precision, and rollout.server.quantization = "
            f"{server.quantization}; set model.lora.serve = merged, whose weights are quantised with the adapters in them"
        )
    if server.drafts:
        raise ValueError(
            "model.lora.serve = adapter with rollout.server.speculative.draft_model has not been tested; set model.lora."
            "serve = merged, or leave the draft model out"
        )
    if server.load_format == "dummy":
        raise ValueError(
            "model.lora.serve = adapter never sends the weights under the adapters, so that servers would have none with "
            "rollout.server.load_format = dummy; set it to auto"
        )


def _quantised_rollouts_fit(run: RunSections) -> None:
    server = run.rollout.server
    if server.quantization == "none":
        return
    dtype = server.served_dtype(run.model.dtype)
    if dtype != "bfloat16":
        raise ValueError(
            f"rollout.server.quantization = {server.quantization} takes servers in bfloat16, not {dtype}; set "
            "rollout.server.dtype = bfloat16"
        )
    if run.objective.mismatch is None and not run.rollout.uncorrected:
        raise ValueError(
            f"rollout.server.quantization = {server.quantization} samples from another distribution than the one that is "
            "trained, which biases the gradient; set objective.mismatch.kind = truncate, or rollout.uncorrected = true to "
            "go on without a correction"
        )


_CHECKS = (
    _biases_are_trained,
    _minibatches_have_work,
    _fp8_has_what_it_needs,
    _lean_optimizer_has_what_it_needs,
    _adapters_are_not_in_fp8,
    _there_are_weights_to_gather,
    _noise_is_measured_where_it_is_used,
    _the_mask_can_act,
    _heldout_matches_train,
    _a_group_can_be_compared,
    _best_is_measured,
    _tokens_are_recorded,
    _rewards_are_weighed,
    _punishment_is_felt,
    _programs_are_run_knowingly,
    _older_weights_are_corrected,
    _rollback_can_help,
    _overlap_can_be_borne,
    _episodes_can_be_played,
    _adapters_can_be_served,
    _quantised_rollouts_fit,
)


def check_sections(run: RunSections) -> None:
    """Raises ValueError for the first combination that cannot run; warns about one without effect."""
    for check in _CHECKS:
        check(run)
