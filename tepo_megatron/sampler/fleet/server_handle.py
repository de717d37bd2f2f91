"""The servers of a fleet as a stream of samples sees them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from tepo_megatron.core.rollout import WeightsVersion
from tepo_megatron.sampler.vllm.client.client import Client
from tepo_megatron.sampler.vllm.client.faults import ServerFault


@dataclass
class Lane:
    """One server that samples. ``healthy`` asks whether it says that it works; ``index`` is its number in the fleet.

    Its requests wait in threads of its own: those of a server that hangs must not keep the others' from starting.
    """

    index: int
    client: Client
    pool: ThreadPoolExecutor
    healthy: Callable[[], bool]
    samples: int = 0
    """That it owes."""
    tokens: int = 0
    """That it may have to read and draw for them."""
    faults: int = 0
    """In a row."""


class Host(Protocol):
    """What a stream asks of its fleet."""

    @property
    def updating(self) -> bool:
        """Whether the servers are getting new weights just now, for which they hold their requests."""

    def lanes(self) -> Sequence[Lane]:
        """The servers that sample, each time new."""

    def published(self) -> int:
        """How many weights the servers have been given so far, those that all of them have now included."""

    def versions(self, since: int) -> Sequence[WeightsVersion]:
        """The weights that were given to the servers, the last of the first ``since`` and all after it."""

    def lose(self, lane: Lane, cause: ServerFault) -> None:
        """A server is dead, hangs or answers wrongly. May raise to end everything."""

    def raise_if_dead(self, cause: Exception) -> None:
        """Raises ServerDied if ``cause`` is the consequence of one that is gone."""

    def count_retried(self, requests: int) -> None:
        """So many requests were asked again."""
