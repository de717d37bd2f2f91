"""``train``: how long a run trains, and what it keeps."""

import re
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from tepo_megatron.config.base import Section

_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class RollbackConfig(Section):
    """When the run goes back to a checkpoint, and how often."""

    metric: str
    """A key of the step's row, such as ``loss``, ``grad_norm``, ``mismatch/kl`` or ``ratio/max``."""

    above: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """The run goes back if the metric is above this."""

    factor: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    """The run goes back if the metric is above this many times its median over the last 20 steps, from the sixth step on."""

    max_times: PositiveInt = 3
    """Most rollbacks; the next one stops the run."""

    @model_validator(mode="after")
    def _one_bound(self) -> "RollbackConfig":
        if (self.above is None) == (self.factor is None):
            raise ValueError("give one of above (a bound) and factor (times the running median), not both and not none")
        return self


class KeepBestConfig(Section):
    metric: str = Field(min_length=1)
    """A key of ``metrics.jsonl``, such as ``accuracy/greedy``. Only checkpoints of steps whose row has it are compared, so let
    ``save_every`` be a multiple of ``evaluate.every``."""

    mode: Literal["max", "min"] = "max"
    """Whether the best value is the largest or the smallest; of equal ones the newest counts."""


class CallbackConfig(Section):
    callback: str = Field(min_length=1)
    """``early_stopping``, or a custom class as ``path/file.py:Class`` or ``package.module:Class``."""

    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class. Not for secrets: a run's folder keeps its configuration."""


class TrainConfig(Section):
    steps: PositiveInt = 100
    """Steps of the run; each samples one batch of rollouts and trains on it."""

    minibatches: PositiveInt = 4
    """K, optimizer steps per batch of rollouts; each uses an equal part of the responses once."""

    schedule: Literal["sync", "overlap"] = "sync"
    """When rollouts are sampled. ``sync``: the trainer waits for a step's samples, then the servers for its training.
    ``overlap``: the servers sample ahead while the trainer trains, and receive new weights in the middle of responses; rollouts
    are then of older weights than those that are trained, which ``objective.mismatch`` corrects."""

    max_staleness: Annotated[int, Field(ge=1, le=64)] = 1
    """``overlap`` only: largest age, in versions of the trainer's weights, of the weights that drew a token. The servers sample
    as many steps ahead. A larger value hides longer responses and is further off-policy."""

    stale: Literal["drop", "keep"] = "drop"
    """``overlap`` only: handling of a group that is older than ``max_staleness`` when its turn comes. ``drop``: it is not
    trained on, and counted; prompts that take longest are then trained on less often. ``keep``: it is trained on, with its
    correction."""

    kv_cache: Literal["recompute", "keep"] = "recompute"
    """``overlap`` only: keys and values of responses that are unfinished at a weight update. ``recompute``: the new weights
    compute them again, so that later tokens are drawn by the trainer's policy. ``keep``: they stay, which saves time; later
    tokens are then drawn by no single policy, with the log-probs that the server returns."""

    max_skipped: NonNegativeInt = 8
    """Consecutive optimizer steps that may be skipped because a loss or a gradient was not finite; one more stops the run. One
    bad batch costs up to ``minibatches`` of them. Skipped batches are kept in ``<output>/skipped``. 0: the first one stops the
    run."""

    hang_timeout_s: Annotated[float, Field(ge=60, allow_inf_nan=False)] = 1800.0
    """Seconds without progress of a trainer rank after which the job counts as hanging: a report is written to
    ``<output>/logs/hang-….txt`` and the job ended. Progress is a new phase, a micro-batch, an answered prompt or new tokens of
    a server; while a rank waits for servers or verifiers, their own time-outs are added. It must be longer than a micro-batch,
    a checkpoint, or the start of a rank. A rank that a signal has stopped counts as hanging after 30 seconds."""

    save_every: NonNegativeInt = 0
    """Steps between checkpoints; one is always written at the end, and when a signal ends the run. 0: no others by count."""

    async_save: bool = False
    """Train on while a checkpoint is written: each rank copies its states to host memory (12 bytes a parameter), and a thread
    writes them. A checkpoint counts when all of it is written; after a kill before that the run resumes from the previous one.
    For models whose checkpoints take long; the host must have the memory."""

    save_minutes: float = Field(default=30.0, ge=0, allow_inf_nan=False)
    """Minutes after which the next step is followed by a checkpoint, whatever ``save_every`` is: the most that a failing
    machine costs. 0: never."""

    keep_checkpoints: PositiveInt = 2
    """Number of newest checkpoints that are kept; an older one is deleted when a newer one has its row of metrics."""

    keep_every: NonNegativeInt = 0
    """Checkpoints of steps that are multiples of this are never deleted. 0: none."""

    keep_best: KeepBestConfig | None = None
    """Also keep the checkpoint that is best by a metric of its step. Default: none."""

    resume: bool | Literal["auto"] = False
    """Continue from the newest whole checkpoint in the output folder; without one the run is refused. Damaged checkpoints are
    passed over. auto: start from the beginning if there is none, for jobs that are restarted automatically; metrics of a run
    without a checkpoint are kept under another name."""

    callbacks: tuple[str | CallbackConfig, ...] = ()
    """Custom code on rank 0 that receives rollouts, evaluations, checkpoints and rows of metrics, and may end the run:
    ``early_stopping``, or classes as ``path/file.py:Class``; with arguments as ``{callback: early_stopping, kwargs: {patience:
    3}}`` (docs/guides/from-python.md)."""

    grace_s: _Seconds = 60.0
    """Seconds from SIGTERM to the end of every process. A checkpoint is written within them, after the step's updates if there
    is time, else instead of them. At most the time that the machine leaves before SIGKILL (Slurm: KillWait, or a partition's
    GraceTime)."""

    warning_s: _Seconds = 300.0
    """The same for SIGUSR1, Slurm's warning. ``tepo launch`` has it sent so long before the time limit, plus half a minute for
    the job's own end."""

    rollback: RollbackConfig | None = None
    """Go back to the newest checkpoint, without the step's batch, if a metric explodes. Needs ``save_every``. Off by default: a
    bound that is too tight throws work away."""

    resume_from: str | None = None
    """Continue from this checkpoint instead: its name in the output folder (``step_000040``), or a path. Later checkpoints in
    the output folder are set aside, since they are not this run's past. Needs ``resume``. Default: the newest."""

    allow_change: tuple[str, ...] = ()
    """Fields, or sections, that may differ from the run that wrote the checkpoint, such as ``[seed, objective.kl]``. Other
    differences are refused, except for fields that only move the run elsewhere or make it longer."""

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
