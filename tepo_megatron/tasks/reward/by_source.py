"""One pool of verifiers for each verifier that the sources of a run's problems name."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from types import TracebackType
from typing import Any

from tepo_megatron.config.data import DataConfig
from tepo_megatron.config.reward import RewardConfig
from tepo_megatron.core.problem import Problem
from tepo_megatron.tasks.reward.pool import RewardPool, RewardResult

_GLANCE_S = 0.02
"""How long one pool is waited for while another may answer first."""


def reward_configs(reward: RewardConfig, data: DataConfig) -> dict[str, RewardConfig]:
    """How each source is scored, by its name: the empty one is ``reward`` itself, for every source that is not here.

    A held-out source is scored as the training source of its name, unless it has a verifier of its own.
    """
    found = {"": reward}
    for source in (*data.train_sources, *data.heldout_sources):
        if source.verifier is not None:
            own = {"verifier": source.verifier, "kwargs": source.verifier_kwargs, "weights": source.verifier_weights}
            found[source.called] = reward.model_copy(update=own)
    return found


def open_verifiers(reward: RewardConfig, data: DataConfig, given: Any = None) -> Pool:
    """The verifiers of a run, ready when it returns: one pool, or one for each verifier that sources name. ``given``: the
    verifier itself in the place of ``reward.verifier``, which then is no name.

    Raises ValueError and RuntimeError as ``RewardPool``.
    """
    configs = reward_configs(reward, data)
    return RewardPool(reward, given=given) if len(configs) == 1 else PoolBySource(configs, given=given)


class PoolBySource:
    """Has each response scored by the verifier of its problem's source. Its methods are ``RewardPool``'s, and do the same.

    ``configs``: as :func:`reward_configs` gives them. ``reward.workers`` processes run for each verifier.
    """

    def __init__(
        self, configs: Mapping[str, RewardConfig], components: Sequence[Sequence[str] | None] = (), given: Any = None
    ) -> None:
        distinct: list[RewardConfig] = []
        for config in configs.values():
            if config not in distinct:
                distinct.append(config)
        self._configs, self._given = dict(configs), given
        self._pools: list[RewardPool] = []
        try:
            for config, known in zip(distinct, [*components, *[None] * len(distinct)], strict=False):
                self._pools.append(RewardPool(config, known, None if self._pools else given))
        except BaseException:
            self.close()
            raise
        self._of = {source: self._pools[distinct.index(config)] for source, config in configs.items()}

    @property
    def notice(self) -> str | None:
        return next((pool.notice for pool in self._pools if pool.notice is not None), None)

    @property
    def scores_groups(self) -> bool:
        """Whether a verifier among them is one of groups: then all wait for whole groups."""
        return any(pool.scores_groups for pool in self._pools)

    @property
    def unfinished(self) -> int:
        return sum(pool.unfinished for pool in self._pools)

    def another(self) -> PoolBySource:
        """A second one, with the components that this one has found."""
        return PoolBySource(self._configs, [pool.components for pool in self._pools], self._given)

    def submit(self, key: Hashable, problem: Problem, response: str, *, group: Hashable = None, group_size: int = 1) -> None:
        self._pool_of(problem).submit(key, problem, response, group=group, group_size=group_size)

    def poll(self, timeout_s: float | None = 0.0) -> list[tuple[Hashable, RewardResult]]:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            busy = [pool for pool in self._pools if pool.under_way]
            found = [each for pool in busy for each in pool.poll(0.0)]
            left = None if deadline is None else deadline - time.monotonic()
            if found or not busy or (left is not None and left <= 0):
                return found
            for pool in busy:
                found += pool.poll((_GLANCE_S if left is None else min(_GLANCE_S, left)) if not found else 0.0)
            if found:
                return found

    def reset(self) -> None:
        for pool in self._pools:
            pool.reset()

    def score(self, items: Sequence[tuple[Problem, str]], groups: Sequence[Hashable] | None = None) -> list[RewardResult]:
        self.reset()
        named = list(range(len(items))) if groups is None else groups
        sizes = Counter(named)
        for index, ((problem, response), group) in enumerate(zip(items, named, strict=True)):
            self.submit(index, problem, response, group=group, group_size=sizes[group])
        results: dict[Hashable, RewardResult] = {}
        while len(results) < len(items):
            results.update(self.poll(None))
        return [results[index] for index in range(len(items))]

    def rehearse(self, problems: Sequence[Problem]) -> None:
        """Each verifier scores answers of its own problems. Raises ValueError as ``RewardPool.rehearse``."""
        for pool in self._pools:
            pool.rehearse([problem for problem in problems if self._pool_of(problem) is pool])

    def close(self) -> None:
        for pool in self._pools:
            pool.close()

    def __enter__(self) -> PoolBySource:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def _pool_of(self, problem: Problem) -> RewardPool:
        return self._of.get(problem.source, self._of[""])


Pool = RewardPool | PoolBySource
"""The verifiers of a run."""
