"""kill −9, over all roles and phases; live sampling goes on, or is resumed, to the same weights, bit for bit."""

from __future__ import annotations

import random
import signal

from tepo_megatron.tools.faults.disturb import WITHIN_S, disturb
from tepo_megatron.tools.faults.outcome import FaultClass, Outcome

ROLES = ("engine core", "parent", "reward worker", "rank 1", "API server", "rank 0", "vLLM worker", "supervisor")
PHASES = tuple(WITHIN_S)
LIMIT_S = 1800.0


class Kills(FaultClass):
    """Every role in turn; the phases go round once less often, so that all pairs come up in the end."""

    name = "kills"
    title = "kill −9 of any process in any phase, live"
    whole, quick = 30, 3

    def inject(self, number: int, rng: random.Random) -> Outcome:
        role = ROLES[number % len(ROLES)]
        phase = PHASES[(number + number // len(ROLES)) % len(PHASES)]
        return disturb(self.workshop, role, phase, signal.SIGKILL, rng, LIMIT_S)
