"""What classes of faults share: the folder, undisturbed runs, and a live one that faults are injected into."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path

from tepo_megatron.tools.faults import live_run, tiny
from tepo_megatron.tools.faults.live_run import LiveRun


class Workshop:
    """Made once for a lane of a command; ``say`` gets a line about what takes long."""

    def __init__(self, folder: Path, *, lane: str, quick: bool, say: Callable[[str], None]) -> None:
        self.folder, self.lane, self.is_quick, self.say = folder, lane, quick, say
        self.steps = 14 if quick else 32
        """More take longer once, and spare the starts of runs that take the place of those that have come to their end."""
        self._overrides = () if quick else tiny.SHORT_TIMEOUTS
        self._reference: Path | None = None
        self._run: LiveRun | None = None
        self._runs = sum(1 for _ in folder.glob(f"{lane}-run-*"))  # a call that was interrupted left its own

    def reference(self) -> Path:
        """The output of the run that nothing disturbs. The lane that comes first makes it, and the other waits."""
        if self._reference is None:
            self.say("the undisturbed run …")
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / "reference.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                self._reference = live_run.reference(self.folder / "reference", self.steps, self._overrides)
        return self._reference

    def live_run(self) -> LiveRun:
        """A run of the same settings that is running, and has at least four steps to go; a new one where one comes to its end.

        Raises RuntimeError where the one that has ended is not what it would have been undisturbed.
        """
        self.reference()
        if self._run is not None and tiny.last_step(self._run.out) > self.steps - 5 and (wrong := self.finish_run()):
            raise RuntimeError(f"the run before, which survived its faults, ended with a difference: {wrong}")
        if self._run is None:
            self._runs += 1
            self._run = LiveRun(self.folder / f"{self.lane}-run-{self._runs:02d}", self.steps, self._overrides)
        if not self._run.running:
            self._run.start()
            self._run.wait_for_row(0)
        return self._run

    @property
    def has_run(self) -> bool:
        return self._run is not None

    def finish_run(self) -> str:
        """Lets the live run come to its end; what of it differs from the undisturbed one."""
        run, self._run = self._run, None
        if run is None:
            return ""
        try:
            if not run.running and not run.finished:
                run.start()
            if run.wait_end():
                return run.said()
            return tiny.differences(run.out, self.reference())
        finally:
            run.stop()

    def drop_run(self) -> None:
        """Ends the live run, which has shown a difference: the next fault gets a new one."""
        self.close()

    def close(self) -> None:
        if self._run is not None:
            self._run.stop()
            self._run = None
