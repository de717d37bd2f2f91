"""``train``: how long a run trains, and what it keeps."""

from pydantic import NonNegativeInt, PositiveInt

from tepo_megatron.config.base import Section


class TrainConfig(Section):
    steps: PositiveInt = 100
    """Steps of the run. A step samples one batch of rollouts and trains on it."""

    minibatches: PositiveInt = 4
    """K, optimizer steps per batch of rollouts; each takes an equal part of the batch's responses once."""

    save_every: NonNegativeInt = 0
    """Steps between checkpoints; one is always written at the end. 0: only that."""

    keep_checkpoints: PositiveInt = 2
    """How many of the newest checkpoints are kept; an older one is deleted when a new one is complete."""

    resume: bool = False
    """Continue from the newest checkpoint in the output folder; it is an error if there is none."""
