from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from typing import Any

from tepo_megatron.config.data import DataConfig
from tepo_megatron.config.reward import RewardConfig
from tepo_megatron.core.problem import Problem
from tepo_megatron.tasks.protocol import RewardResult, Task
from tepo_megatron.tasks.reward.pool import RewardPool

_FAST_POLL_S = 0.005


class VerifierTask(Task):
    def __init__(
        self, reward: RewardConfig, data: DataConfig, components: Sequence[Sequence[str] | None] = (), custom: Any = None
    ) -> None:
        """``components`` has an entry per distinct verifier. ``custom`` replaces the first one."""
        configs = self.configs(reward, data)
        distinct: list[RewardConfig] = []
        for config in configs.values():
            if config not in distinct:
                distinct.append(config)
        self._reward, self._data, self._custom = reward, data, custom
        self._pools: list[RewardPool] = []
        try:
            for config, known in zip(distinct, [*components, *[None] * len(distinct)], strict=False):
                self._pools.append(RewardPool(config, known, None if self._pools else custom))
        except BaseException:
            self.close()
            raise
        self._pool_by_source = {source: self._pools[distinct.index(config)] for source, config in configs.items()}

    @staticmethod
    def configs(reward: RewardConfig, data: DataConfig) -> dict[str, RewardConfig]:
        """Source name → how it is scored (empty: any other). A held-out source defaults to the training source of its name."""
        configs = {"": reward}
        for source in (*data.train_sources, *data.heldout_sources):
            if source.verifier is not None:
                configs[source.called] = reward.model_copy(update=source.scoring)
        return configs

    @property
    def notice(self) -> str | None:
        return next((pool.notice for pool in self._pools if pool.notice is not None), None)

    @property
    def verifier(self) -> str | None:
        return self._reward.verifier

    def components_of(self, problem: Problem) -> Sequence[str] | None:
        return self._pool_of(problem).components

    @property
    def scores_groups(self) -> bool:
        """If one of several verifiers scores groups, all wait."""
        return any(pool.scores_groups for pool in self._pools)

    @property
    def unfinished(self) -> int:
        return sum(pool.unfinished for pool in self._pools)

    def another(self) -> VerifierTask:
        return VerifierTask(self._reward, self._data, [pool.components for pool in self._pools], self._custom)

    def submit(self, key: Hashable, problem: Problem, response: str, *, group: Hashable = None, group_size: int = 1) -> None:
        self._pool_of(problem).submit(key, problem, response, group=group, group_size=group_size)

    def poll(self, timeout_s: float | None = 0.0) -> list[tuple[Hashable, RewardResult]]:
        if len(self._pools) == 1:
            return self._pools[0].poll(timeout_s)
        deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while True:
            busy = [pool for pool in self._pools if pool.under_way]
            results = [result for pool in busy for result in pool.poll(0.0)]
            left = deadline - time.monotonic()
            if results or not busy or left <= 0:
                return results
            time.sleep(min(_FAST_POLL_S, left))

    def reset(self) -> None:
        for pool in self._pools:
            pool.reset()

    def rehearse(self, problems: Sequence[Problem]) -> None:
        for pool in self._pools:
            pool.rehearse([problem for problem in problems if self._pool_of(problem) is pool])

    def close(self) -> None:
        for pool in self._pools:
            pool.close()

    def _pool_of(self, problem: Problem) -> RewardPool:
        return self._pool_by_source.get(problem.source, self._pool_by_source[""])
