"""A run's task: prompts become responses, and responses rewards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

import numpy as np

from tepo_megatron.core.problem import Problem
from tepo_megatron.core.rollout import Logprobs, Response, Rollout, TopTokens
from tepo_megatron.sampler.protocol import ResponseStream, Sampler, SampleStream


@dataclass(frozen=True)
class RewardResult:
    """``error``: why it could not be scored. ``parts``: the reward is their weighted sum. ``seconds``: of scoring it, or
    its group for a verifier of groups.
    """

    reward: float | None
    error: str | None = None
    parts: Mapping[str, float] = field(default_factory=dict, repr=False)
    teacher_logprobs: Logprobs | None = field(default=None, repr=False, compare=False)
    teacher_top: TopTokens | None = field(default=None, repr=False, compare=False)
    seconds: float = field(default=0.0, repr=False, compare=False)

    def of(self, rollout: Rollout) -> Rollout:
        judged: dict[str, Any] = {"teacher_logprobs": self.teacher_logprobs, "teacher_top": self.teacher_top}
        return replace(rollout, reward=self.reward, reward_parts=self.parts, **judged)

    def is_correct(self, correct_at: float, component: str | None = None) -> bool:
        """The first of ``component``'s names (``right,ok``) that the reward has decides; without components the reward."""
        value = next((self.parts[name] for name in self._names(component) if name in self.parts), self.reward)
        return self.error is None and value is not None and value >= correct_at

    @classmethod
    def check_component(cls, field: str, name: str | None, components: Collection[str] | None) -> None:
        """``components`` as of a task. Raises ValueError unless one of ``name``'s is among them, or it is None for a number."""
        if components is None:
            return
        names = ", ".join(components)
        if any(item in components for item in cls._names(name)) if names else name is None:
            return
        if not names:
            raise ValueError(f"{field} = {name}, but the verifier returns a number without components; leave {field} out")
        raise ValueError(
            f"{field} = {name or 'null'} names no component of the reward, which has {names}; set {field} to the one that says "
            "whether a response is correct, since their sum does not"
        )

    @staticmethod
    def _names(component: str | None) -> list[str]:
        return [] if component is None else [name.strip() for name in component.split(",")]


Generate = Callable[..., Sequence[Sequence[Response]]]  # Sampler.generate; its numbers determine seeds


class Task(Protocol):
    """One thread of rank 0 uses it. A response is a sample (``VerifierTask``) or an episode (``EnvironmentTask``).
    Implementations inherit it; the defaults are a sample's.
    """

    @property
    def notice(self) -> str | None:
        return None

    @property
    def verifier(self) -> str | None:
        """None: scores only responses of its stream."""
        return None

    components: Sequence[str] | None = None  # of every reward, empty for numbers; None: unknown, or they differ

    def components_of(self, problem: Problem) -> Sequence[str] | None:
        return self.components

    @property
    def scores_groups(self) -> bool: ...

    @property
    def unfinished(self) -> int:
        """Excludes results that ``poll`` has returned."""

    def stream(self, samples: SampleStream, problem_of: Callable[[Any], Problem]) -> ResponseStream:
        """``problem_of`` maps a request's key to its problem."""
        return samples

    def heldout_generate(self, generate: Generate, fleet: Sampler, problems: Sequence[Problem], **settings: Any) -> Generate:
        """Returns a function that answers ``problems``, given their prompts in order. ``settings``: of
        ``Sampler.generate``.
        """
        return generate

    def submit(self, key: Hashable, problem: Problem, response: str, *, group: Hashable = None, group_size: int = 1) -> None:
        """``key`` is unique. A verifier of groups needs ``group`` and ``group_size``."""

    def poll(self, timeout_s: float | None = 0.0) -> list[tuple[Hashable, RewardResult]]:
        """New (key, result) pairs in any order, after at most ``timeout_s`` (None: no limit)."""

    def score(
        self,
        items: Sequence[tuple[Problem, str]],
        groups: Sequence[Hashable] | None = None,
        *,
        on_move: Callable[[], None] = lambda: None,
    ) -> list[RewardResult]:
        """Results in order, after a ``reset``. ``on_move`` is called whenever there are new ones."""
        self.reset()
        names = range(len(items)) if groups is None else groups
        sizes = Counter(names)
        for index, ((problem, response), group) in enumerate(zip(items, names, strict=True)):
            self.submit(index, problem, response, group=group, group_size=sizes[group])
        results: dict[Hashable, RewardResult] = {}
        while len(results) < len(items):
            results.update(self.poll(None))
            on_move()
        return [results[index] for index in range(len(items))]

    def reset(self) -> None: ...

    def rehearse(self, problems: Sequence[Problem]) -> None:
        """Raises ValueError if none of the first few can be rewarded."""

    def take_figures(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Metrics of these rollouts, and of responses since the last call."""
        return self.turn_figures(rollouts)

    @staticmethod
    def turn_figures(rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Means; empty if no rollout has environment tokens. Adjacent turns count as one."""
        masks = [rollout.loss_mask for rollout in rollouts]
        if all(mask is None for mask in masks):
            return {}
        turns = [1 if mask is None else int((np.diff(mask.astype(np.int8), prepend=0) == 1).sum()) for mask in masks]
        return {
            "environment/turns": float(np.mean(turns)),
            "environment/tokens": float(np.mean([rollout.response_ids.size - rollout.model_tokens for rollout in rollouts])),
        }

    def another(self) -> Task:
        """It is for another thread."""

    def close(self) -> None:
        """May be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()
