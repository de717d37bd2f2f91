"""``evaluate``: held-out problems, during training and by ``tepo eval``."""

from pydantic import NonNegativeInt, PositiveInt

from tepo_megatron.config.base import Section


class EvaluateConfig(Section):
    every: NonNegativeInt = 10
    """Evaluate before the first step, after every so many and after the last; 0: never."""

    problems: PositiveInt | None = None
    """How many held-out problems to use; default: all."""

    samples: NonNegativeInt = 4
    """k, the samples per problem for avg@k and pass@k at the training temperature; 0: greedy only."""

    show: NonNegativeInt = 8
    """Problems written to ``samples.jsonl`` at each evaluation, each with its greedy and its sampled responses."""
