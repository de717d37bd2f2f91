"""Checks of a run's configuration over several sections: schedules, episodes, and servers beside the trainer.

Each raises ValueError, a sentence that says what to change.
"""

from tepo_megatron.config.sections import RunSections

MAX_SERVED_RANK = 512
"""The highest rank of vLLM's LoRA, in 0.32."""


def older_weights_are_corrected(run: RunSections) -> None:
    if run.rollout.oversample > 1 and run.objective.mismatch is None and not run.rollout.uncorrected:
        raise ValueError(
            f"rollout.oversample = {run.rollout.oversample:g} trains on groups that a step has left over for the next "
            "one, of older weights than are trained, which biases the gradient; set objective.mismatch.kind = truncate, or "
            "rollout.uncorrected = true to go on without a correction"
        )


def rollback_can_help(run: RunSections) -> None:
    if run.train.rollback is not None and run.rollout.replay is not None:
        raise ValueError(
            "train.rollback with rollout.replay: the same rollouts would be read again, and lead to the same step; leave "
            "one of them out"
        )


def overlap_can_be_borne(run: RunSections) -> None:
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
    if run.rollout.collect is not None:
        raise ValueError(
            f"rollout.collect = {run.rollout.collect} with train.schedule = overlap, whose samples are drawn "
            "ahead, one by one; set schedule = sync"
        )
    if run.rollout.oversample > 1:
        raise ValueError(
            f"rollout.oversample = {run.rollout.oversample:g} with train.schedule = overlap: what a step does not use is "
            "its successors' there anyway; leave oversample and partial out"
        )
    if run.model.lora is not None and run.model.lora.serve == "adapter":
        raise ValueError(
            "train.schedule = overlap with model.lora.serve = adapter: adapters that change in the middle of responses "
            "have not been tested; set model.lora.serve = merged, or schedule = sync"
        )
    if run.objective.mismatch is None and not run.rollout.uncorrected:
        raise ValueError(
            f"objective.mismatch = null with train.schedule = overlap: train.max_staleness = {run.train.max_staleness} "
            f"lets older weights draw the rollouts, and preset {run.objective.preset} takes them for those of the policy "
            "before the update; set objective.mismatch.kind = truncate, or rollout.uncorrected = true to go on without "
            "a correction"
        )


def episodes_can_be_played(run: RunSections) -> None:
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


def adapters_can_be_served(run: RunSections) -> None:
    server, lora = run.rollout.server, run.model.lora
    if lora is None or lora.serve == "merged":
        return
    if lora.rank > MAX_SERVED_RANK:
        raise ValueError(
            f"model.lora.serve = adapter takes ranks up to {MAX_SERVED_RANK}, as vLLM does, and model.lora.rank = "
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


def quantised_rollouts_fit(run: RunSections) -> None:
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


CHECKS = (
    older_weights_are_corrected,
    rollback_can_help,
    overlap_can_be_borne,
    episodes_can_be_played,
    adapters_can_be_served,
    quantised_rollouts_fit,
)
"""In the order in which they are made."""
