"""``train``: length of a run, and what it keeps."""

import re
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from tepo_megatron.config.base import Section

_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class RollbackConfig(Section):
    """When and how often the run returns to a checkpoint."""

    metric: str
    """A key of the step's row, such as ``loss``, ``grad_norm``, ``mismatch/kl`` or ``ratio/max``."""

    above: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """The run goes back if the metric is above this."""

    factor: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    """The run goes back if the metric exceeds this × its median over the last 20 steps, from the sixth step on."""

    max_times: PositiveInt = 3
    """Most rollbacks; the next one stops the run."""

    @model_validator(mode="after")
    def _one_bound(self) -> "RollbackConfig":
        if (self.above is None) == (self.factor is None):
            raise ValueError("give one of above (a bound) and factor (times the running median), not both and not none")
        return self


class KeepBestConfig(Section):
    metric: str = Field(min_length=1)
    """A key of ``metrics.jsonl``, such as ``accuracy/greedy``. Only checkpoints of steps with it are compared: let
    ``save_every`` be a multiple of ``evaluate.every``."""

    mode: Literal["max", "min"] = "max"
    """Whether the best value is the largest or the smallest; of equal ones the newest."""


class CallbackConfig(Section):
    callback: str = Field(min_length=1)
    """``early_stopping``, or a custom class: ``path/file.py:Class`` or ``package.module:Class``."""

    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class. No secrets: the run's folder keeps its configuration."""


class TrainConfig(Section):
    steps: PositiveInt = 100
    """Steps of the run; each samples one batch of rollouts and trains on it."""

    minibatches: PositiveInt = 4
    """K, optimizer steps per batch of rollouts, each on an equal part of the responses."""

    schedule: Literal["sync", "overlap"] = "sync"
    """``sync``: trainer and servers wait for each other. ``overlap``: servers sample ahead, and receive new weights within
    responses; rollouts then come from older weights, which ``objective.mismatch`` corrects."""

    max_staleness: Annotated[int, Field(ge=1, le=64)] = 1
    """``overlap`` only: largest age of the weights that drew a token, in versions of the trainer's weights; servers sample as
    many steps ahead. More hides longer responses but is further off-policy."""

    stale: Literal["drop", "keep"] = "drop"
    """``overlap`` only: groups older than ``max_staleness``. ``drop``: not trained on, but counted in the metrics; slow prompts
    are then trained on less. ``keep``: trained on, with correction."""

    kv_cache: Literal["recompute", "keep"] = "recompute"
    """``overlap`` only: keys and values of unfinished responses at a weight update. ``recompute``: with the new weights, so
    that later tokens follow the trainer's policy. ``keep``: faster, but later tokens follow no single policy; the server
    returns their log-probs."""

    max_skipped: NonNegativeInt = 8
    """Most consecutive optimizer steps skipped for a non-finite loss or gradient; one more stops the run. A bad batch costs up
    to ``minibatches``, and goes to ``<output>/skipped``. 0: the first one stops the run."""

    hang_timeout_s: Annotated[float, Field(ge=60, allow_inf_nan=False)] = 1800.0
    """Seconds without progress of a trainer rank until the job ends as hanging, with a report in ``<output>/logs/hang-….txt``.
    Progress: a phase, a micro-batch, an answered prompt, a server's tokens; time-outs of awaited servers and verifiers are
    added. It must exceed a micro-batch, a checkpoint, and a rank's start. For a rank stopped by a signal it is 30 seconds."""

    save_every: NonNegativeInt = 0
    """Steps between checkpoints; one is always written at the end, also by signal. 0: no others by count."""

    async_save: bool = False
    """Train on while a thread writes the checkpoint from host memory (12 bytes a parameter). Only a complete checkpoint counts;
    after an earlier kill the run resumes from the previous one. For slow checkpoints."""

    save_minutes: float = Field(default=30.0, ge=0, allow_inf_nan=False)
    """Minutes after which the next step ends with a checkpoint, whatever ``save_every``: the most that a failing machine costs.
    0: never."""

    keep_checkpoints: PositiveInt = 2
    """Newest checkpoints kept; an older one is deleted when a newer one has its row of metrics."""

    keep_every: NonNegativeInt = 0
    """Checkpoints of steps that are multiples of this are never deleted. 0: none."""

    keep_best: KeepBestConfig | None = None
    """Also keep the checkpoint that is best by a metric of its step. Default: none."""

    resume: bool | Literal["auto"] = False
    """Continue from the newest whole checkpoint in the output folder; without one the run is refused. auto: without one start
    from the beginning, for automatic restarts; earlier metrics are renamed."""

    callbacks: tuple[str | CallbackConfig, ...] = ()
    """Custom code on rank 0 that receives rollouts, evaluations, checkpoints and metrics, and may end the run:
    ``early_stopping``, or classes as ``path/file.py:Class``; with arguments ``{callback: early_stopping, kwargs: {patience:
    3}}`` (docs/guides/from-python.md)."""

    grace_s: _Seconds = 60.0
    """Seconds from SIGTERM to the end of all processes, a checkpoint included: after the step's updates if time allows, else at
    once. At most the time before SIGKILL (Slurm: KillWait, or a partition's GraceTime)."""

    warning_s: _Seconds = 300.0
    """The same for SIGUSR1, Slurm's warning; ``tepo launch`` asks for it this long, plus half a minute, before the time
    limit."""

    rollback: RollbackConfig | None = None
    """Return to the newest checkpoint, without the step's batch, if a metric explodes. Needs ``save_every``. Off by default: a
    tight bound throws work away."""

    resume_from: str | None = None
    """Continue from this checkpoint: a name in the output folder (``step_000040``) or a path. Later ones there are set aside.
    Needs ``resume``. Default: the newest."""

    allow_change: tuple[str, ...] = ()
    """Fields or sections that may differ from the checkpoint's run, such as ``[seed, objective.kl]``. Other differences are
    refused, unless they only move or lengthen the run."""

    @model_validator(mode="after")
    def _there_is_something_to_go_back_to(self) -> "TrainConfig":
        if self.rollback is not None and not self.save_every:
            raise ValueError("rollback goes back to a checkpoint, but save_every = 0 writes none on the way; set save_every")
        return self

    @model_validator(mode="after")
    def _overlap_is_meant(self) -> "TrainConfig":
        if self.schedule == "sync":
            for name in ("max_staleness", "stale", "kv_cache"):
                value = getattr(self, name)
                if value != type(self).model_fields[name].default:
                    raise ValueError(
                        f"{name} = {value} does nothing with schedule = sync, whose rollouts are never stale; set "
                        "train.schedule = overlap, or leave it out"
                    )
        return self

    @field_validator("resume_from")
    @classmethod
    def _names_a_checkpoint(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch(r"(.*/)?step_\d{6,}/?", name):
            raise ValueError(
                f"{name!r} is no checkpoint; give its name in the output folder, such as step_000040, or a path that ends so"
            )
        return name

    @model_validator(mode="after")
    def _a_checkpoint_is_for_resuming(self) -> "TrainConfig":
        if self.resume_from is not None and not self.resume:
            raise ValueError(f"resume_from = {self.resume_from} has no effect without resume; set train.resume = true")
        return self
