"""``reward``: what scores a response."""

from typing import Annotated

from pydantic import Field, PositiveInt

from tepo_megatron.config.base import Section


class RewardConfig(Section):
    verifier: str = "last_word"
    """``last_word``, ``exact``, ``last_number``, ``math`` (by the math-verify library), or your own function
    ``(problem, response_text) -> float`` as ``package.module:function``. A reward of 1 or more counts as a correct answer."""

    workers: PositiveInt = 1
    """Processes that run the verifier. Rank 0 starts them and waits for their results. Responses that take long hold up one
    process each, so that more of them help where many time out."""

    timeout_s: Annotated[float, Field(gt=0, le=3600)] = 10.0
    """Seconds per response; one that takes longer has failed. The same response to the same problem is not tried again."""

    memory_mb: PositiveInt = 512
    """What a verifier may take in 10⁶ bytes, beyond what its process has once the verifier is imported; a response that needs
    more has failed. The default is several times what math-verify takes for a long answer; a verifier that loads a model at its
    first call needs more, or loads it when it is imported. Linux only."""

    file_mb: PositiveInt = 256
    """The largest file that a verifier may write, in 10⁶ bytes; what it prints into the run's own log is not counted before."""

    network: bool | None = None
    """Whether a verifier reaches the network, this machine's own addresses included. null: your own function does, since it may
    ask a judge; the built-in ones do not. false takes it away where the kernel allows it, which ``tepo doctor`` says."""

    failed_reward: float | None = None
    """The reward of a response whose verifier raised, returned no finite number, or passed a limit. null: it has none and
    leaves its group; of a group that it leaves with fewer than two, nothing is learnt."""

    max_failed: Annotated[float, Field(ge=0, le=1)] = 0.5
    """The largest share of a step's responses that may fail; above it the run stops with the first cause. It also stops where
    too few are left for ``train.minibatches`` on all data-parallel ranks."""

    @property
    def cuts_network(self) -> bool:
        """Whether verifiers run without network."""
        return not self.network and (self.network is False or ":" not in self.verifier)
