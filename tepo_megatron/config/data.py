"""Problems, rewards, evaluation."""

from typing import Annotated

from pydantic import Field, FiniteFloat, NonNegativeInt, PositiveInt

from tepo_megatron.config.base import Section


class DataConfig(Section):
    train: str = "builtin:addition"
    """``builtin:NAME``, or a JSON-lines file with ``prompt``, ``answer`` and optionally ``id``."""

    heldout: str = "builtin:addition-heldout"
    """The same, for evaluation; never trained on."""

    chat_template: bool = False
    """Wrap each prompt in the tokenizer's chat template as a user message."""

    max_prompt_tokens: PositiveInt | None = None
    """Problems with a longer prompt are left out, and counted; default: no bound."""


class RewardConfig(Section):
    verifier: str = "last_word"
    """``last_word``, ``exact``, ``last_number``, ``math`` (by the math-verify library), or your own function
    ``(problem, response_text) -> float`` as ``package.module:function``. A reward of 1 or more counts as a correct answer."""

    workers: PositiveInt = 1
    """Processes that run the verifier, beside rank 0."""

    timeout_s: Annotated[float, Field(gt=0, le=3600)] = 10.0
    """Seconds per response; one that takes longer counts as failed, with reward ``failed_reward``."""

    failed_reward: FiniteFloat = 0.0
    """The reward of a response whose verifier raised, returned no finite number, or was too slow."""


class EvaluateConfig(Section):
    every: NonNegativeInt = 10
    """Evaluate before the first step, after every so many and after the last; 0: never."""

    problems: PositiveInt | None = None
    """How many held-out problems to use; default: all."""

    samples: NonNegativeInt = 4
    """k, the samples per problem for avg@k and pass@k at the training temperature; 0: greedy only."""

    show: NonNegativeInt = 8
    """Problems written to ``samples.jsonl`` at each evaluation, each with its greedy and its sampled responses."""
