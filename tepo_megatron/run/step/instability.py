"""Skipped optimizer steps, rollback by a metric, bounds below noise, clips that take too much."""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from tepo_megatron.config import ObjectiveConfig, RunConfig, TrainConfig
from tepo_megatron.config.objective.choices import CLIPPED_SHARE, COMPARE_REWARDS, Clip
from tepo_megatron.core.types import Batch, bound_for_share
from tepo_megatron.run.step.minibatches import members
from tepo_megatron.trainer.protocol import UpdateResult


class TooManySkippedError(RuntimeError):
    pass


class SkippedUpdates:
    """Every rank has one. ``keep`` is rank 0's: it saves the batch and returns the file."""

    def __init__(
        self, config: RunConfig, keep: Callable[[int, Sequence[dict[str, Any]]], Path] | None, from_root: Callable[[str], str]
    ) -> None:
        self._seed, self._train = config.seed, config.train
        self._keep, self._from_root = keep, from_root
        self._in_a_row = 0
        self._first = ""  # step and cause of the first consecutive one

    def check(self, step: int, batch: Batch, updates: Sequence[UpdateResult]) -> None:
        """Raises TooManySkippedError on every rank after too many consecutive skipped steps."""
        too_many, allowed = False, self._train.max_skipped
        for number, update in enumerate(updates):
            self._in_a_row = self._in_a_row + 1 if update.skipped else 0
            if self._in_a_row == 1:
                self._first = f"in step {step + 1}, update {number + 1} of {len(updates)}: {update.skipped}"
            too_many = too_many or self._in_a_row > allowed
        if not any(update.skipped for update in updates):
            return
        order = members(batch.trained_sequences, self._train.minibatches, seed=self._seed, step=step)
        skipped = [
            {
                "minibatch": number % len(order),
                "cause": update.skipped,
                "loss": update.loss,
                "grad_norm": update.grad_norm,
                "ranks": list(update.not_finite),
                "rollouts": order[number % len(order)],  # indices in the step
            }
            for number, update in enumerate(updates)
            if update.skipped
        ]
        # All ranks fail together: one that failed at once would end rank 0 while it writes.
        path = self._from_root("" if self._keep is None else str(self._keep(step, skipped)))
        if too_many:
            several = f"{allowed + 1} optimizer steps in a row were skipped"
            what = several if allowed else "an optimizer step was skipped"
            raise TooManySkippedError(
                f"{what} (train.max_skipped = {allowed}) since a number was not finite; the first {self._first}. The "
                f"weights are as they were before it, and the rollouts are in {Path(path).parent}. Look there, lower "
                "optimizer.lr, or raise train.max_skipped"
            )


class Rollback:
    """Factors are of the median of up to ``WINDOW`` values, from ``LEAST`` values on."""

    WINDOW, LEAST = 20, 5

    def __init__(self, config: TrainConfig) -> None:
        self._config = config.rollback
        self._seen: deque[float] = deque(maxlen=self.WINDOW)
        self.times = 0

    def state(self) -> dict[str, Any]:
        metric = None if self._config is None else self._config.metric
        return {"metric": metric, "seen": list(self._seen), "times": self.times}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Leaves values of another metric out."""
        if self._config is not None and state.get("metric") == self._config.metric:
            self._seen.extend(filter(math.isfinite, state.get("seen", ())))
        self.times = state.get("times", 0)

    def reason(self, row: Mapping[str, float]) -> str:
        """Empty if the run continues. Raises ValueError if the row lacks the metric."""
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
        bound, text = config.above, f"train.rollback.above = {config.above or 0:g}"
        if config.factor is not None:
            usual = median(self._seen) if len(self._seen) >= self.LEAST else math.inf
            if value == math.inf:
                return f"{config.metric} is infinite (train.rollback.factor)"
            bound = config.factor * usual if usual > 0 else math.inf
            text = f"{config.factor:g} times its median of {usual:.4g} (train.rollback.factor)"
        if bound is not None and value > bound:
            return f"{config.metric} is {value:.4g}, above {text}"
        if math.isfinite(value):
            self._seen.append(value)
        return ""

    def count(self, reason: str) -> None:
        """Raises RuntimeError beyond ``train.rollback.max_times``."""
        assert self._config is not None
        if self.times >= self._config.max_times:
            raise RuntimeError(
                f"{reason}, after {self.times} returns to a checkpoint (train.rollback.max_times); the run does not get past "
                "it. Look at the rollouts of the last steps, or resume from an older checkpoint with a lower optimizer.lr and "
                "a higher train.rollback.max_times"
            )
        self.times += 1


class ObjectiveWatch:
    """Reports once each: bounds below the rounding noise; a clip that takes too many gradients or cannot act."""

    STEPS, MOST, SHARE = 5, 0.25, 0.1

    def __init__(self, objective: ObjectiveConfig) -> None:
        self._objective = objective
        self._rows: deque[Mapping[str, float]] = deque(maxlen=self.STEPS)
        self._has_warned_of_noise = self._has_warned_of_clip = False
        self._equal_steps, self._has_warned_of_equal = 0, False

    def noise(self, row: Mapping[str, float]) -> list[str]:
        sentences = [] if self._has_warned_of_noise else list(self._below_the_noise(row))
        self._has_warned_of_noise = self._has_warned_of_noise or bool(sentences)
        return sentences

    def equal_rewards(self, row: Mapping[str, float]) -> str:
        objective = self._objective
        compares = objective.advantage.kind in COMPARE_REWARDS and getattr(objective.advantage, "overlong", None) is None
        is_equal = compares and objective.distill is None and row["groups/zero_variance"] == 1
        self._equal_steps = self._equal_steps + 1 if is_equal else 0
        if self._has_warned_of_equal or self._equal_steps < self.STEPS:
            return ""
        self._has_warned_of_equal = True
        return (
            f"every group of the last {self.STEPS} steps had equal rewards: nothing is learnt from them; see 'The reward is "
            "flat' in docs/reference/metrics.md"
        )

    def clip(self, row: Mapping[str, float], updates: Sequence[UpdateResult]) -> str:
        region, moves = self._objective.trust_region, [update.moves for update in updates if update.moves is not None]
        if self._has_warned_of_clip or not isinstance(region, Clip) or not moves:
            return ""
        self._rows.append(row)
        sentence = self._clip_sentence(region, torch.stack(moves).sum(0)) if len(self._rows) == self.STEPS else ""
        self._has_warned_of_clip = bool(sentence)
        return sentence

    def _below_the_noise(self, row: Mapping[str, float]) -> Iterator[str]:
        ratio = self._objective.ratio
        # A product of tokens' ratios, which has no figure, has the noise of a token's ratio or more.
        of_ratio = ratio.noise if getattr(ratio, "length_normalized", True) else "ratio"
        for name, section in self._objective.sections.items():
            for bound in section.noise_bounds:
                measured = {"ratio": of_ratio, "token_ratio": "ratio"}.get(bound.noise, bound.noise)
                metric = f"{measured}/noise/p99"
                noise = row.get(metric, 0.0)
                if bound.value < noise:
                    unit, values = (" nats", "entropies") if bound.noise == "entropy" else ("", "ratios")
                    yield (
                        f"objective.{name}.{bound.field} = {bound.value:g}{unit} is below the rounding noise of {values} here "
                        f"({metric} = {noise:.2g}): {bound.consequence}"
                    )

    def _clip_sentence(self, region: Clip, moves: Tensor) -> str:
        shares = [row["clip/share"] for row in self._rows]
        if not any(row["ratio/sigma"] for row in self._rows):
            if not region.is_auto:
                return ""
            return (
                f"objective.trust_region: every ratio of the last {self.STEPS} steps was 1, so that auto bounds stay at their "
                "initial value; set a higher optimizer.lr, or numbers"
            )
        most = max(self.MOST, 2.5 * (region.share or CLIPPED_SHARE)) if region.is_auto else self.MOST
        if min(shares) > most:
            effect = f"more than {most:.0%} of the tokens with an advantage have lost their gradient to the clip"
        elif region.scale == "length" and not any(shares):
            effect = "no response has reached the clip range"
        else:
            return ""
        sides = zip(("low", "high"), (region.low, region.high), moves, strict=True)
        bounds = {name: bound_for_share(counts, self.SHARE) for name, bound, counts in sides if bound != "auto"}
        fitting = " ".join(f"objective.trust_region.{name}={bound:.2g}" for name, bound in bounds.items() if bound)
        tenth = "a tenth of its side" if region.is_auto else "a tenth"
        remedy = f"{fitting} would clip {tenth}" if fitting else "look at objective.trust_region"
        if not bounds and any(shares):
            remedy = "auto bounds do not follow; set a lower optimizer.lr"
        return f"{effect} in each of the last {self.STEPS} steps, with low = {region.low}, high = {region.high}; {remedy}"
