"""Signs of an unstable run: skipped optimizer steps, a metric that calls for a return to a checkpoint, bounds below noise."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from tepo_megatron.config import ObjectiveConfig
from tepo_megatron.config.train import RollbackConfig
from tepo_megatron.core.rollout import Rollout
from tepo_megatron.run.step.minibatches import members
from tepo_megatron.sampler.rollout_file import write_rollouts

if TYPE_CHECKING:
    from tepo_megatron.trainer.protocol import UpdateResult


class SkippedUpdates:
    """Every rank has one, and calls :meth:`check` after the updates of each step.

    ``allowed``: how many optimizer steps in a row may be skipped. ``keep`` is rank 0's way to save the step's batch; it is
    called where something was skipped, with the step's number and what :func:`describe` gives, and returns the file.
    ``from_root`` gives rank 0's value to every rank.
    """

    def __init__(
        self,
        allowed: int,
        keep: Callable[[int, Sequence[Mapping[str, Any]]], Path | None],
        from_root: Callable[[str], str],
    ) -> None:
        self._allowed, self._keep, self._from_root = allowed, keep, from_root
        self._in_a_row = 0
        self._first = ""
        """The first cause of those in a row, with its step."""

    def check(self, step: int, updates: Sequence[UpdateResult], described: Callable[[], Sequence[Mapping[str, Any]]]) -> None:
        """Raises RuntimeError, on every rank, where more optimizer steps in a row were skipped than are allowed.

        The batch is on disk by then.
        """
        too_many = False
        for number, update in enumerate(updates):
            self._in_a_row = self._in_a_row + 1 if update.skipped else 0
            if self._in_a_row == 1:
                self._first = f"in step {step + 1}, mini-batch {number + 1} of {len(updates)}: {update.skipped}"
            too_many = too_many or self._in_a_row > self._allowed
        if not any(update.skipped for update in updates):
            return
        # The ranks go on, or fail, together: one that failed at once would have rank 0 ended while it writes.
        kept = self._from_root(str(self._keep(step, described())))
        if too_many:
            raise RuntimeError(
                f"{self._in_a_row_text()} since a number was not finite; the first {self._first}. The weights are as they were "
                f"before it, and the rollouts lie in {Path(kept).parent}. Look there, lower optimizer.lr, or raise "
                "train.max_skipped"
            )

    def _in_a_row_text(self) -> str:
        if self._allowed == 0:
            return "an optimizer step was skipped (train.max_skipped = 0)"
        return f"{self._allowed + 1} optimizer steps in a row were skipped (train.max_skipped = {self._allowed})"


def describe(updates: Sequence[UpdateResult], sequences: int | Sequence[int], *, seed: int, step: int) -> list[dict[str, Any]]:
    """The skipped mini-batches of a step's ``sequences``, or of so many: ``minibatch`` (from 0), ``rollouts`` (which of the
    step's, in the mini-batch's order; the numbers of sequences in the causes count in it), ``cause``, ``loss``, ``grad_norm``,
    and ``ranks``, what each found.
    """
    order = members(sequences, len(updates), seed=seed, step=step)
    return [
        {
            "minibatch": number,
            "cause": update.skipped,
            "loss": update.loss,
            "grad_norm": update.grad_norm,
            "ranks": list(update.not_finite),
            "rollouts": order[number],
        }
        for number, update in enumerate(updates)
        if update.skipped
    ]


def write_skipped(folder: Path, step: int, rollouts: Sequence[Rollout], skipped: Sequence[Mapping[str, Any]]) -> Path:
    """Writes the step's rollouts in the record's format, which ``rollout.replay`` reads, and beside them what was not finite,
    as JSON; returns the latter. Raises OSError if the folder cannot be written.
    """
    path = write_rollouts(folder, step, rollouts).with_suffix(".json")
    path.write_text(json.dumps({"step": step, "skipped": list(skipped)}, indent=2) + "\n", encoding="utf-8")
    return path


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


_QUANTILE = "p99"


def below_the_noise(objective: ObjectiveConfig, row: Mapping[str, float]) -> list[str]:
    """One sentence for each bound below the noise in a row of metrics; none if the row measured none."""
    return list(_warnings(objective, row))


def _warnings(objective: ObjectiveConfig, row: Mapping[str, float]) -> Iterator[str]:
    for name, section in objective.sections.items():
        for bound in section.noise_bounds:
            metric = f"{objective.ratio.noise if bound.noise == 'ratio' else bound.noise}/noise/{_QUANTILE}"
            noise = row.get(metric, 0.0)
            if bound.value < noise:
                unit, values = ("", "ratios") if bound.noise == "ratio" else (" nats", "entropies")
                yield (
                    f"objective.{name}.{bound.field} = {bound.value:g}{unit} is below the rounding noise of {values} here "
                    f"({metric} = {noise:.2g}): {bound.consequence}"
                )
