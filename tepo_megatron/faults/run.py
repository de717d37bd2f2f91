"""``tepo faults``: every class in turn, resumed where an earlier call ended, and what came of it."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from tepo_megatron.faults.classes import CLASSES
from tepo_megatron.faults.outcome import FaultClass, Outcome, fault_rng
from tepo_megatron.faults.record import Record
from tepo_megatron.faults.workshop import Workshop

Say = Callable[[str], None]
ENDING = "ending"
"""The class of the one outcome that says whether the live run, after all its faults, ended as the undisturbed one."""


def select(only: str) -> list[type[FaultClass]]:
    """The classes with these comma-separated names, all if empty. Raises ValueError for an unknown name."""
    names = [name.strip() for name in only.split(",") if name.strip()]
    known = [each.name for each in CLASSES]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"--only {', '.join(unknown)}: no such class of faults; known: {', '.join(known)}")
    return [each for each in CLASSES if not names or each.name in names]


def run(classes: Sequence[type[FaultClass]], folder: Path, *, seed: int, quick: bool, say: Say) -> Record:
    """Injects what is not in the folder's record yet. Raises ValueError where the record is of another seed."""
    record = Record(folder, seed=seed, quick=quick)
    workshop = Workshop(folder / "work", quick=quick, say=say)
    try:
        for kind in classes:
            missing = [number for number in range(kind.count(quick=quick)) if not record.has(kind.name, number)]
            if missing:
                say(f"{kind.name}: {len(missing)} of {kind.count(quick=quick)} to inject: {kind.title}")
                _inject(kind(workshop), missing, record, seed, say)
        _end_live_run(workshop, record, say)
    finally:
        workshop.close()
    return record


def _inject(faults: FaultClass, numbers: Sequence[int], record: Record, seed: int, say: Say) -> None:
    with faults:
        for number in numbers:
            start = time.monotonic()
            try:
                outcome = faults.inject(number, fault_rng(seed, faults.name, number))
            except Exception as error:  # whatever it is, the fault was not survived as it should be, and the next one is tried
                traceback.print_exc()
                outcome = Outcome(f"number {number}", "lost", f"the harness came to no end: {type(error).__name__}: {error}")
            record.add(faults.name, number, outcome)
            seconds = time.monotonic() - start
            say(f"  {faults.name} {number + 1}: {outcome.fault}: {outcome.result} after {seconds:.0f} s. {outcome.said[:200]}")


def _end_live_run(workshop: Workshop, record: Record, say: Say) -> None:
    if workshop.has_run and not record.has(ENDING, 0):
        say("the live run goes on to its end …")
        wrong = workshop.finish_run()
        record.add(ENDING, 0, Outcome("the end of the live run", "lost" if wrong else "survived", wrong))
