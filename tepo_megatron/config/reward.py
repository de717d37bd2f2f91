"""``reward``: what scores a response."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, PositiveInt, field_validator

from tepo_megatron.config.base import Section

_RESERVED_NAMES = ("mean", "std", "failed")


class RewardConfig(Section):
    verifier: str = "last_word"
    """``last_word``, ``exact``, ``last_number``, ``math`` (by the math-verify library), ``judge`` (a model behind an
    OpenAI-compatible address), ``python_tests`` (runs the model's program and the problem's tests in a sandbox),
    ``stack_machine`` (the same with programs for a small stack machine), or your own function
    ``(problem, response) -> float`` as ``path/file.py:function`` or ``package.module:function``. docs/guides/rewards.md has
    other forms. A reward of 1 or more counts as a correct answer."""

    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of a verifier that is a class, made once per worker. Not for secrets: a run's folder keeps its
    configuration."""

    weights: dict[str, float] | None = None
    """Weights of the components in the reward, for a verifier that returns components by name; it must return exactly these.
    null: each weighs 1, and the components are those of a trial before the run."""

    workers: PositiveInt = 1
    """Processes that run the verifier. Rank 0 starts them and waits for their results. A slow response occupies one process, so
    more of them help if many time out."""

    concurrency: Annotated[int, Field(ge=1, le=128)] = 16
    """Concurrent calls per worker of an ``async`` verifier. Other verifiers are called one after another."""

    timeout_s: Annotated[float, Field(gt=0, le=3600)] = 10.0
    """Seconds per response, or per group if the verifier scores whole groups; one that needs more has failed, and is not tried
    again."""

    memory_mb: PositiveInt = 512
    """Memory of a verifier in 10⁶ bytes, beyond that of its process after the import; a response that needs more has failed.
    The default is several times the need of math-verify for a long answer; a verifier that loads a model at its first call
    needs more, or loads it when it is imported. Linux only."""

    file_mb: PositiveInt = 256
    """The largest file that a verifier may write, in 10⁶ bytes; earlier output in the run's own log does not count."""

    network: bool | None = None
    """Whether a verifier reaches the network, this machine's own addresses included. null: ``judge`` and custom verifiers do,
    other built-in ones do not. false removes it if the kernel allows it; ``tepo doctor`` tells."""

    run_code: bool = False
    """Lets ``python_tests`` run programs that the model writes: in a process with limits, without network, in a folder that is
    removed afterwards. It is no virtual machine: such a program may read what this user may read."""

    failed_reward: float | None = None
    """The reward of a response whose verifier raised, returned no finite number, or passed a limit. null: it leaves its group;
    a group with fewer than two others teaches nothing."""

    max_failed: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Largest share of a step's responses that may fail; above it the run stops with the first cause. It also stops if too few
    are left for ``train.minibatches`` on all data-parallel ranks."""

    @field_validator("weights")
    @classmethod
    def _components_have_names(cls, weights: Mapping[str, float] | None) -> Mapping[str, float] | None:
        if weights == {}:
            raise ValueError("name at least one component, or leave it out")
        for name in weights or ():
            fault = component_fault(name)
            if fault is not None:
                raise ValueError(fault)
        return weights

    @property
    def cuts_network(self) -> bool:
        """Whether verifiers run without network."""
        asks = ":" in self.verifier or self.verifier == "judge"
        return not self.network and (self.network is False or not asks)


def component_fault(name: Any) -> str | None:
    """Why this cannot be the name of a component of a reward, whose metric is ``reward/<name>``; None: it can."""
    if not isinstance(name, str) or not name.isidentifier() or len(name) > 60:
        return f"{str(name)[:60]!r} cannot name a component of a reward: a name has letters, digits and underscores, 60 at most"
    if name in _RESERVED_NAMES:
        return f"a component cannot be called {name}, since reward/{name} is a metric of its own; choose another name"
    return None
