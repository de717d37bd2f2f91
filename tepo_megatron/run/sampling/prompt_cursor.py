"""Which prompts a run has drawn, and what it carries from one batch to the next; survives a step that is repeated, given up,
undone, or interrupted together with its process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tepo_megatron.core.problem import Problem
from tepo_megatron.core.rollout import WeightsVersion
from tepo_megatron.run.sampling.groups import Group, StepGroups
from tepo_megatron.tasks.data.mixture import Sampler


@dataclass
class Draws:
    """Draws prompts in the sampler's order, each once in a pass over the problems.

    ``samples``: responses of a group; ``encode`` makes prompt ids of a problem; ``begin_step`` makes the groups of a step with
    what is carried over to it. State is JSON values.
    """

    sampler: Sampler
    samples: int
    encode: Callable[[Problem], tuple[int, ...]]
    begin_step: Callable[[int, Sequence[Group]], StepGroups]
    carried: list[Group] = field(default_factory=list)
    _step: StepGroups | None = None
    _before: tuple[int, dict[str, Any], list[Group]] | None = None
    """The step that was begun last, with state and carried groups before it."""

    def begin(self, step: int, version: WeightsVersion | None) -> StepGroups:
        """The groups of a step, with those drawn that it needs at first; the same, as far as they are, if called again for it.
        ``version``: the weights that begin what is drawn.
        """
        if self._step is None or self._step.step != step:
            self.drop(step)  # it was ended before, and is asked for again
            self._before = (step, self.state(), list(self.carried))
            self._step = self.begin_step(step, self.carried)
            self._step.begun_with += self.draw(self._step, version)
        return self._step

    def draw(self, groups: StepGroups, version: WeightsVersion | None) -> list[Group]:
        """Draws what the step misses."""
        drawn = []
        for _ in range(groups.missing):
            number = self.sampler.drawn
            (problem,) = self.sampler.next(1)
            drawn.append(self._group(number, groups.step, groups.drawn, problem, version))
            groups.add(drawn[-1])
        return drawn

    def end(self, groups: StepGroups) -> list[Group]:
        """The batch of a step that is done; the rest is carried over."""
        batch, self.carried = groups.take()
        self._step = None
        return batch

    def drop(self, step: int) -> None:
        """A step is given up, if it was the last to begin: its prompts are drawn again."""
        if self._before is not None and self._before[0] == step:
            _, state, self.carried = self._before
            self.sampler.restore(state)
            self._step = self._before = None

    def forget(self) -> None:
        """The steps so far are undone: what is carried was drawn by their weights, and is dropped. The sampler goes on where it
        is, so that none of their problems comes again in this pass.
        """
        self.carried, self._step, self._before = [], None, None

    def state(self) -> dict[str, Any]:
        """Between two steps: the sampler's, and the carried groups without their responses."""
        state: dict[str, Any] = dict(self.sampler.state())
        if self.carried:
            state["carried"] = [_describe(group) for group in self.carried]
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on where ``state`` was taken, with carried groups that have no response yet."""
        self._before = None
        self.pass_over(state)

    def pass_over(self, after: Mapping[str, Any] | None) -> None:
        """The step that was begun is taken as an earlier process ended it: with the state ``after`` it, or, None, with all that
        it has drawn.
        """
        if after is not None:
            self.sampler.restore(after)
        self.carried = [] if after is None else [self._described(each) for each in after.get("carried", ())]
        self._step = None

    def _group(self, number: int, step: int, place: int, problem: Problem, version: WeightsVersion | None) -> Group:
        return Group(number, step, place, problem, self.encode(problem), version, [None] * self.samples)

    def _described(self, saved: Mapping[str, Any]) -> Group:
        version = None if saved["version"] is None else WeightsVersion(*saved["version"])
        number = int(saved["number"])
        return self._group(number, int(saved["step"]), int(saved["place"]), self.sampler.problem(number), version)


def _describe(group: Group) -> dict[str, Any]:
    version = None if group.version is None else [group.version.step, group.version.digest]
    return {"number": group.number, "step": group.step, "place": group.place, "version": version}
