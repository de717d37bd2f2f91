"""What the loop asks of a rank beside training, and what every rank but 0 answers; rank 0 has a ``RootDriver``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.core.types import Batch
from tepo_megatron.runtime.watch.heartbeat import Heartbeat

if TYPE_CHECKING:
    from tepo_megatron.run.output.resume import Resumed
    from tepo_megatron.run.weights import WeightPublisher
    from tepo_megatron.trainer.protocol import UpdateResult

T = TypeVar("T")


class Driver(Protocol):
    """One per rank. Only rank 0's returns rollouts; what the other ranks' returns is not read."""

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]: ...
    def run_or_revive(self, work: Callable[[], T | None]) -> tuple[T | None, bool]:
        """The result of ``work``, and whether a server died under it, was revived, and now has stale weights."""

    def wait_until_ready(self) -> None:
        """Returns when the servers answer."""

    def collect(self, step: int) -> list[Rollout] | None: ...
    def update_weights(self, version: WeightsVersion, publisher: WeightPublisher) -> bool:
        """This rank's part of a weight update; whether a server died under it. Dead servers stay dead until
        :meth:`revive_or_wake`, since revived ones need GPU memory that the trainer may still hold.
        """

    def revive_or_wake(self, died: bool) -> bool:
        """After :meth:`update_weights`, which returned ``died``: dead servers are revived, or else sleeping ones woken; whether
        some weights are stale.
        """

    def sleep_servers(self) -> None:
        """Has servers that share the trainer's GPUs sleep, until the next weight update."""

    def check_canary(self, step: int, prompt: Sequence[int], logprobs: Sequence[float]) -> None:
        """Compares the servers' log-probs of a prompt with the trainer's; RuntimeError where they are too far apart."""

    def check_rollouts(self, step: int, parts: Sequence[Batch]) -> None:
        """Compares the sampler's log-probs of a step's scored mini-batches with the trainer's; RuntimeError where a group of
        them was not drawn from the trainer's policy.
        """

    def keep_skipped(self, step: int, skipped: Sequence[Mapping[str, Any]]) -> Path | None:
        """Saves the rollouts that :meth:`collect` gave last, some of whose mini-batches were ``skipped``; returns the file."""

    def go_back(self, found: Resumed, sentence: str) -> None:
        """Forgets the rows beyond the checkpoint's step, from which the run goes on with other problems than those that it
        drew since, and sets damaged checkpoints aside.
        """

    def goes_on(self, step: int) -> bool:
        """Whether a run of so many completed steps trains another one: there are more to come, and no callback ended it."""

    def evaluate(self, step: int) -> None: ...
    def has_logged(self, step: int) -> bool:
        """Whether the run has a row of metrics of that step."""

    def log(self, step: int, row: Mapping[str, float]) -> None: ...
    def note_step(self, step: int, row: Mapping[str, float], parts: Sequence[Batch], updates: Sequence[UpdateResult]) -> None:
        """What is known of a step when its updates are done: its figures, which a checkpoint keeps until they are logged, and
        token values of its scored mini-batches, which are written where they are recorded.
        """

    def state(self) -> dict[str, Any]: ...
    def drop_step(self, step: int) -> None:
        """The step after ``step`` completed ones is given up, if it was begun: its problems are drawn again."""

    def message(self, text: str) -> None:
        """Tells the user."""

    def close(self) -> None: ...


class NonRootDriver:
    """Every rank but 0: takes part in weight updates, and otherwise waits in the engine's collectives."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        self._heartbeat.phase(name)
        return contextlib.nullcontext()

    def run_or_revive(self, work: Callable[[], T | None]) -> tuple[T | None, bool]:
        return None, False

    def wait_until_ready(self) -> None:
        self._heartbeat.phase("servers")

    def collect(self, step: int) -> None:
        return None

    def update_weights(self, version: WeightsVersion, publisher: WeightPublisher) -> bool:
        publisher.update_weights(version)
        return False

    def revive_or_wake(self, died: bool) -> bool:
        return False

    def sleep_servers(self) -> None:
        return None

    def check_canary(self, step: int, prompt: Sequence[int], logprobs: Sequence[float]) -> None:
        return None

    def check_rollouts(self, step: int, parts: Sequence[Batch]) -> None:
        return None

    def keep_skipped(self, step: int, skipped: Sequence[Mapping[str, Any]]) -> None:
        return None

    def go_back(self, found: Resumed, sentence: str) -> None:
        return None

    def goes_on(self, step: int) -> bool:
        return False

    def evaluate(self, step: int) -> None:
        return None

    def has_logged(self, step: int) -> bool:
        return False

    def log(self, step: int, row: Mapping[str, float]) -> None:
        self._heartbeat.step(step)

    def note_step(self, step: int, row: Mapping[str, float], parts: Sequence[Batch], updates: Sequence[UpdateResult]) -> None:
        return None

    def state(self) -> dict[str, Any]:
        return {}

    def drop_step(self, step: int) -> None:
        return None

    def message(self, text: str) -> None:
        return None

    def close(self) -> None:
        return None
