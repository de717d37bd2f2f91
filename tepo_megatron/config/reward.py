"""``reward``: what scores a response."""

from typing import Annotated

from pydantic import Field, FiniteFloat, PositiveInt

from tepo_megatron.config.base import Section


class RewardConfig(Section):
    verifier: str = "last_word"
    """``last_word``, ``exact``, ``last_number``, ``math`` (by the math-verify library), or your own function
    ``(problem, response_text) -> float`` as ``package.module:function``. A reward of 1 or more counts as a correct answer."""

    workers: PositiveInt = 1
    """Processes that run the verifier. Rank 0 starts them and waits for their results."""

    timeout_s: Annotated[float, Field(gt=0, le=3600)] = 10.0
    """Seconds per response; one that takes longer counts as failed, with reward ``failed_reward``."""

    failed_reward: FiniteFloat = 0.0
    """The reward of a response whose verifier raised, returned no finite number, or was too slow."""
