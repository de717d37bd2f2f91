"""Checks of a run's configuration over several sections: the trainer and what its objective needs of it.

Each raises ValueError, a sentence that says what to change.
"""

import warnings

from tepo_megatron.config.sections import RunSections


def biases_are_trained(run: RunSections) -> None:
    if run.engine.moe_balance.kind == "expert_bias" and run.model.lora is not None:
        raise ValueError(
            "engine.moe_balance.kind = expert_bias moves biases of the model, which model.lora leaves as it is, and a "
            "folder of adapters has no place for them; set kind = aux_loss or none, or leave model.lora out"
        )


def minibatches_have_work(run: RunSections) -> None:
    sequences = run.rollout.prompts_per_step * run.rollout.samples_per_prompt
    parallel = run.engine.parallel
    if sequences < run.fewest_sequences:
        each = f", {parallel.pp} for each, as engine.parallel.vpp = {parallel.vpp} needs" if parallel.vpp > 1 else ""
        raise ValueError(
            f"{sequences} rollouts a step cannot fill train.minibatches = {run.train.minibatches} on "
            f"engine.parallel.dp = {parallel.dp} ranks{each}; raise rollout.prompts_per_step or "
            "samples_per_prompt, or lower train.minibatches"
        )


def fp8_has_what_it_needs(run: RunSections) -> None:
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


def lean_optimizer_has_what_it_needs(run: RunSections) -> None:
    optimizer, engine, dtype = run.optimizer, run.engine, run.model.dtype
    given = "offload_fraction" if optimizer.offload_fraction else next(iter(optimizer.reduced_fields), "")
    if optimizer.own_masters and engine.fp8.params:
        raise ValueError(
            f"optimizer.{given} with engine.fp8.params = true: FP8 weights are made from fp32 masters in Megatron's "
            f"optimizer, and with {given} they are in Adam; leave one of them out"
        )
    if optimizer.precision_aware and engine.platform == "cpu":
        raise ValueError(
            f"optimizer.{given} needs Transformer Engine's Adam on a GPU, and engine.platform = cpu; leave it out, or use "
            "optimizer.offload_fraction, which a CPU has too"
        )
    if optimizer.own_masters and dtype != "bfloat16":
        raise ValueError(
            f"optimizer.{given} with model.dtype = {dtype}: there an Adam of its own kind has the fp32 masters of bfloat16 "
            "weights, and float32 weights are their own; set model.dtype = bfloat16"
        )
    turns = run.rollout.server.placement == "colocated" and run.rollout.replay is None
    if turns and "fp8" in (optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype):
        raise ValueError(
            "optimizer.exp_avg_dtype or exp_avg_sq_dtype = fp8 with rollout.server.placement = colocated: states kept in "
            "FP8 cannot leave the GPU for the servers' turn; use bfloat16 or float16, or another placement"
        )


def adapters_are_not_in_fp8(run: RunSections) -> None:
    if run.model.lora is not None and run.engine.fp8.enabled:
        raise ValueError(
            f"model.lora with engine.fp8.recipe = {run.engine.fp8.recipe}: merged weights are made anew in each "
            "layer's pass, and Transformer Engine would not quantise them again; set engine.fp8.recipe = none, or leave "
            "model.lora out"
        )


def there_are_weights_to_gather(run: RunSections) -> None:
    if run.engine.overlap_param_gather and not run.optimizer.distributed:
        raise ValueError(
            "engine.overlap_param_gather = true gathers weights of which each data-parallel rank has updated a share, and "
            "only optimizer.distributed = true shares them; set it, or engine.overlap_param_gather = false"
        )


def noise_is_measured_where_it_is_used(run: RunSections) -> None:
    mask = run.objective.kl_mask
    if mask is not None and mask.falling == "measured" and mask.tolerance == "auto" and not run.engine.noise_every:
        raise ValueError(
            "objective.kl_mask.tolerance = auto takes the rounding noise that the run measures, but engine.noise_every = 0 "
            "measures none; set engine.noise_every = 50, or a tolerance in nats"
        )


def the_mask_can_act(run: RunSections) -> None:
    mask = run.objective.kl_mask
    if mask is not None and mask.against == "old" and run.train.minibatches == 1:
        warnings.warn(
            "objective.kl_mask adds nothing with train.minibatches = 1: at a step's only update the policy is still the "
            "one before it, their KL is 0, and so is its gradient; 4 is usual",
            stacklevel=2,
        )


CHECKS = (
    biases_are_trained,
    minibatches_have_work,
    fp8_has_what_it_needs,
    lean_optimizer_has_what_it_needs,
    adapters_are_not_in_fp8,
    there_are_weights_to_gather,
    noise_is_measured_where_it_is_used,
    the_mask_can_act,
)
"""In the order in which they are made."""
