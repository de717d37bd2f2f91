"""Every class of faults, in the order in which they are injected: what needs no server first; and the two lanes."""

from __future__ import annotations

from tepo_megatron.tools.faults.answers import HostileAnswers
from tepo_megatron.tools.faults.configs import MalformedConfigs
from tepo_megatron.tools.faults.damage import CheckpointDamage
from tepo_megatron.tools.faults.disks import FullDisks
from tepo_megatron.tools.faults.hangs import Hangs
from tepo_megatron.tools.faults.kills import Kills
from tepo_megatron.tools.faults.outcome import FaultClass
from tepo_megatron.tools.faults.silent import SilentFaults
from tepo_megatron.tools.faults.strangers import Strangers

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
    """What is injected side by side, since either lane often waits for processes to start. Each has a live run of its own,
    but for ``quick``, where a second one would cost more time than it spares.
    """
    first = _LIVE if quick else (Kills,)
    return {"first": first, "second": tuple(kind for kind in CLASSES if kind not in first)}
