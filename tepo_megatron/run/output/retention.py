"""Which checkpoints of a run are kept. Rank 0 only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tepo_megatron.config import RunConfig
from tepo_megatron.run.metrics.metrics import read_metrics
from tepo_megatron.trainer.checkpoints.folder import checkpoints, leftovers, remove, retained, step_of


class Retention:
    """Deletes what ``train.keep_checkpoints``, ``keep_every`` and ``keep_best`` do not keep.

    It acts after a row, when there is a new checkpoint whose row is written too, since the metric is known only then. ``say``
    gets a sentence for each thing that could not be removed, which does not end the run.
    """

    def __init__(self, config: RunConfig, say: Callable[[str], None]) -> None:
        self._train = config.train
        self._folder = config.output / "checkpoints"
        self._metrics = config.output / "metrics.jsonl"
        self._say = say
        self._said_missing = False
        self._seen = self._newest()

    def after_row(self, step: int) -> None:
        """Call when the row of ``step`` has been written. A checkpoint may be on its way then (``train.async_save``)."""
        present = {step_of(path): path for path in checkpoints(self._folder)}
        newest = self._newest()
        if newest > step or newest == self._seen:
            return
        self._seen = newest
        kept = retained(
            present, newest=self._train.keep_checkpoints, every=self._train.keep_every, best=self._best(set(present))
        )
        # one of a later step may be the one that is on its way
        unfinished = [path for path in leftovers(self._folder) if ".partial" in path.name and _step(path) <= newest]
        for folder in [*unfinished, *(path for at, path in present.items() if at not in kept)]:
            self._remove(folder)

    def _newest(self) -> int:
        return max(map(step_of, checkpoints(self._folder)), default=0)

    def _remove(self, folder: Path) -> None:
        failed = remove(folder)
        if failed is not None:
            self._say(failed)

    def _best(self, steps: set[int]) -> int | None:
        """The step of the best checkpoint by its row of metrics, so that a resumed run knows it too."""
        best = self._train.keep_best
        if best is None:
            return None
        values: dict[int, Any] = {row["step"]: row.get(best.metric) for row in read_metrics(self._metrics)}
        measured = {step: values[step] for step in steps if isinstance(values.get(step), int | float)}
        if not measured and not self._said_missing:
            self._said_missing = True
            self._say(f"train.keep_best.metric = {best.metric} is in no row of a step that was saved: none is kept as the best")
        sign = 1 if best.mode == "max" else -1
        return max(measured, key=lambda step: (sign * measured[step], step), default=None)


def _step(leftover: Path) -> int:
    return int(leftover.name.partition(".")[0].removeprefix("step_"))
