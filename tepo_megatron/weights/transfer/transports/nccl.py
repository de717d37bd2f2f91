"""Messages over NCCL in one communicator, one group call per round (decision 009). Not run on a GPU yet."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from tepo_megatron.runtime.machine import changed_environment
from tepo_megatron.weights.transfer.transport import Member, Rendezvous, TransferGroup, TransportSpec

_POLL_INTERVAL_S = 5e-5

FAILURE_POLL_INTERVAL_S = 0.2
"""Within a node NCCL does not notice that a rank has left."""

_ABORT_GRACE_S = 10.0
"""An abort can hang in the driver; training continues with a new communicator."""


class _NcclGroup(TransferGroup):
    def __init__(
        self, group: Any, abort: Callable[[], None], rendezvous: Rendezvous, device: torch.device, timeout_s: float
    ) -> None:
        self._group, self._abort, self._rendezvous = group, abort, rendezvous
        self._device, self._timeout_s = device, timeout_s
        self._round: list[tuple[int, int]] | None = None
        self._pending: dict[tuple[int, int], Any] = {}
        self._failure: str | None = None
        self._deadline = 0.0
        self._in_call, self._closed = threading.Event(), False
        self._watcher = threading.Thread(target=self._watch, name="watch-transfer", daemon=True)

    def device(self, peer: int) -> torch.device:
        return self._device

    @contextmanager
    def round(self) -> Iterator[None]:
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
        if not self._watcher.ident:
            self._watcher.start()
        self._deadline = time.monotonic() + self._timeout_s
        self._in_call.set()
        try:
            return self._group._end_coalescing(self._device)
        except RuntimeError as error:
            raise RuntimeError(f"NCCL could not start a round of messages: {self._failure or error}") from error
        finally:
            self._in_call.clear()

    def _watch(self) -> None:
        """NCCL blocks a group call until both ranks are in the round."""
        while self._in_call.wait():
            time.sleep(FAILURE_POLL_INTERVAL_S)
            if self._closed:
                return
            if self._in_call.is_set() and (reason := self._failure_reason(self._deadline)):
                self._failure = reason
                self._abort()
                return

    def _failure_reason(self, deadline: float) -> str | None:
        if time.monotonic() > deadline:
            return f"NCCL did not finish the round of this message within {self._timeout_s:g} s"
        if self.cancelled():
            return "a receiver failed"
        if self._rendezvous.member_left():
            return "another member has left the weight-transfer group"
        return None

    def send(self, data: Tensor, peer: int, number: int) -> None:
        self._add(peer, number)
        self._group.send([data], peer, 0)  # NCCL has no tags: it matches messages by their order

    def receive(self, data: Tensor, peer: int, number: int) -> None:
        self._add(peer, number)
        self._group.recv([data], peer, 0)

    def _add(self, peer: int, number: int) -> None:
        assert self._round is not None, "messages are started within round()"
        self._round.append((peer, number))

    def wait(self, peer: int, number: int) -> None:
        if self._failure:  # the watching thread aborted just when the round had started
            raise RuntimeError(self._failure)
        work = self._pending.pop((peer, number))
        deadline, next_check = time.monotonic() + self._timeout_s, time.monotonic() + FAILURE_POLL_INTERVAL_S
        while not work.is_completed():
            if time.monotonic() > next_check:
                if reason := self._failure_reason(deadline):
                    raise RuntimeError(reason)
                next_check = time.monotonic() + FAILURE_POLL_INTERVAL_S
            time.sleep(_POLL_INTERVAL_S)
        work.wait()  # raises the round's error, if it has one

    def close(self) -> None:
        Rendezvous.announce_departure(self._rendezvous.store)
        self._pending, self._closed = {}, True
        self._in_call.set()  # the watcher ends
        aborting = threading.Thread(target=self._abort, name="abort-transfer-group", daemon=True)
        aborting.start()
        aborting.join(_ABORT_GRACE_S)


def _join(store: Store, member: Member, timeout_s: float) -> _NcclGroup:
    rendezvous = Rendezvous(store, member.world_size, timeout_s)
    with rendezvous.forming_group():
        group, backend = _process_group(store, member.rank, member.world_size)
        _connect(backend, member.device, rendezvous, timeout_s)
    return _NcclGroup(group, backend.abort, rendezvous, member.device, timeout_s)


TRANSPORT = TransportSpec(join=_join, requires_gpu=True, staging_bytes=2**30, fills=True)


def _process_group(store: Store, rank: int, world_size: int) -> tuple[Any, Any]:
    from torch.distributed import ProcessGroup, ProcessGroupNCCL  # absent from CPU builds

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(days=365)  # `wait` has the limit; after one of torch's, the process is ended minutes later
    with changed_environment(TORCH_NCCL_ASYNC_ERROR_HANDLING="0"):  # by default torch ends the process when an operation fails
        backend = ProcessGroupNCCL(store, rank, world_size, options)
    group = ProcessGroup(store, rank, world_size)
    group._set_default_backend(ProcessGroup.BackendType.NCCL)
    group._register_backend(torch.device("cuda"), ProcessGroup.BackendType.NCCL, backend)
    return group, backend


def _connect(backend: Any, device: torch.device, rendezvous: Rendezvous, timeout_s: float) -> None:
    connected: Future[None] = Future()

    def connect() -> None:
        try:
            connected.set_result(backend.eager_connect_single_device(device))
        except BaseException as error:
            connected.set_exception(error)

    threading.Thread(target=connect, name="join-nccl", daemon=True).start()
    deadline = time.monotonic() + timeout_s
    while not wait([connected], FAILURE_POLL_INTERVAL_S).done:
        if rendezvous.member_left():
            raise RuntimeError("a member left while NCCL connected the weight-transfer group")
        if time.monotonic() > deadline:
            raise RuntimeError(f"NCCL did not connect the weight-transfer group within {timeout_s:g} s")
    connected.result()
