"""One fault in a live run, at a random moment of a phase."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress

from tepo_megatron.tools.faults import tiny
from tepo_megatron.tools.faults.live_run import LiveRun
from tepo_megatron.tools.faults.processes import alive, wait_gone
from tepo_megatron.tools.faults.workshop import FaultClass, FaultOutcome, Workshop

WITHIN_S = {"rollout": 0.3, "reward": 0.05, "score": 0.15, "update": 0.2, "save": 0.03, "sync": 0.3, "eval": 0.2}
"""Longest delay from a phase's start to the fault: about the phase's length."""

GONE_S = 240.0
"""Time for the processes of an ended run to exit: they need seconds, ten times more on a busy machine."""


def _disturb(
    workshop: Workshop, role: str, phase: str, number: signal.Signals, rng: random.Random, limit_s: float
) -> FaultOutcome:
    """The run, or the one that resumes it, must continue within ``limit_s`` seconds and match the undisturbed run."""
    name = f"{number.name} to {role} in {phase}"
    run = workshop.live_run()
    run.reach(phase)
    time.sleep(rng.uniform(0, WITHIN_S[phase]))
    roles, before = run.roles(), run.pids()
    if role not in roles:
        workshop.drop_run()
        return FaultOutcome(name, "lost", f"the run has no process that is its {role}, but only {', '.join(roles)}")
    victim = rng.choice(roles[role])
    step, start = tiny.last_step(run.out), time.monotonic()
    os.kill(victim, number)
    try:
        outcome = _follow(workshop, run, name, before, step, start, limit_s)
    except TimeoutError as error:
        outcome = FaultOutcome(name, "lost", f"{error}; the run said: {run.said()}")
    finally:
        if number == signal.SIGSTOP and alive(victim):
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGCONT)
    if outcome.result == "lost":
        workshop.drop_run()
    return outcome


def _follow(
    workshop: Workshop, run: LiveRun, name: str, before: list[int], step: int, start: float, limit_s: float
) -> FaultOutcome:
    goes_on = run.wait_for_row(step + 2, limit_s)
    said = ""
    if not goes_on:
        said = run.said()
        code = run.wait_end()
        if left := wait_gone(before, GONE_S):
            return FaultOutcome(
                name, "lost", f"{len(left)} processes were still there {GONE_S:g} s after the run had ended ({said})"
            )
        if "Traceback" in run.printed() and code == 1:
            return FaultOutcome(name, "lost", f"the run ended with a traceback: {said}")
        run.start()
        if not run.wait_for_row(step + 2, limit_s):
            return FaultOutcome(name, "lost", f"it could not be resumed: {run.said()}")
    seconds = time.monotonic() - start
    if wrong := tiny.differences(run.out, workshop.reference()):
        return FaultOutcome(name, "lost", f"after {'going on' if goes_on else 'resuming'}: {wrong}")
    return FaultOutcome(name, "survived", said and f"ended and resumed: {said}", seconds)


ROLES = ("engine core", "parent", "reward worker", "rank 1", "API server", "rank 0", "vLLM worker", "supervisor")
PHASES = tuple(WITHIN_S)
LIMIT_S = 1800.0


class Kills(FaultClass):
    """Each round of roles shifts the phases by one, so that all pairs come up."""

    name = "kills"
    title = "kill −9 of any process in any phase, live"
    whole, quick = 30, 3

    def inject(self, number: int, rng: random.Random) -> FaultOutcome:
        role = ROLES[number % len(ROLES)]
        phase = PHASES[(number + number // len(ROLES)) % len(PHASES)]
        return _disturb(self.workshop, role, phase, signal.SIGKILL, rng, LIMIT_S)


PLACES = (
    ("reward worker", "reward"),
    ("engine core", "rollout"),
    ("vLLM worker", "sync"),
    ("rank 1", "update"),
    ("vLLM worker", "rollout"),
    ("engine core", "sync"),
    ("rank 1", "score"),
    ("reward worker", "rollout"),
)


class Hangs(FaultClass):
    name = "hangs"
    title = "SIGSTOP of engine core, vLLM worker, rank, reward worker, live"
    whole, quick = len(PLACES), 1

    def inject(self, number: int, rng: random.Random) -> FaultOutcome:
        role, phase = PLACES[number % len(PLACES)]
        return _disturb(self.workshop, role, phase, signal.SIGSTOP, rng, LIMIT_S)
