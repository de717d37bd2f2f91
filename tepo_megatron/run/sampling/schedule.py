"""When a step's rollouts are sampled: between two steps (``sync``), or while the trainer trains (``overlap``). Rank 0 only.

A schedule is all that the rest of a run sees of it: the loop collects, trains and sends weights in the same order with both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Protocol

from tepo_megatron.config import RunConfig
from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.run.sampling.async_sampler import Stream
from tepo_megatron.run.sampling.collect import Phase, RolloutCollector
from tepo_megatron.run.sampling.custom_rollout import Collect
from tepo_megatron.run.sampling.inputs import Inputs
from tepo_megatron.run.sampling.journal import Journal
from tepo_megatron.run.sampling.overlap import Overlap
from tepo_megatron.run.sampling.step_rewards import StepRewards
from tepo_megatron.runtime.watch.heartbeat import Heartbeat
from tepo_megatron.sampler.protocol import Sampler
from tepo_megatron.tasks.protocol import Task


class Schedule(Protocol):
    """What gives a run its rollouts; ``rollouts`` are those that :meth:`collect` gave last, ``drawn`` the same with those that
    have no reward.
    """

    drawn: list[Rollout]
    rollouts: list[Rollout]

    def collect(self, step: int, fleet: Sampler | None) -> list[Rollout]:
        """The rollouts to train on after ``step`` steps; the same again if called again for the same step."""

    def take_figures(self) -> dict[str, float]:
        """Of the step that was just collected, for its row; once."""

    def published(self, version: WeightsVersion) -> None:
        """All servers have these weights."""

    def held(self) -> contextlib.AbstractContextManager[None]:
        """Within, the servers take weights, or work for another than the schedule."""

    def busy_seconds(self, split: Mapping[str, float]) -> float:
        """Seconds of the step that ends now in which the servers sampled its rollouts, or those of later ones; ``split``: its
        times by phase.
        """

    def drop_step(self, step: int) -> None:
        """The step is given up, if it was begun: its problems are drawn again."""

    def go_back(self) -> None:
        """The next steps draw other problems than those that are undone."""

    def state(self) -> dict[str, Any]:
        """Of the order of the problems, for a checkpoint."""

    def restore(self, state: Mapping[str, Any]) -> str | None:
        """Goes on in the data where the run that was saved stopped; see ``resume.restore_data``."""

    def close(self) -> None:
        """Ends what runs beside the main thread; safe to call twice."""


class Sync(RolloutCollector):
    """Samples when a step asks for it, with the weights that are trained. A replayed run reads its record so, whatever the
    schedule of the run that wrote it.
    """

    def published(self, version: WeightsVersion) -> None:
        return None

    def held(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def busy_seconds(self, split: Mapping[str, float]) -> float:
        return split["time/rollout"]

    def close(self) -> None:
        return None


def make_schedule(
    config: RunConfig,
    inputs: Inputs,
    rewards: StepRewards,
    task: Task,
    journal: Journal,
    fleet: Sampler | None,
    *,
    phase: Phase,
    heartbeat: Heartbeat,
    collect: Collect | None = None,
) -> Schedule:
    """The schedule that ``train.schedule`` names; ``task`` is the run's, ``collect`` a custom generation step."""
    if fleet is None or config.train.schedule == "sync":
        return Sync(config, inputs, rewards, task, journal, phase=phase, heartbeat=heartbeat, collect=collect)
    sampling = config.rollout.sampling

    # Evaluations use the run's task meanwhile, and a task belongs to one thread.
    @cache
    def another_task() -> Task:
        return task.another()

    def open_stream(on_move: Callable[[], None]) -> AbstractContextManager[Stream]:
        samples = fleet.sample_stream(sampling, sampling_mask=sampling.truncates, on_move=on_move)
        return another_task().stream(samples, schedule.problem_of)

    schedule = Overlap(
        config,
        inputs,
        rewards,
        journal,
        phase=phase,
        heartbeat=heartbeat,
        open_stream=open_stream,
        open_verifiers=another_task,
    )
    return schedule


WAITING_PHASES: Sequence[str] = ("rollout", "reward", "journal")
"""Phases in which the trainer waits for rollouts."""


def idle_shares(split: Mapping[str, float], busy_s: float) -> dict[str, float]:
    """``idle/trainer`` and ``idle/servers``: the shares of a step, without its evaluation, in which the trainer waits for
    rollouts, and in which the servers have none to sample. ``split``: seconds of the step by phase.
    """
    seconds = split["time/step"] - split["time/eval"]
    if seconds <= 0:
        return {}
    waited = sum(split[f"time/{name}"] for name in WAITING_PHASES)
    return {"idle/trainer": min(1.0, waited / seconds), "idle/servers": min(1.0, max(0.0, 1 - busy_s / seconds))}
