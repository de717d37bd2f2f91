"""``train``: the loop."""

from pydantic import NonNegativeInt, PositiveInt

from tepo_megatron.config.base import Section


class TrainConfig(Section):
    steps: PositiveInt = 100
    """Rollout batches."""

    minibatches: PositiveInt = 4
    """K, optimizer steps per rollout batch."""

    save_every: NonNegativeInt = 0
    """Steps between checkpoints; one is always written at the end. 0: only that."""

    keep_checkpoints: PositiveInt = 2
    resume: bool = False
    """Go on from the newest checkpoint in the output folder; an error if there is none."""
