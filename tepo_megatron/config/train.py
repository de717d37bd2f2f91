"""``train``: how long a run trains, and what it keeps."""

from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt

from tepo_megatron.config.base import Section


class TrainConfig(Section):
    steps: PositiveInt = 100
    """Steps of the run. A step samples one batch of rollouts and trains on it."""

    minibatches: PositiveInt = 4
    """K, optimizer steps per batch of rollouts; each takes an equal part of the batch's responses once."""

    max_skipped: NonNegativeInt = 8
    """How many optimizer steps in a row may be skipped because a loss or a gradient was not finite; one more stops the run. One
    bad batch costs up to ``minibatches`` of them. Batches that were skipped are kept in ``<output>/skipped``. 0: the first one
    stops the run."""

    hang_timeout_s: Annotated[float, Field(ge=60, allow_inf_nan=False)] = 1800.0
    """Seconds without any movement of a trainer rank after which the job counts as hanging: a report is written to
    ``<output>/logs/hang-….txt`` and the job ended. A new phase, a micro-batch or an answered prompt is a movement; while a rank
    waits for servers or verifiers, their own time-outs are added. It must be longer than a micro-batch, the writing of a
    checkpoint, or the start of a rank takes. A rank that a signal has stopped counts as hanging after 30 seconds."""

    save_every: NonNegativeInt = 0
    """Steps between checkpoints; one is always written at the end. 0: only that."""

    keep_checkpoints: PositiveInt = 2
    """How many of the newest checkpoints are kept; an older one is deleted when a new one is complete."""

    resume: bool = False
    """Continue from the newest checkpoint in the output folder; it is an error if there is none."""
