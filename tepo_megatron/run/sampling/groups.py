"""Groups of responses, and the buffer that decides, without I/O, which are drawn, sampled and trained on."""

import math
import threading
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np

from tepo_megatron.config import RunConfig
from tepo_megatron.core.problem import Problem
from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.run.sampling.inputs import Inputs
from tepo_megatron.run.sampling.step_rewards import GroupFilters
from tepo_megatron.tasks.environments.episodes import episode_prompt
from tepo_megatron.tasks.protocol import RewardResult

_NUMBER = attrgetter("number")
_UNKNOWN = (-1, 0, 0)
UNFINISHED = "abort"  # ``finish_reason`` of a partial response, which a later request can continue


@dataclass(eq=False)
class Group:
    """``number`` counts the run's prompts. ``step`` and ``place`` (within it) decide the seed; without ``step`` (drawn
    ahead) ``number`` does. ``version``: the first tokens' weights. ``samples``: None before the first token. ``asked``:
    samples sent to a verifier.
    """

    number: int
    step: int | None
    place: int
    problem: Problem
    prompt_ids: tuple[int, ...]
    version: WeightsVersion | None
    samples: list[Rollout | None]
    asked: set[int] = field(default_factory=set)
    results: dict[int, RewardResult] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return len(self.results) == len(self.samples)

    @property
    def oldest_step(self) -> int:
        """The oldest weights of a complete group's tokens."""
        return min(version.step for rollout in self.rollouts() for _, version in rollout.versions)

    def is_finished(self, sample: int) -> bool:
        rollout = self.samples[sample]
        return rollout is not None and rollout.finish_reason != UNFINISHED

    def rollouts(self) -> list[Rollout]:
        assert self.is_complete
        return [rollout for rollout in self.samples if rollout is not None]

    def state(self) -> dict[str, Any]:
        version = None if self.version is None else [self.version.step, self.version.digest]
        return {"number": self.number, "step": self.step, "place": self.place, "version": version}

    def score(self, sample: int, result: RewardResult) -> None:
        rollout = self.samples[sample]
        assert rollout is not None
        self.samples[sample] = result.of(rollout)
        self.results[sample] = result


class GroupBuffer:
    """All groups between draw and update: ``waiting``, ``running`` (by number), ``done`` (unfiltered, in order of
    completion).

    In window 0 without ``rollout.partial``, a step trains on the first groups by number that pass the filters, once all are
    decided: timing does not matter. Otherwise it trains on those that complete first, the oldest weights' before others.

    In window k, groups of k + 1 steps may exist while step s is due and the servers have weights s; of k steps while the
    trainer trains. So groups in number order are at most k versions old.

    Methods are thread-safe; attributes need the lock ``changed``.
    """

    def __init__(self, config: RunConfig, inputs: Inputs, *, window: int) -> None:
        self._rollout, self._train = config.rollout, config.train
        self._size = config.rollout.prompts_per_step
        self._encode = partial(episode_prompt, config.environment, inputs.tokenizer)
        self._by_id, self._filters = inputs.by_id, GroupFilters(config.rollout)
        self.order, self.window = inputs.order, window
        self.changed = threading.Condition(threading.RLock())
        self.waiting: deque[Group] = deque()
        self.running: dict[int, Group] = {}
        self._live = _UNKNOWN  # turn, groups that run, and those that will not be too old; asked per response: counting is slow
        self.done: list[Group] = []
        self.filtered: list[Group] = []
        self.version: WeightsVersion | None = None
        self.generation = 0
        self.dropped = 0
        self._turn = 0
        self._drawn = self._carried_in = 0
        self._causes: Counter[str] = Counter()
        self._rewards: Counter[float] = Counter()
        self._first: list[Group] | None = None
        self._before: tuple[int, dict[str, Any], list[Group], list[Group]] | None = None
        self._ahead: list[Group] = []  # in window 0: what an overlapped run drew ahead, to draw before others
        self._batch: tuple[int, list[Group]] = (-1, [])

    # -- a step ----------------------------------------------------------------------------------------------------------

    def begin(self, step: int) -> list[Group]:
        """In window 0: the groups that ``step`` starts with, the same for a repeated call."""
        with self.changed:
            self._turn = step
            if self.window == 0 and self._first is None:
                self._before = (step, dict(self.order.state()), list(self.waiting), list(self._ahead))
                carried = list(self.waiting)
                self._carried_in, self._drawn = len(carried), 0
                # Drawn before any is decided, since a resumed run has no responses to decide by, and must draw the same.
                self._first = [*carried, *self._draw_missing()]
                for group in carried:
                    if group.is_complete:
                        self.waiting.remove(group)
                        self._decide(group)
                self._draw_missing()
            self.changed.notify_all()
            return self._first or []

    def is_ready(self) -> bool:
        with self.changed:
            if self.window:
                self._drop_stale()
                return self.is_full
            if self.is_full:
                return self._rollout.partial or not self._open()
            if not self._open() and not self._missing():
                raise RuntimeError(self._why_never_filled())
            return False

    def _drop_stale(self) -> None:
        if self._train.stale == "drop":
            fresh = [group for group in self.done if self._turn - group.oldest_step <= self.window]
            self.dropped += len(self.done) - len(fresh)
            self.done = fresh
            self.changed.notify_all()

    @property
    def is_full(self) -> bool:
        return len(self.done) >= self._size

    def take(self) -> tuple[list[Group], list[Group], dict[str, float]]:
        with self.changed:
            if self.window:
                self._drop_stale()  # others may be complete since ``is_ready``
                chosen = sorted(self.done, key=lambda group: (group.oldest_step, group.number))[: self._size]
            else:
                chosen = (self.done if self._rollout.partial else sorted(self.done, key=_NUMBER))[: self._size]
            batch = sorted(chosen, key=_NUMBER)
            self.done = [group for group in self.done if group not in chosen]
            figures, filtered = self._figures(batch), self.filtered
            self._forget_counts()
            self._batch = (self._turn, batch)
            if not self.window:
                self._carry(self.pending())
            self._turn += 1
            self.changed.notify_all()
            return batch, filtered, figures

    def drop_step(self, step: int) -> None:
        """Only if ``step`` was the last to start."""
        with self.changed:
            if self.window and self._batch[0] == step:
                self.done += [group for group in self._batch[1] if group.is_complete]
                self.waiting.extendleft(group for group in reversed(self._batch[1]) if not group.is_complete)
                self._batch = (-1, [])
            elif self._before is not None and self._before[0] == step:
                _, state, carried, self._ahead = self._before
                self.order.restore(state)
                self._carry(carried)
                self._before = None
                self._forget_counts()

    def forget(self) -> None:
        with self.changed:
            self._carry(())
            self._before, self._batch = None, (-1, [])
            self._forget_counts()
            self.generation += 1
            self.version = None  # the servers' weights are undone: no room for groups until others are published
            self.changed.notify_all()

    def groups_of(self, problem_ids: Sequence[str]) -> list[Group]:
        """Draws without a number or a change of the order; empty if a problem is unknown."""
        if any(name not in self._by_id for name in problem_ids):
            return []
        return [self._group(-1, None, 0, self._by_id[name], None) for name in problem_ids]

    def skip(self, problem_ids: Sequence[str], numbers: Sequence[int]) -> dict[str, float]:
        """They must be problems of the run. ``numbers``: their groups', unknown (empty) in entries of older versions."""
        batch = []
        with self.changed:
            while self.order.drawn <= max(numbers, default=-1):
                self.waiting.append(self._draw())
            for problem_id in problem_ids:
                while not (same := [group for group in self.waiting if group.problem.id == problem_id]):
                    self.waiting.append(self._draw())
                match = min(same, key=lambda group: group.number not in numbers)
                self.waiting.remove(match)
                batch.append(match)
            self._batch = (self._turn, batch)
            return self._figures(batch)

    def skip_step(self, state: Mapping[str, Any] | None) -> None:
        """In window 0. ``state``: at the step's end; None: at its start."""
        with self.changed:
            if state is not None:
                self.restore(state)
            else:
                self._carry(sorted(self._first or (), key=_NUMBER)[self._size :])
            self._forget_counts()

    # -- for the worker --------------------------------------------------------------------------------------------------

    def requeue(self) -> None:
        with self.changed:
            self.waiting.extendleft(reversed(self.running.values()))
            self.running.clear()

    def claim(self, *, batch: bool = False) -> list[Group]:
        """``batch``: a whole step's groups, or none; in the last step as many as it lacks."""
        with self.changed:
            free = self._free() if self.window else math.inf
            if batch and free < self._size and self._turn < self._train.steps - 1:
                return []
            self._draw_missing()
            count = max(0, min(free, self._size if batch else free, len(self.waiting)))
            claimed = [self.waiting.popleft() for _ in range(int(count))]
            for group in claimed:
                if self.window and not any(group.samples):
                    group.version = self.version
                self.running[group.number] = group
                self._live = _UNKNOWN
            return claimed

    def wait_for_room(self, timeout_s: float, count: int = 1) -> None:
        """In window k: also returns when anything changed."""
        with self.changed:
            if self._free() < count:
                self.changed.wait(timeout_s)

    def decide(self, group: Group) -> None:
        """Filters a complete group, and draws missing ones. Raises RuntimeError if filters refused too many."""
        with self.changed:
            if self.running.get(group.number) is not group:
                return  # forgotten meanwhile
            del self.running[group.number]
            self._decide(group)
            # At once: the draw must not depend on how many groups were decided meanwhile.
            self._draw_missing()
            filters = self._rollout.filter_groups
            most = filters.max_batches * self._size if filters else 0
            is_refused = bool(self.filtered) and self.filtered[-1] is group
            if self.window and is_refused and not self.is_full and len(self.filtered) >= most:
                raise RuntimeError(self._why_never_filled())
            self.changed.notify_all()

    # -- state -----------------------------------------------------------------------------------------------------------

    def pending(self) -> list[Group]:
        return sorted([*self.waiting, *self.running.values(), *self.done], key=_NUMBER)

    def state(self) -> dict[str, Any]:
        """JSON values: the problems' order, and pending groups without responses."""
        with self.changed:
            state: dict[str, Any] = dict(self.order.state())
            if pending := [*self.pending(), *self._ahead]:
                state["carried"] = [group.state() for group in pending]
            return state

    def restore(self, state: Mapping[str, Any]) -> None:
        with self.changed:
            self.order.restore(state)
            groups = []
            for saved in state.get("carried", ()):
                version = None if saved["version"] is None else WeightsVersion(*saved["version"])
                problem = self.order.problem(saved["number"])
                groups.append(self._group(saved["number"], saved["step"], saved["place"], problem, version))
            # How checkpoints up to 0.2 name groups drawn ahead.
            groups += [self._group(number, None, 0, self._by_id[name], None) for number, name in state.get("ahead", ())]
            # If one step sampled all, later ones would train on what is too old by then.
            self._ahead = [group for group in groups if not self.window and group.step is None]
            self._carry([group for group in groups if self.window or group.step is not None])

    def _carry(self, groups: Sequence[Group]) -> None:
        self.waiting, self.done, self._first = deque(groups), [], None
        self.running.clear()

    # -- draws -----------------------------------------------------------------------------------------------------------

    def _draw_missing(self) -> list[Group]:
        drawn = [self._draw() for _ in range(self._missing())]
        self.waiting.extend(drawn)
        return drawn

    def _draw(self) -> Group:
        if self._ahead:
            ahead = self._ahead.pop(0)
            number, problem = ahead.number, ahead.problem
        else:
            number = self.order.drawn
            (problem,) = self.order.next(1)
        step, place = (None, 0) if self.window else (self._turn, self._drawn)
        self._drawn += 1
        return self._group(number, step, place, problem, self.version)

    def _group(self, number: int, step: int | None, place: int, problem: Problem, version: WeightsVersion | None) -> Group:
        samples: list[Rollout | None] = [None] * self._rollout.samples_per_prompt
        return Group(number, step, place, problem, self._encode(problem), version, samples)

    def _missing(self) -> int:
        if self.window:
            return max(0, self._free() - len(self.waiting))
        alive, oversample = len(self.done) + len(self._open()), self._rollout.oversample
        if self._rollout.partial:
            short = 0 if self.is_full else _times(oversample, self._size) - alive
        else:
            short = _times(oversample, max(self._size - alive, 0))
        filters = self._rollout.filter_groups
        return max(0, short if filters is None else min(short, filters.max_batches * self._size - self._drawn))

    def _free(self) -> int:
        """Running groups that will be too old do not count."""
        room = 0
        if self.version is not None:
            steps = min(self.version.step + self.window + 1, self._train.steps) - self._turn
            extra = _times(self._rollout.oversample, self._size) - self._size
            room = steps * self._size + extra if steps > 0 else 0
        if self._live[:2] != (self._turn, len(self.running)):
            steps_of = [0 if group.version is None else group.version.step for group in self.running.values()]
            live = [step for step in steps_of if self._train.stale != "drop" or self._turn - step <= self.window]
            self._live = self._turn, len(self.running), len(live)
        return room - self._live[2] - len(self.done)

    def _open(self) -> list[Group]:
        return [*self.waiting, *self.running.values()]

    # -- filters and figures ---------------------------------------------------------------------------------------------

    def _decide(self, group: Group) -> None:
        rollouts = group.rollouts()
        self._rewards.update(rollout.reward for rollout in rollouts if rollout.reward is not None)
        # Without filters a group without rewards leaves the step as it does in every run (``StepRewards.leave_out``).
        cause = self._filters.refuse(rollouts)
        if cause is None:
            self.done.append(group)
        else:
            self.filtered.append(group)
            self._causes[cause] += 1

    def _figures(self, batch: Sequence[Group]) -> dict[str, float]:
        filtered = {"groups/filtered": len(self.filtered)}
        row: dict[str, float] = {}
        if self.window:
            row = {**(filtered if self._filters else {}), "staleness/dropped": self.dropped}
        elif self._filters or self._rollout.partial:
            row = {
                "groups/carried_in": self._carried_in,
                "groups/drawn": self._drawn,
                "groups/kept": len(batch),
                **filtered,
                "groups/carried": len(self.pending()),
                **{f"groups/filtered/{name}": self._causes[name] for name in self._filters.causes},
            }
        return {name: float(count) for name, count in row.items()}

    def _forget_counts(self) -> None:
        self.filtered, self.dropped, self._drawn, self._carried_in = [], 0, 0, 0
        self._causes.clear()
        self._rewards.clear()

    def _why_never_filled(self) -> str:
        filters = self._rollout.filter_groups
        most = f"rollout.filter_groups.max_batches = {1 if filters is None else filters.max_batches} times prompts_per_step,"
        causes = ", ".join(f"{cause} {count}" for cause, count in self._causes.most_common())
        what = f"filters refused {len(self.filtered)} groups, {most} before a step was full"
        if not self.window:
            needed = f"{len(self.done)} of the {self._size} groups that it needs passed the filters"
            what = f"step {self._turn} drew {self._drawn} prompts, {most} and {needed}"
        return (
            f"{what}; refused by {causes}. Rewards of their responses: {_show_rewards(self._rewards)}. If nearly all are "
            "equal, the problems are too hard or too easy for the model, or the verifier does not understand its answers "
            "(samples.jsonl shows some); else raise max_batches, or take the filter out"
        )


def _show_rewards(counts: Mapping[float, int], bins: int = 10) -> str:
    if len(counts) <= bins:
        return ", ".join(f"{value:g} × {counts[value]}" for value in sorted(counts)) or "none"
    totals, edges = np.histogram(list(counts), bins, weights=list(counts.values()))
    ranges = zip(edges, edges[1:], totals, strict=False)
    return ", ".join(f"{low:.3g} to {high:.3g} × {total:g}" for low, high, total in ranges if total)


def _times(factor: float, count: int) -> int:
    """Rounds up, but 1.1 × 50 is 55."""
    return math.ceil(round(factor * count, 6))
