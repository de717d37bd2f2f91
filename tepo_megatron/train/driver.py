"""What the loop asks of a rank beside training, and what every rank but 0 answers; rank 0 has a ``RootDriver``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tepo_megatron.types import Rollout, WeightsVersion

if TYPE_CHECKING:
    from tepo_megatron.engine.engine import Engine

T = TypeVar("T")


class Driver(Protocol):
    """One per rank. Only rank 0's returns rollouts; what the other ranks' returns is not read."""

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]: ...
    def attempt(self, work: Callable[[], T | None]) -> tuple[T | None, bool]:
        """The result of ``work``, and whether a server died under it, was revived, and now has stale weights."""

    def ready(self) -> None:
        """Returns when the servers answer."""

    def collect(self, step: int) -> list[Rollout] | None: ...
    def publish(self, version: WeightsVersion, engine: Engine) -> bool:
        """Hands the engine's weights over; whether a server died under it."""

    def wake(self, died: bool) -> bool:
        """After ``publish``, which returned ``died``: has the servers sample again, the dead revived; whether some weights are
        stale.
        """

    def rest(self) -> None:
        """Has servers that share the trainer's GPUs sleep, until the next ``publish`` and ``wake``."""

    def compare(self, step: int, prompt: Sequence[int], logprobs: Sequence[float]) -> None:
        """Holds the servers' log-probs of a prompt against the trainer's; RuntimeError where they are too far apart."""

    def evaluate(self, step: int) -> None: ...
    def logged(self, step: int) -> bool:
        """Whether the run has a row of metrics of that step."""

    def log(self, step: int, row: Mapping[str, float]) -> None: ...
    def state(self) -> dict[str, Any]: ...
    def close(self) -> None: ...


class Follower:
    """Every rank but 0: takes part in handing over the weights, and otherwise waits in the engine's collectives."""

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def attempt(self, work: Callable[[], T | None]) -> tuple[T | None, bool]:
        return None, False

    def ready(self) -> None:
        return None

    def collect(self, step: int) -> None:
        return None

    def publish(self, version: WeightsVersion, engine: Engine) -> bool:
        if engine.config.rollout.replay is None:
            if engine.config.rollout.server.transfer == "reshard":
                engine.sender.follow()
            else:
                exhaust(engine.stream_weights())
        return False

    def wake(self, died: bool) -> bool:
        return False

    def rest(self) -> None:
        return None

    def compare(self, step: int, prompt: Sequence[int], logprobs: Sequence[float]) -> None:
        return None

    def evaluate(self, step: int) -> None:
        return None

    def logged(self, step: int) -> bool:
        return False

    def log(self, step: int, row: Mapping[str, float]) -> None:
        return None

    def state(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        return None


def exhaust(stream: Iterable[object]) -> None:
    for _ in stream:
        continue
