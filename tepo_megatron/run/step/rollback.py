"""Notices a step after which a run had better go back: a metric above a bound, or far above what it was."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median

from tepo_megatron.config.train import RollbackConfig

WINDOW = 20
"""Steps whose median a factor is of."""

LEAST = 5
"""Steps that there must be for a median."""


class Rollback:
    """Every rank has one, and decides alike: the rows are the same on all."""

    def __init__(self, config: RollbackConfig | None) -> None:
        self._config = config
        self._seen: deque[float] = deque(maxlen=WINDOW)
        self.times = 0
        """How often the run has gone back."""

    def reason(self, row: Mapping[str, float]) -> str:
        """Why the run should go back behind the step with this row; empty where it should not.

        Raises ValueError where a row that is whole has no such metric.
        """
        config = self._config
        if config is None:
            return ""
        value = row.get(config.metric)
        if value is None and not row.get("update/skipped"):
            raise ValueError(
                f"train.rollback.metric = {config.metric} is no column of a step; there are {', '.join(sorted(row))}"
            )
        if value is None or value != value:  # all of the step was skipped
            return ""
        bound, text = self._bound(config)
        if bound is not None and value > bound:
            return f"{config.metric} is {value:.4g}, above {text}"
        self._seen.append(value)
        return ""

    def _bound(self, config: RollbackConfig) -> tuple[float | None, str]:
        if config.above is not None:
            return config.above, f"train.rollback.above = {config.above:g}"
        assert config.factor is not None
        if len(self._seen) < LEAST:
            return None, ""
        usual = median(self._seen)
        return config.factor * usual, f"{config.factor:g} times its median of {usual:.4g} (train.rollback.factor)"

    def count(self, reason: str) -> None:
        """Counts a return. Raises RuntimeError where there were as many as are allowed."""
        assert self._config is not None
        if self.times == self._config.max_times:
            raise RuntimeError(
                f"{reason}, after {self.times} returns to a checkpoint (train.rollback.max_times); the run does not get past "
                "it. Resume from an older checkpoint with a lower optimizer.lr, or look at the rollouts of the last steps"
            )
        self.times += 1
