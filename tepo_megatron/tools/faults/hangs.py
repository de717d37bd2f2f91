"""SIGSTOP: a process that is there and does not answer. The run goes on, or ends and is resumed, to the same weights."""

from __future__ import annotations

import random
import signal

from tepo_megatron.tools.faults.disturb import disturb
from tepo_megatron.tools.faults.outcome import FaultClass, Outcome

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
LIMIT_S = 1800.0


class Hangs(FaultClass):
    name = "hangs"
    title = "SIGSTOP of engine core, vLLM worker, rank, reward worker, live"
    whole, quick = len(PLACES), 1

    def inject(self, number: int, rng: random.Random) -> Outcome:
        role, phase = PLACES[number % len(PLACES)]
        return disturb(self.workshop, role, phase, signal.SIGSTOP, rng, LIMIT_S)
