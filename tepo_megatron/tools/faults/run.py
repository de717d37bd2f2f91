"""``tepo faults``: injects every class, in two parallel lanes, and resumes an interrupted call."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from tepo_megatron.tools.faults.answer_faults import HostileAnswers
from tepo_megatron.tools.faults.config_faults import MalformedConfigs
from tepo_megatron.tools.faults.disk_faults import CheckpointDamage, FullDisks
from tepo_megatron.tools.faults.process_faults import Hangs, Kills
from tepo_megatron.tools.faults.processes import end_tree, wait_until
from tepo_megatron.tools.faults.silent import SilentFaults
from tepo_megatron.tools.faults.strangers import Strangers
from tepo_megatron.tools.faults.workshop import FaultClass, FaultOutcome, OutcomeLog, Workshop, fault_rng

CLASSES: tuple[type[FaultClass], ...] = (
    MalformedConfigs,
    HostileAnswers,
    CheckpointDamage,
    SilentFaults,
    Kills,
    FullDisks,
    Strangers,
    Hangs,
)

_LIVE = (Kills, Strangers, Hangs)


def lanes(*, quick: bool) -> dict[str, tuple[type[FaultClass], ...]]:
    """The classes of each parallel lane. A lane has its own live run, except with ``quick``, where a second costs more than it
    saves."""
    first = _LIVE if quick else (Kills,)
    return {"first": first, "second": tuple(kind for kind in CLASSES if kind not in first)}


Say = Callable[[str], None]
ENDING = "ending"
"""Class of the outcomes that compare a lane's finished live run with the undisturbed one."""

_FOREVER_S = 86400.0


def select(only: str) -> list[type[FaultClass]]:
    """The classes of comma-separated names, all if empty. Raises ValueError for an unknown name."""
    names = [name.strip() for name in only.split(",") if name.strip()]
    known = [item.name for item in CLASSES]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"--only {', '.join(unknown)}: no such class of faults; known: {', '.join(known)}")
    return [item for item in CLASSES if not names or item.name in names]


def run(classes: Sequence[type[FaultClass]], folder: Path, *, seed: int, quick: bool, say: Say) -> OutcomeLog:
    """Inject what the folder's record lacks. Raises ValueError if the record has another seed, RuntimeError if a lane ends
    early."""
    record = OutcomeLog(folder, seed=seed, quick=quick)
    chosen = {name: [kind for kind in classes if kind in members] for name, members in lanes(quick=quick).items()}
    expected = {name: kinds for name, kinds in chosen.items() if kinds}
    if len(expected) < 2:
        _run_lane(next(iter(expected), "first"), classes, record, folder, seed=seed, quick=quick, say=say)
        return record
    _side_by_side(expected, folder, seed=seed, quick=quick)
    return OutcomeLog(folder, seed=seed, quick=quick)


def _side_by_side(expected: dict[str, list[type[FaultClass]]], folder: Path, *, seed: int, quick: bool) -> None:
    given = {
        name: json.dumps(
            {"lane": name, "only": [item.name for item in kinds], "folder": str(folder), "seed": seed, "quick": quick}
        )
        for name, kinds in expected.items()
    }
    running: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, arguments in given.items():
            running[name] = subprocess.Popen(
                [sys.executable, "-m", __name__, arguments], stdin=subprocess.DEVNULL, start_new_session=True
            )
        wait_until(lambda: all(lane.poll() is not None for lane in running.values()), _FOREVER_S, "the end of the lanes")
    finally:
        for lane in running.values():
            end_tree(lane)
    if failed := [f"{name} (exit code {lane.returncode})" for name, lane in running.items() if lane.returncode]:
        raise RuntimeError(f"not all faults were injected: the lane {' and '.join(failed)} ended early; what it said is above")


def _run_lane(
    lane: str, classes: Sequence[type[FaultClass]], record: OutcomeLog, folder: Path, *, seed: int, quick: bool, say: Say
) -> None:
    workshop = Workshop(folder / "work", lane=lane, quick=quick, say=say)
    try:
        for kind in classes:
            missing = [number for number in range(kind.count(quick=quick)) if not record.has(kind.name, number)]
            if missing:
                say(f"{kind.name}: {len(missing)} of {kind.count(quick=quick)} to inject: {kind.title}")
                _inject(kind(workshop), missing, record, seed, say)
        _end_live_run(workshop, record, int(lane != "first"), say)
    finally:
        workshop.close()


def _inject(faults: FaultClass, numbers: Sequence[int], record: OutcomeLog, seed: int, say: Say) -> None:
    with faults:
        for number in numbers:
            start = time.monotonic()
            try:
                outcome = faults.inject(number, fault_rng(seed, faults.name, number))
            except Exception as error:  # any error counts as a lost fault; try the next one
                traceback.print_exc()
                outcome = FaultOutcome(
                    f"number {number}", "lost", f"the harness came to no end: {type(error).__name__}: {error}"
                )
            record.add(faults.name, number, outcome)
            seconds = time.monotonic() - start
            say(f"  {faults.name} {number + 1}: {outcome.fault}: {outcome.result} after {seconds:.0f} s. {outcome.said[:200]}")


def _end_live_run(workshop: Workshop, record: OutcomeLog, number: int, say: Say) -> None:
    if workshop.has_run and not record.has(ENDING, number):
        say("the live run goes on to its end …")
        wrong = workshop.finish_run()
        record.add(ENDING, number, FaultOutcome("the end of the live run", "lost" if wrong else "survived", wrong))


def _main(given: str) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that SIGTERM also ends all started processes
    arguments = json.loads(given)
    seed, quick, folder = arguments["seed"], arguments["quick"], Path(arguments["folder"])

    def say(line: str) -> None:
        sys.stderr.write(line + "\n")

    record = OutcomeLog(folder, seed=seed, quick=quick)
    classes = select(",".join(arguments["only"]))
    _run_lane(arguments["lane"], classes, record, folder, seed=seed, quick=quick, say=say)


if __name__ == "__main__":
    _main(sys.argv[1])
