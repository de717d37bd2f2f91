"""What classes of faults share: the folder and runs."""

from __future__ import annotations

import fcntl
import json
import os
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from tepo_megatron.tools.faults import tiny
from tepo_megatron.tools.faults.tiny import LiveRun


class Workshop:
    def __init__(self, folder: Path, *, lane: str, quick: bool, say: Callable[[str], None]) -> None:
        self.folder, self.is_quick, self.say, self._lane = folder, quick, say, lane
        self.steps = 14 if quick else 32  # more steps: a longer reference run, but fewer restarts of live runs
        self._overrides = () if quick else tiny.SHORT_TIMEOUTS
        self._reference: Path | None = None
        self._run: LiveRun | None = None
        self._runs = sum(1 for _ in folder.glob(f"{lane}-run-*"))  # an interrupted call leaves its runs

    def reference(self) -> Path:
        """The first lane makes it; the other waits."""
        if self._reference is None:
            self.say("the undisturbed run …")
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / "reference.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                self._reference = LiveRun(self.folder / "reference", self.steps, self._overrides).complete()
        return self._reference

    def live_run(self) -> LiveRun:
        """It has at least four steps left. Raises RuntimeError if the previous one ended unlike the undisturbed run."""
        self.reference()
        if self._run is not None and self._run.last_step > self.steps - 5 and (wrong := self.finish_run()):
            raise RuntimeError(f"the run before, which survived its faults, ended with a difference: {wrong}")
        if self._run is None:
            self._runs += 1
            self._run = LiveRun(self.folder / f"{self._lane}-run-{self._runs:02d}", self.steps, self._overrides)
        if not self._run.running:
            self._run.start()
            self._run.wait_for_row(0)
        return self._run

    def finish_run(self) -> str | None:
        """The differences from the undisturbed run."""
        run, self._run = self._run, None
        if run is None:
            return None
        self.say("the live run continues to its end …")
        try:
            if not run.running and not run.finished:
                run.start()
            if run.wait_end():
                return run.said()
            return tiny.differences(run.out, self.reference())
        finally:
            run.stop()

    def close(self) -> None:
        if self._run is not None:
            self._run.stop()
            self._run = None


@dataclass(frozen=True)
class FaultOutcome:
    """``survived``: nothing is missing. ``refused``: it stopped with the message ``said``, undamaged. ``lost``: anything else.
    ``recovery_s``: seconds until work continued.
    """

    fault: str
    result: Literal["survived", "refused", "lost"]
    said: str = ""
    recovery_s: float | None = None
    details: Mapping[str, Any] = field(default_factory=dict)


class FaultClass(ABC):
    """The context manager holds what the faults share; ``folder`` belongs to the class."""

    name: ClassVar[str]
    title: ClassVar[str]
    whole: ClassVar[int]
    quick: ClassVar[int]

    def __init__(self, workshop: Workshop) -> None:
        self.workshop = workshop
        self.folder = workshop.folder / self.name
        self.folder.mkdir(parents=True, exist_ok=True)

    @classmethod
    def count(cls, *, quick: bool) -> int:
        return cls.quick if quick else cls.whole

    @abstractmethod
    def inject(self, number: int, rng: random.Random) -> FaultOutcome:
        """All randomness comes from ``rng``."""

    def close(self) -> None:  # noqa: B027  # not every class has something to end
        ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class OutcomeLog:
    """Raises ValueError if the folder holds another seed or count."""

    def __init__(self, folder: Path, *, seed: int, quick: bool) -> None:
        self.path = folder / "outcomes.jsonl"
        self._head = {"seed": seed, "quick": quick}
        self._done: dict[tuple[str, int], dict[str, Any]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            self._read()
        else:
            self._append(self._head)

    def _read(self) -> None:
        lines = self.path.read_text(encoding="utf-8").split("\n")
        lines = [line for line in lines if line.endswith("}")]  # the last may be cut off
        if not lines or json.loads(lines[0]) != self._head:
            raise ValueError(
                f"{self.path} holds the outcomes of {lines[0] if lines else 'nothing'}, and {json.dumps(self._head)} was asked "
                "for; give another --output, or remove the folder"
            )
        for entry in map(json.loads, lines[1:]):
            self._done[entry["class"], entry["number"]] = entry
        if not self.path.read_bytes().endswith(b"\n"):
            with self.path.open("ab") as file:
                file.write(b"\n")  # keeps a cut-off line on its own line; readers skip it

    def has(self, name: str, number: int) -> bool:
        return (name, number) in self._done

    def add(self, name: str, number: int, outcome: FaultOutcome) -> None:
        entry = {"class": name, "number": number, **asdict(outcome)}
        self._append(entry)
        self._done[name, number] = entry

    def outcomes(self, name: str) -> list[dict[str, Any]]:
        return [self._done[key] for key in sorted(self._done) if key[0] == name]

    def _append(self, entry: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, default=str) + "\n")
            file.flush()
            os.fsync(file.fileno())
