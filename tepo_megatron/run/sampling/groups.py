"""The groups of a run: prompts as they were drawn, what there is of their responses, and which of them make a batch.

Nothing here talks to servers, verifiers or disks. A group is drawn once and has its number for ever; it ends in a batch, with
a filter, or is carried over to the next batch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tepo_megatron.config import RolloutConfig
from tepo_megatron.core.problem import Problem
from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.run.sampling.filters import NO_REWARD, GroupFilter, refused_by
from tepo_megatron.tasks.protocol import RewardResult

UNFINISHED = "abort"
"""The ``finish_reason`` of a part of a response, which can be gone on with."""


@dataclass(eq=False)
class Group:
    """A prompt that was drawn, and its ``len(samples)`` responses as far as there are any.

    ``number`` counts all prompts that the run has drawn. ``step`` and ``place`` (among the prompts that this step drew) decide
    the seed, ``version`` the weights of the first tokens. ``samples``: None before there is a token. ``asked``: the samples
    that a verifier has got; ``results``: its answers, which the rollouts have as their ``reward``.
    """

    number: int
    step: int
    place: int
    problem: Problem
    prompt_ids: tuple[int, ...]
    version: WeightsVersion | None
    samples: list[Rollout | None]
    asked: set[int] = field(default_factory=set)
    results: dict[int, RewardResult] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether every response is finished and scored."""
        return len(self.results) == len(self.samples)

    def finished(self, sample: int) -> bool:
        """Whether the response has its last token."""
        rollout = self.samples[sample]
        return rollout is not None and rollout.finish_reason != UNFINISHED

    def rollouts(self) -> list[Rollout]:
        """Of a complete group."""
        assert self.complete
        return [rollout for rollout in self.samples if rollout is not None]

    def score(self, sample: int, result: RewardResult) -> None:
        """Notes a verifier's answer."""
        rollout = self.samples[sample]
        assert rollout is not None
        self.samples[sample] = replace(rollout, reward=result.reward, reward_parts=result.parts)
        self.results[sample] = result


class NeverFilled(RuntimeError):  # noqa: N818
    """Filters left too few groups of all that a step may draw; the message shows their rewards."""


class StepGroups:
    """The groups of one step: which are still to be drawn, which are kept, and when there are enough.

    ``carried`` come first, in the order of their numbers. Without ``partial`` the batch is the first ``prompts_per_step`` kept
    groups in the order of their numbers, once every group that was begun is decided, so that it does not depend on what
    finishes first; with it, the first that were complete.
    """

    def __init__(self, step: int, config: RolloutConfig, filters: Mapping[str, GroupFilter], carried: Sequence[Group]) -> None:
        self.step = step
        self._config, self._filters = config, filters
        self._wanted = config.prompts_per_step
        self.begun_with = list(carried)
        """What is carried and what was drawn before anything was sampled: it decides all the rest."""
        self.drawn = 0
        self.carried_in = len(carried)
        self.open: dict[int, Group] = {group.number: group for group in carried}
        """Groups that are not decided, by their numbers."""
        self.kept: list[Group] = []
        """In the order in which they were decided."""
        self.filtered: list[Group] = []
        self.causes: Counter[str] = Counter()
        self._rewards: Counter[float] = Counter()
        for group in carried:
            if group.complete:
                self.decide(group)

    @property
    def missing(self) -> int:
        """How many prompts are to be drawn now."""
        alive = len(self.kept) + len(self.open)
        if self._config.partial:
            short = 0 if self.full else _times(self._config.oversample, self._wanted) - alive
        else:
            short = _times(self._config.oversample, max(self._wanted - alive, 0))
        filters = self._config.filter_groups
        return max(0, short if filters is None else min(short, filters.max_batches * self._wanted - self.drawn))

    @property
    def full(self) -> bool:
        return len(self.kept) >= self._wanted

    @property
    def done(self) -> bool:
        """Whether the batch can be taken. Raises NeverFilled where it never can."""
        if self.full:
            return self._config.partial or not self.open
        if not self.open and not self.missing:
            raise NeverFilled(self._why_not())
        return False

    def add(self, group: Group) -> None:
        """A group was drawn."""
        self.open[group.number] = group
        self.drawn += 1

    def decide(self, group: Group) -> bool:
        """Keeps or refuses a complete group; whether it is kept."""
        del self.open[group.number]
        rollouts = group.rollouts()
        self._rewards.update(rollout.reward for rollout in rollouts if rollout.reward is not None)
        # Without filters a group without rewards leaves the step as it does in every run (``StepRewards.leave_out``).
        cause = refused_by(self._filters, rollouts) if self._filters else None
        if cause is None:
            self.kept.append(group)
        else:
            self.filtered.append(group)
            self.causes[cause] += 1
        return cause is None

    def take(self) -> tuple[list[Group], list[Group]]:
        """The groups of the batch, and those that are carried over to the next one; both in the order of their numbers."""
        order: Callable[[Group], int] = lambda group: group.number  # noqa: E731
        kept = self.kept if self._config.partial else sorted(self.kept, key=order)
        carried = [*kept[self._wanted :], *self.open.values()]
        return sorted(kept[: self._wanted], key=order), sorted(carried, key=order)

    def figures(self) -> dict[str, float]:
        """For the step's row: carried_in + drawn = kept + filtered + carried."""
        batch, carried = self.take()
        row = {
            "groups/carried_in": self.carried_in,
            "groups/drawn": self.drawn,
            "groups/kept": len(batch),
            "groups/filtered": len(self.filtered),
            "groups/carried": len(carried),
        }
        row |= {f"groups/filtered/{name}": self.causes[name] for name in (*self._filters, NO_REWARD) if self._filters}
        return {name: float(count) for name, count in row.items()}

    def _why_not(self) -> str:
        filters = self._config.filter_groups
        most = 1 if filters is None else filters.max_batches
        causes = ", ".join(f"{cause} {count}" for cause, count in self.causes.most_common())
        return (
            f"step {self.step} drew {self.drawn} prompts, rollout.filter_groups.max_batches = {most} times prompts_per_step, "
            f"and {len(self.kept)} of the {self._wanted} groups that it needs passed the filters; refused by {causes}. Rewards "
            f"of their responses: {histogram(self._rewards)}. If nearly all are equal, the problems are too hard or too easy "
            "for the model, or the verifier does not understand its answers (samples.jsonl shows some); else raise "
            "max_batches, or take the filter out"
        )


def histogram(counts: Mapping[float, int], bins: int = 10) -> str:
    """Values with how often each occurs, such as ``0 × 4980, 1 × 140``; in ranges where there are more than ``bins``."""
    if not counts:
        return "none"
    if len(counts) <= bins:
        return ", ".join(f"{value:g} × {counts[value]}" for value in sorted(counts))
    low, high = min(counts), max(counts)
    width = (high - low) / bins
    totals = [0] * bins
    for value, count in counts.items():
        totals[min(int((value - low) / width), bins - 1)] += count
    edges = [low + width * at for at in range(bins + 1)]
    return ", ".join(f"{edges[at]:.3g} to {edges[at + 1]:.3g} × {total}" for at, total in enumerate(totals) if total)


def _times(factor: float, count: int) -> int:
    """``count`` times a factor, rounded up; 1.1 × 10 is 11."""
    return math.ceil(round(factor * count, 6))
