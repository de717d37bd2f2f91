"""The callback that ends a run when a metric no longer gets better."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from tepo_megatron.run.callbacks.stop import RunInfo, Stop


class EarlyStopping:
    """Ends the run once ``metric`` has not been better than its best by more than ``min_delta`` for ``patience`` rows that have
    it. ``mode``: whether better is larger or smaller.

    ``accuracy/greedy`` is in the rows of evaluations alone, so that patience counts evaluations. A resumed run goes on
    counting, from its rows.
    """

    def __init__(
        self,
        metric: str = "accuracy/greedy",
        patience: int = 5,
        mode: Literal["max", "min"] = "max",
        min_delta: float = 0.0,
    ) -> None:
        """Raises ValueError for a patience below 1, another mode, or a negative ``min_delta``."""
        if patience < 1 or mode not in ("max", "min") or not 0 <= min_delta < math.inf:
            raise ValueError(
                f"patience = {patience} must be 1 or more, mode = {mode!r} max or min, min_delta = {min_delta:g} 0 or more"
            )
        self.metric, self.patience, self.mode, self.min_delta = metric, patience, mode, min_delta
        self._begin()

    def _begin(self) -> None:
        self.best, self.best_step, self.waited = -math.inf, 0, 0

    def on_run_begin(self, run: RunInfo) -> None:
        """Raises ValueError where the run never evaluates, and the metric is one of evaluations."""
        if self.metric.startswith(("accuracy/", "heldout/")) and not run.config.evaluate.every:
            raise ValueError(
                f"early stopping looks at {self.metric}, and this run never evaluates; set evaluate.every, or name "
                "another metric"
            )
        self._begin()
        for row in run.rows:
            self._see(row)

    def on_step_end(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Raises Stop when patience is over."""
        if self._see({"step": step, **metrics}) and self.waited >= self.patience:
            best = self.best if self.mode == "max" else -self.best
            raise Stop(f"{self.metric} was {best:.4g} at step {self.best_step}, and not better since")

    def _see(self, row: Mapping[str, Any]) -> bool:
        """Whether the row has the metric."""
        value = row.get(self.metric)
        if value is None or math.isnan(value):
            return False
        value = value if self.mode == "max" else -value
        if value > self.best + self.min_delta:
            self.best, self.best_step, self.waited = value, row["step"], 0
        else:
            self.waited += 1
        return True
