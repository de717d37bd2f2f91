"""What a step takes under each schedule of rollouts and updates, and who waits for whom."""

from __future__ import annotations

from dataclasses import dataclass

from tepo_megatron.plan.time import StepTime


@dataclass(frozen=True)
class ScheduleTime:
    """Seconds of a step under a schedule (``train.schedule``), and the shares of them in which either side is idle."""

    schedule: str
    seconds: float
    idle_trainer: float
    idle_servers: float


def schedule_times(step: StepTime, *, takes_turns: bool) -> list[ScheduleTime]:
    """A step's time and idle shares under each schedule that the run could have. ``takes_turns``: servers are on the trainer's
    GPUs, where nothing overlaps.

    Overlapped, sampling and training go on side by side, and both stop for a weight sync. How much of a long tail of responses
    is hidden beyond that depends on ``train.max_staleness``, and is left out.
    """
    if step.generation == 0:
        return []
    trains = step.seconds - step.generation
    schedules = [("sync", step.seconds)]
    if not takes_turns:
        schedules.append(("overlap", max(step.generation + step.sync, trains)))
    return [
        ScheduleTime(name, seconds, 1 - trains / seconds, 1 - step.generation / seconds)
        for name, seconds in schedules
        if seconds < float("inf")
    ]
