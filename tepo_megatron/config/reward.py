"""``reward``: scores a response."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, PositiveInt, field_validator

from tepo_megatron.config.base import Section

_RESERVED_NAMES = ("mean", "std", "failed")


class RewardConfig(Section):
    verifier: str = "last_word"
    """``last_word``, ``exact``, ``last_number``, ``math`` (the math-verify library), ``judge`` (a model behind an
    OpenAI-compatible address), ``python_tests`` (runs the model's program and the problem's tests in a sandbox),
    ``stack_machine`` (the same for a small stack machine), or your function ``(problem, response) -> float`` as
    ``path/file.py:function`` or ``package.module:function``. Other forms: docs/guides/rewards.md. A reward of 1 or more counts
    as correct."""

    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of a verifier class, made once per worker. No secrets: the run's folder keeps its configuration."""

    weights: dict[str, float] | None = None
    """Weights of named components; the verifier must return exactly these. null: 1 each, for the components of a trial before
    the run."""

    workers: PositiveInt = 1
    """Processes that run the verifier, started by rank 0. A slow response occupies one; raise it if many time out."""

    concurrency: Annotated[int, Field(ge=1, le=128)] = 16
    """Concurrent calls per worker of an ``async`` verifier; others run one by one."""

    timeout_s: Annotated[float, Field(gt=0, le=3600)] = 10.0
    """Seconds per response, or per group for a verifier of groups; one that needs more fails, without a retry."""

    memory_mb: PositiveInt = 512
    """A verifier's memory in 10⁶ bytes, beyond that after the import; a response that needs more fails. The default is several
    times math-verify's need; a verifier that loads a model at its first call needs more. Linux only."""

    file_mb: PositiveInt = 256
    """Largest file that a verifier may write, in 10⁶ bytes; earlier output in the run's log does not count."""

    network: bool | None = None
    """Network access, this machine included. null: only for ``judge`` and custom verifiers. false removes it if the kernel
    allows; ``tepo doctor`` tests that."""

    run_code: bool = False
    """Lets ``python_tests`` run the model's programs: in a limited process, without network, in a temporary folder. This is no
    virtual machine: they may read what this user may read."""

    failed_reward: float | None = None
    """Reward if the verifier raised, returned no finite number, or passed a limit. null: the response leaves its group; a group
    then left with fewer than two teaches nothing."""

    max_failed: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Largest share of a step's responses that may fail; above it, or with too few left for ``train.minibatches`` on all
    data-parallel ranks, the run stops with the first cause."""

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
        asks = ":" in self.verifier or self.verifier == "judge"
        return not self.network and (self.network is False or not asks)


def component_fault(name: Any) -> str | None:
    """Why this cannot name a reward component, whose metric is ``reward/<name>``; None: it can."""
    if not isinstance(name, str) or not name.isidentifier() or len(name) > 60:
        return f"{str(name)[:60]!r} cannot name a component of a reward: a name has letters, digits and underscores, 60 at most"
    if name in _RESERVED_NAMES:
        return f"a component cannot be called {name}, since reward/{name} is a metric of its own; choose another name"
    return None
