"""What signals and checkpoints' times mean for the rest of a run."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tepo_megatron.runtime.preemption import CONTINUE, StopSignals
from tepo_megatron.trainer.checkpoint_folder import checkpoint_name

_MARGIN = 2.0  # factor on the last durations of updates and saves


@dataclass
class Stopping:
    """Every rank has one; rank 0's decides."""

    saved_step: int

    signals: StopSignals = field(default_factory=StopSignals.current)
    on_saved: Callable[[int], None] = lambda step: None

    def __post_init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._saved_at = time.monotonic()
        self._save_times: dict[str, float] = {}

    @contextmanager
    def timed_update(self) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.seconds["update"] = time.monotonic() - start

    def began_save(self) -> None:
        self._saved_at = time.monotonic()

    def saved(self, step: int, *, stage_s: float, write_s: float, waited_s: float) -> None:
        self.saved_step, self._saved_at = step, time.monotonic()
        self.seconds["save"] = stage_s + write_s
        self._save_times = {"time/save_stage": stage_s, "time/save_write": write_s, "time/save_waited": waited_s}
        self.on_saved(step)

    def take_save_times(self) -> dict[str, float]:
        times, self._save_times = self._save_times, {}
        return times

    def save_is_due(self, minutes: float) -> bool:
        return minutes > 0 and time.monotonic() - self._saved_at >= 60 * minutes

    def update_fits(self) -> bool:
        """Returns false for a first update, of unknown length; assumes that a first save takes as long."""
        left = self.signals.seconds_left()
        update = self.seconds.get("update", math.inf)
        return left == math.inf or _MARGIN * (update + self.seconds.get("save", update)) <= left

    def at_risk(self, step: int) -> str:
        if step <= self.saved_step:
            return ""
        first = self.saved_step + 1
        steps = f"step {step} is" if first == step else f"steps {first} to {step} are"
        newest = f"the newest checkpoint is {checkpoint_name(self.saved_step)}" if self.saved_step else "there is no checkpoint"
        return f"{steps} lost; {newest}"

    def describe(self, stop: BaseException, *, saved: bool) -> str:
        name = checkpoint_name(self.saved_step)
        if saved:
            return f"{stop}: saved {name}; {CONTINUE}"
        if self.saved_step:
            return f"{stop}: nothing was trained since {name}; {CONTINUE}"
        return f"{stop}: ended before a step was trained; there is nothing to save"
