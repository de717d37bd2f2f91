"""``rollout``: how responses are sampled, and by which servers."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from tepo_megatron.config.base import Section
from tepo_megatron.config.rollout_server import ServerConfig
from tepo_megatron.config.sampling import FilterGroupsConfig, OverlongConfig, SamplingConfig, training_fault


class CanaryConfig(Section):
    """Checks that servers compute as the trainer: on a fixed prompt after a weight sync, through prefix caches, and on
    rollouts. A difference above tolerance stops the run."""

    every: NonNegativeInt = 1
    """Weight syncs between checks; rollouts are checked in every step. 0: never."""

    tolerance: PositiveFloat | None = None
    """Largest difference of a token's log-prob, in nats. Default: from the sides' coarser dtype
    (docs/reference/numerics.md)."""

    rollouts_tolerance: PositiveFloat | None = None
    """Largest mean log-prob difference between sampler and trainer over a group, in nats. Default: as ``tolerance``, but
    smaller, since a mean varies less."""


class RolloutConfig(Section):
    prompts_per_step: PositiveInt = 64
    """Prompts per step; it has this × ``samples_per_prompt`` responses."""

    samples_per_prompt: PositiveInt = 8
    """G, responses per prompt: the group that is compared for the advantage."""

    filter_groups: FilterGroupsConfig | None = None
    """Dynamic sampling: train only on groups that pass filters; sample until there are ``prompts_per_step``."""

    oversample: Annotated[float, Field(ge=1, le=2)] = 1.0
    """Groups started per missing group, with ``filter_groups`` or ``partial``: less waiting. The next step uses the surplus,
    one step old. 1: none."""

    partial: bool = False
    """Partial rollouts: a step ends with enough groups; unfinished responses continue in the next one. Needs ``oversample``
    above 1. The seed alone does not repeat such a run, since the groups that finish first count; its record does."""

    truncated: Literal["train", "mask", "penalise"] = "train"
    """For responses cut at ``max_new_tokens``. ``train``: as any other. ``mask``: no loss on their tokens; rewards still count
    in the group (DAPO's overlong filtering). ``penalise``: ``overlong`` lowers rewards of long responses."""

    overlong: OverlongConfig | None = None
    """For ``truncated: penalise``."""

    collect: str | None = None
    """Custom generation step instead of ``samples_per_prompt`` draws, such as best-of-n: ``(problems, sampler) -> rollouts`` as
    ``path/file.py:function`` or ``package.module:function``."""

    sampling: SamplingConfig = SamplingConfig()
    server: ServerConfig = ServerConfig()
    canary: CanaryConfig = CanaryConfig()
    uncorrected: bool = False
    """Train on samples of quantised servers or older weights (``train.schedule``) without ``objective.mismatch``, as if they
    were the trainer's."""

    journal: bool = True
    """Write each step's rollouts to ``<output>/journal/`` once rewarded; a resumed run reads them instead of sampling. Removed
    when no checkpoint needs them. Cost: ``time/journal``."""

    record: bool = False
    """Write every step's rollouts to ``<output>/rollouts/``, and keep them."""

    replay: Path | None = None
    """Read rollouts from this folder, written by ``record``, instead of sampling; no server starts."""

    @model_validator(mode="after")
    def _started_groups_are_used(self) -> "RolloutConfig":
        if self.oversample > 1 and self.filter_groups is None and not self.partial:
            raise ValueError(
                f"oversample = {self.oversample:g} begins more groups than a step trains on, and every one of them would be "
                "kept; set filter_groups or partial, or leave oversample out"
            )
        if self.partial and self.oversample == 1:
            raise ValueError(
                "partial = true, but oversample = 1 begins no more groups than a step needs, so that none is unfinished at its "
                "end; set oversample = 1.5, or partial = false"
            )
        return self

    @model_validator(mode="after")
    def _collect_chooses_itself(self) -> "RolloutConfig":
        if self.collect is not None and (self.filter_groups is not None or self.oversample > 1 or self.partial):
            raise ValueError(
                f"collect = {self.collect} decides itself which responses are trained on; leave filter_groups, oversample and "
                "partial out"
            )
        return self

    @model_validator(mode="after")
    def _groups_can_vary(self) -> "RolloutConfig":
        if self.filter_groups and "zero_variance" in self.filter_groups.filters and self.samples_per_prompt == 1:
            raise ValueError(
                "filter_groups.filters has zero_variance, which refuses every group of samples_per_prompt = 1; raise "
                "samples_per_prompt, or choose another filter"
            )
        return self

    @model_validator(mode="after")
    def _overlong_is_for_penalise(self) -> "RolloutConfig":
        if (self.truncated == "penalise") != (self.overlong is not None):
            raise ValueError(
                f"truncated = {self.truncated} and overlong belong together: truncated = penalise needs overlong.buffer, and "
                "nothing else reads it"
            )
        if self.overlong is not None and self.overlong.buffer > self.sampling.max_new_tokens:
            raise ValueError(
                f"overlong.buffer = {self.overlong.buffer} is more than sampling.max_new_tokens = "
                f"{self.sampling.max_new_tokens}, so that even an empty response would be punished; lower it"
            )
        return self

    @model_validator(mode="after")
    def _drawn_tokens_can_be_scored(self) -> "RolloutConfig":
        fault = training_fault(self.sampling, speculative=self.server.speculative is not None, partial=self.partial)
        if fault is not None:
            raise ValueError(fault)
        return self
