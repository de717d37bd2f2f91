"""Every class of faults, in the order in which they are injected: what needs no server first; and the two lanes."""

from __future__ import annotations

from tepo_megatron.faults.answers import HostileAnswers
from tepo_megatron.faults.configs import MalformedConfigs
from tepo_megatron.faults.damage import CheckpointDamage
from tepo_megatron.faults.disks import FullDisks
from tepo_megatron.faults.hangs import Hangs
from tepo_megatron.faults.kills import Kills
from tepo_megatron.faults.outcome import FaultClass
from tepo_megatron.faults.silent import SilentFaults
from tepo_megatron.faults.strangers import Strangers

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

LANES = {"kills": (Kills,), "others": tuple(kind for kind in CLASSES if kind is not Kills)}
"""What is injected side by side, each lane into a live run of its own: a lane often waits for processes to start."""
