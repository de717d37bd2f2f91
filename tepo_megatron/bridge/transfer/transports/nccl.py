"""Messages over NCCL, from GPU to GPU, apart from torch's default group. Not run on a GPU yet.

One communicator for all members; every round is one NCCL group call, so that its messages travel at once. A rank's rounds run
one after the other on the communicator's stream, and message n of any two ranks is in round n of both, so that no ranks can
wait for each other in a circle (docs/decisions/009-transports-and-placement.md). A thread watches the group call itself, which
blocks while NCCL connects ranks, and aborts the communicator when a rank does not come.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tepo_megatron.bridge.transfer.transport import Meeting

POLL_S = 5e-5

LOOK_ROUND_S = 0.2
"""How often a waiting rank looks whether another one has left: NCCL itself does not notice that within a node."""

ABORT_GRACE_S = 10.0
"""How long aborting is waited for: it can hang in the driver, and the run goes on with a new communicator."""

_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class NcclGroup:
    """The trainer's ranks and all workers, on one GPU each. It is a ``bridge.transfer.transport.Group``.

    ``group`` is torch's process group, with point-to-point operations that can be coalesced; ``abort`` ends its communicator
    with everything that is pending in it.
    """

    def __init__(self, group: Any, abort: Callable[[], None], meeting: Meeting, device: torch.device, timeout_s: float) -> None:
        self._group, self._abort, self._meeting = group, abort, meeting
        self._device, self._timeout_s = device, timeout_s
        self._round: list[tuple[int, int]] | None = None
        self._pending: dict[tuple[int, int], Any] = {}
        self._given_up: str | None = None
        self.cancelled: Callable[[], bool] = lambda: False

    def device(self, peer: int) -> torch.device:
        return self._device

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        started: list[tuple[int, int]] = []
        self._round = started
        self._group._start_coalescing(self._device)
        try:
            yield
        finally:  # also after an error: NCCL's group call must be closed before this thread makes another one
            self._round = None
            work = self._end_round()
        self._pending.update(dict.fromkeys(started, work))

    def _end_round(self) -> Any:
        """NCCL connects two ranks in the first round that they share, and blocks this thread until both are in it."""
        ended = threading.Event()
        threading.Thread(target=self._abort_unless, args=(ended,), name="watch-transfer-round", daemon=True).start()
        try:
            return self._group._end_coalescing(self._device)
        except RuntimeError as error:
            raise RuntimeError(f"NCCL could not start a round of messages: {self._given_up or error}") from error
        finally:
            ended.set()

    def _abort_unless(self, ended: threading.Event) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not ended.wait(LOOK_ROUND_S):
            if reason := self._hopeless(deadline):
                self._given_up = reason
                self._abort()
                return

    def _hopeless(self, deadline: float) -> str | None:
        """Why this round will not end, or need not be waited for any more."""
        if time.monotonic() > deadline:
            return f"NCCL did not finish the round of this message within {self._timeout_s:g} s"
        if self.cancelled():
            return "a receiver failed"
        if self._meeting.broken():
            return "another member has left the weight-transfer group"
        return None

    def send(self, data: Tensor, peer: int, number: int) -> None:
        """Start to send a contiguous tensor of this GPU to ``peer``; it must not change until :meth:`finish`."""
        self._add(peer, number)
        self._group.send([data], peer, 0)  # NCCL has no tags: the order tells

    def receive(self, data: Tensor, peer: int, number: int) -> None:
        """Start to fill a contiguous tensor of this GPU with the message ``number`` of ``peer``."""
        self._add(peer, number)
        self._group.recv([data], peer, 0)

    def _add(self, peer: int, number: int) -> None:
        assert self._round is not None, "messages are started within together()"
        self._round.append((peer, number))

    def finish(self, peer: int, number: int) -> None:
        """Wait for the round of a message. Raises RuntimeError on an error of NCCL, after the time-out, when :attr:`cancelled`
        says so, and when another member has left.
        """
        if self._given_up:  # aborted in the moment in which its round started
            raise RuntimeError(self._given_up)
        work = self._pending.pop((peer, number))
        deadline, look = time.monotonic() + self._timeout_s, time.monotonic() + LOOK_ROUND_S
        while not work.is_completed():
            if time.monotonic() > look:
                if reason := self._hopeless(deadline):
                    raise RuntimeError(reason)
                look = time.monotonic() + LOOK_ROUND_S
            time.sleep(POLL_S)
        work.wait()  # raises what went wrong

    def close(self) -> None:
        """Leave the group and abort what is pending; the other members notice within a second."""
        self._meeting.leave()
        self._pending = {}
        aborting = threading.Thread(target=self._abort, name="abort-transfer-group", daemon=True)
        aborting.start()
        aborting.join(ABORT_GRACE_S)


def join_nccl(store: TCPStore, rank: int, world_size: int, device: torch.device, timeout_s: float) -> NcclGroup:
    """Makes the communicator; returns when all members have come. Raises RuntimeError if they do not, or NCCL fails."""
    meeting = Meeting(store, world_size, timeout_s)
    with meeting.entering():
        group, backend = _process_group(store, rank, world_size, timeout_s)
        _within(timeout_s, lambda: backend.eager_connect_single_device(device), meeting)
    return NcclGroup(group, backend.abort, meeting, device, timeout_s)


def _process_group(store: TCPStore, rank: int, world_size: int, timeout_s: float) -> tuple[Any, Any]:
    """torch's group, which coalesces, and the backend in it, which knows NCCL."""
    from torch.distributed import ProcessGroup, ProcessGroupNCCL  # absent from CPU builds

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    with _errors_are_ours():
        backend = ProcessGroupNCCL(store, rank, world_size, options)
    group = ProcessGroup(store, rank, world_size)
    group._set_default_backend(ProcessGroup.BackendType.NCCL)
    group._register_backend(torch.device("cuda"), ProcessGroup.BackendType.NCCL, backend)
    return group, backend


@contextlib.contextmanager
def _errors_are_ours() -> Iterator[None]:
    """A group made within does not end the process when an operation fails or times out, which is torch's default.

    The variable is read when a group is made, and by no other way can this be said of one group.
    """
    before = os.environ.get(_ERROR_HANDLING)
    os.environ[_ERROR_HANDLING] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ERROR_HANDLING]
        else:
            os.environ[_ERROR_HANDLING] = before


def _within(timeout_s: float, work: Callable[[], None], meeting: Meeting) -> None:
    """Does what blocks for as long as a member is missing, in a thread that is given up after the time-out."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            work()
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="join-nccl", daemon=True).start()
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return done.result(LOOK_ROUND_S)
        except FutureTimeoutError:
            if meeting.broken():
                raise RuntimeError("a member left while NCCL connected the weight-transfer group") from None
            if time.monotonic() > deadline:
                raise RuntimeError(f"NCCL did not connect the weight-transfer group within {timeout_s:g} s") from None
