"""What a run has left, for a program or a notebook."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tepo_megatron.config import RunConfig
from tepo_megatron.run.metrics.metrics import read_metrics


@dataclass(frozen=True)
class TrainResult:
    """A run that ended well. Everything is also in its folder, ``output``.

    ``rows``: the rows of metrics, one a step, the oldest first, step 0 being the evaluation before the first. ``model``: the
    trained model as a Hugging Face folder. ``config``: as it was run.
    """

    output: Path
    model: Path
    config: RunConfig = field(repr=False)
    rows: Sequence[Mapping[str, Any]] = field(repr=False)

    @property
    def step(self) -> int:
        """Completed steps; fewer than ``train.steps`` where a callback ended the run."""
        return int(self.rows[-1]["step"])

    def column(self, name: str) -> tuple[list[int], list[float]]:
        """The steps that have a metric, and its values there: two lists to plot.

        Raises KeyError, with names that are near, where no row has it.
        """
        found = [(row["step"], row[name]) for row in self.rows if row.get(name) is not None]
        if not found:
            raise KeyError(f"no row has {name!r}; there are {', '.join(sorted({key for row in self.rows for key in row}))}")
        return [step for step, _ in found], [value for _, value in found]

    def best(self, name: str = "accuracy/greedy", choose: Callable[..., Any] = max) -> Mapping[str, Any]:
        """The row with the largest value of a metric (``choose=min``: the smallest), the first of them. KeyError as above."""
        self.column(name)
        row: Mapping[str, Any] = choose((row for row in self.rows if row.get(name) is not None), key=lambda row: row[name])
        return row


def read_result(config: RunConfig) -> TrainResult:
    """What the run of ``config`` has left in its folder."""
    output = config.output
    return TrainResult(output, output / "model", config, read_metrics(output / "metrics.jsonl"))
