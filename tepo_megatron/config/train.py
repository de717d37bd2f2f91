"""``train``: how long a run trains, and what it keeps."""

import re
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from tepo_megatron.config.base import Section


class KeepBestConfig(Section):
    metric: str = Field(min_length=1)
    """A key of ``metrics.jsonl``, such as ``accuracy/greedy``. Only checkpoints of steps whose row has it are compared, so let
    ``save_every`` be a multiple of ``evaluate.every``."""

    mode: Literal["max", "min"] = "max"
    """Whether the best value is the largest or the smallest; of equal ones the newest counts."""


class TrainConfig(Section):
    steps: PositiveInt = 100
    """Steps of the run. A step samples one batch of rollouts and trains on it."""

    minibatches: PositiveInt = 4
    """K, optimizer steps per batch of rollouts; each takes an equal part of the batch's responses once."""

    save_every: NonNegativeInt = 0
    """Steps between checkpoints; one is always written at the end. 0: only that."""

    keep_checkpoints: PositiveInt = 2
    """How many of the newest checkpoints are kept; an older one is deleted when a newer one has its row of metrics."""

    keep_every: NonNegativeInt = 0
    """Checkpoints of steps that are multiples of this are kept for good. 0: none."""

    keep_best: KeepBestConfig | None = None
    """Also keep the checkpoint that is best by a metric of its step. Default: none."""

    resume: bool = False
    """Continue from the newest whole checkpoint in the output folder; it is an error if there is none. One that is damaged is
    passed over."""

    resume_from: str | None = None
    """Continue from this checkpoint instead: its name in the output folder (``step_000040``), or a path. Checkpoints of later
    steps in the output folder are set aside, as they are not this run's past. Needs ``resume``. Default: the newest."""

    allow_change: tuple[str, ...] = ()
    """Fields, or sections, that may differ from the run that wrote the checkpoint, such as ``[seed, objective.kl]``. A
    difference that makes it another run is refused otherwise; what runs the same run elsewhere or longer needs no entry."""

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
