"""A run's task: how prompts become responses, and responses rewards."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import ArrayLike

from tepo_megatron.core.problem import Problem
from tepo_megatron.core.rollout import Response, Rollout
from tepo_megatron.sampler.protocol import Sampler, SampleStream


@dataclass(frozen=True)
class RewardResult:
    """The reward of a response. ``error`` tells why it could not be scored; the reward is then ``reward.failed_reward``.

    ``parts``: the verifier's components; the reward is their weighted sum. ``seconds``: time of scoring, of the whole group
    for a verifier of groups.
    """

    reward: float | None
    error: str | None = None
    parts: Mapping[str, float] = field(default_factory=dict, repr=False)
    seconds: float = field(default=0.0, repr=False, compare=False)


class Generate(Protocol):
    """Samples ``n`` responses for each prompt, in the prompts' order; temperature 0 is greedy."""

    def __call__(
        self, prompts: list[tuple[int, ...]], *, n: int, temperature: float, max_new_tokens: int, seed: int
    ) -> Sequence[Sequence[Response]]: ...


class ResponseStream(Protocol):
    """Responses that are requested at any time and returned as they finish. Arguments and errors as of ``SampleStream``."""

    @property
    def unfinished(self) -> int: ...
    def submit(
        self,
        key: Hashable,
        prompt_ids: ArrayLike,
        seed: int,
        n: int = 1,
        *,
        continued: Mapping[int, Response] | None = None,
        only: Sequence[int] | None = None,
    ) -> None: ...
    def next(self, timeout_s: float | None) -> tuple[Any, int, Response] | None: ...
    def abort(self) -> list[tuple[Any, int, Response]]: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None: ...


class Task(Protocol):
    """Samples responses to problems with the fleet's servers, and rewards them. Used from one thread of rank 0.

    ``VerifierTask``: a response is one sample, rewarded by a verifier. ``EnvironmentTask``: a response is an episode, rewarded
    by its environment.
    """

    @property
    def notice(self) -> str | None:
        """A limit of the workers that this machine's kernel does not support; None: all limits are in force."""

    @property
    def verifier(self) -> str | None:
        """The verifier's name, if the task can score any response; None: it scores only the responses that it sampled."""

    @property
    def scores_groups(self) -> bool:
        """Whether a response is rewarded together with its whole group."""

    @property
    def unfinished(self) -> int:
        """Responses that were submitted and whose results :meth:`poll` has not returned."""

    def stream(self, samples: SampleStream, problem_of: Callable[[Any], Problem]) -> ResponseStream:
        """Responses sampled through ``samples``; ``problem_of`` maps the key of a request to its problem."""

    def heldout_generate(self, generate: Generate, fleet: Sampler, problems: Sequence[Problem], **settings: Any) -> Generate:
        """A function that answers ``problems``, called with their prompts in the same order. ``generate`` samples one turn;
        ``settings`` are keywords of ``Sampler.generate``.
        """

    def submit(self, key: Hashable, problem: Problem, response: str, *, group: Hashable = None, group_size: int = 1) -> None:
        """Requests the reward of a response. ``key`` is unique; a verifier of groups needs ``group`` and ``group_size``."""

    def poll(self, timeout_s: float | None = 0.0) -> list[tuple[Hashable, RewardResult]]:
        """New (key, result) pairs in any order, after at most ``timeout_s`` (None: no limit); empty if none is pending."""

    def score(self, items: Sequence[tuple[Problem, str]], groups: Sequence[Hashable] | None = None) -> list[RewardResult]:
        """The results of (problem, response) pairs in their order, after a :meth:`reset`."""

    def reset(self) -> None:
        """Drops what was submitted and not returned."""

    def rehearse(self, problems: Sequence[Problem]) -> None:
        """Tries the first few problems. Raises ValueError if none of them can be rewarded."""

    def take_figures(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Metrics of a step with these rollouts and of the responses sampled since the last call."""

    def another(self) -> Task:
        """An equal task for another thread."""

    def close(self) -> None:
        """Ends the workers; safe to call twice."""


def turn_figures(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Means over the rollouts; empty if no rollout has environment tokens."""
    if all(rollout.loss_mask is None for rollout in rollouts):
        return {}
    return {
        "environment/turns": float(np.mean([_turns(rollout) for rollout in rollouts])),
        "environment/tokens": float(np.mean([rollout.response_ids.size - rollout.model_tokens for rollout in rollouts])),
    }


def _turns(rollout: Rollout) -> int:
    """Two turns without environment tokens between them count as one."""
    if rollout.loss_mask is None:
        return 1
    return int(np.count_nonzero(np.diff(rollout.loss_mask.astype(np.int8), prepend=0) == 1))
