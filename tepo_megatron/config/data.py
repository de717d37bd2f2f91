"""Problems, rewards, evaluation."""

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

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
    """A built-in verifier (``tepo config schema`` lists them), or ``package.module:function`` with
    ``(problem, response_text) -> float``."""

    workers: PositiveInt = 1
    timeout_s: PositiveFloat = 10.0
    """Per response; one that takes longer counts as failed, with reward ``failed_reward``."""

    failed_reward: float = 0.0


class EvaluateConfig(Section):
    every: NonNegativeInt = 10
    """Evaluate before the first step, after every so many and after the last; 0: never."""

    problems: PositiveInt | None = None
    """How many held-out problems to use; default: all."""

    samples: NonNegativeInt = Field(default=4)
    """k, the samples per problem for avg@k and pass@k at the training temperature; 0: greedy only."""

    show: NonNegativeInt = 8
    """Responses written to ``samples.jsonl`` at each evaluation."""
