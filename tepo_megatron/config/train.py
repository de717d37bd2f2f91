"""``train``: how long a run trains, and what it keeps."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from tepo_megatron.config.base import Section

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class TrainConfig(Section):
    steps: PositiveInt = 100
    """Steps of the run. A step samples one batch of rollouts and trains on it."""

    minibatches: PositiveInt = 4
    """K, optimizer steps per batch of rollouts; each takes an equal part of the batch's responses once."""

    save_every: NonNegativeInt = 0
    """Steps between checkpoints; one is always written at the end, and when a signal ends the run. 0: no others by count."""

    save_minutes: float = Field(default=30.0, ge=0, allow_inf_nan=False)
    """Minutes after which a step is followed by a checkpoint, whatever ``save_every`` says: what a machine that fails without a
    word may cost. 0: never."""

    keep_checkpoints: PositiveInt = 2
    """How many of the newest checkpoints are kept; an older one is deleted when a new one is complete."""

    resume: bool | Literal["auto"] = False
    """Continue from the newest checkpoint in the output folder; it is an error if there is none. auto: begin anew if there is
    none, for jobs that are started again without a person; metrics of a run that left none are kept under another name."""

    grace_s: Seconds = 60.0
    """Seconds from SIGTERM to the end of every process. Within them a checkpoint is written, after the step's updates if the
    time is enough, else instead of them. Not more than the machine leaves before SIGKILL (Slurm: KillWait, or a partition's
    GraceTime)."""

    warning_s: Seconds = 300.0
    """The same for SIGUSR1, by which Slurm warns. ``tepo launch`` has it sent so long before the time limit, and half a minute
    more for the job's own end."""
