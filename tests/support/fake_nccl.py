"""NCCL's point-to-point semantics between threads: what its documentation promises, and not more.

A rank's group calls run one after the other. An operation starts when its group does, and waits for its counterpart, which
the pair of ranks and the order alone determine. A group ends when all its operations have; memory may be read or written at any
moment until then (here: some time after both sides have come, by the seed). Two ranks are connected in the first group call
that they share, and the call blocks its thread until both are in it or the rank's communicator is aborted.
"""

from __future__ import annotations

import random
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Operation:
    source: int
    destination: int
    data: Tensor
    done: bool = False


@dataclass
class GroupCall:
    """A group call, with the ``is_completed`` and ``wait`` of torch's work."""

    fabric: Fabric
    operations: list[Operation] = field(default_factory=list)

    def is_completed(self) -> bool:
        self.fabric.progress()
        return all(operation.done for operation in self.operations)

    def wait(self) -> None:
        assert self.is_completed()


class Fabric:
    """All ranks of one communicator. ``lives``: after how many group calls a rank dies, which is to do nothing any more.

    ``connected``: all ranks are, so that no group call blocks.
    """

    def __init__(self, seed: int = 0, *, lives: Mapping[int, int] | None = None, connected: bool = False) -> None:
        self._lock = threading.Lock()
        self._random = random.Random(seed)
        self._streams: dict[int, deque[GroupCall]] = defaultdict(deque)
        self._lives, self._connected = dict(lives or {}), connected
        self._calls: Counter[int] = Counter()
        self._came: set[tuple[int, int, int]] = set()
        self._coming = threading.Condition()

    def connect(self, rank: int, call: GroupCall, aborted: threading.Event) -> None:
        pairs = {(operation.source, operation.destination) for operation in call.operations}
        with self._coming:
            self._calls[rank] += 1
            if not self._dead(rank):
                self._came |= {(rank, *pair) for pair in pairs}
                self._coming.notify_all()
            awaited = {(end, *pair) for pair in pairs for end in pair}
            self._coming.wait_for(lambda: self._connected or awaited <= self._came or aborted.is_set())
        if aborted.is_set():
            raise RuntimeError("NCCL communicator was aborted")

    def abort(self, aborted: threading.Event) -> None:
        with self._coming:
            aborted.set()
            self._coming.notify_all()

    def _dead(self, rank: int) -> bool:
        return self._calls[rank] > self._lives.get(rank, self._calls[rank])

    def submit(self, rank: int, call: GroupCall) -> None:
        with self._lock:
            self._streams[rank].append(call)

    def progress(self) -> None:
        with self._lock:
            for stream in self._streams.values():
                while stream and all(operation.done for operation in stream[0].operations):
                    stream.popleft()
            running = [(rank, stream[0]) for rank, stream in self._streams.items() if stream and not self._dead(rank)]
            sends: dict[tuple[int, int], Operation] = {}
            receives: dict[tuple[int, int], Operation] = {}
            for rank, call in running:
                for operation in (operation for operation in call.operations if not operation.done):
                    ends = sends if operation.source == rank else receives
                    ends.setdefault((operation.source, operation.destination), operation)  # the first of the pair
            for pair in sends.keys() & receives.keys():
                if self._random.random() < 0.7:
                    self._match(sends[pair], receives[pair])

    def _match(self, sent: Operation, received: Operation) -> None:
        assert (sent.data.shape, sent.data.dtype) == (received.data.shape, received.data.dtype)
        assert sent.data.is_contiguous()
        assert received.data.is_contiguous()
        received.data.copy_(sent.data)
        sent.done = received.done = True


class FakeProcessGroup:
    """The part of torch's process group that a coalesced round needs."""

    def __init__(self, fabric: Fabric, rank: int) -> None:
        self.fabric, self.rank = fabric, rank
        self.call: GroupCall | None = None
        self.aborted = threading.Event()

    def abort(self) -> None:
        self.fabric.abort(self.aborted)

    def _start_coalescing(self, device: torch.device) -> None:
        assert self.call is None
        self.call = GroupCall(self.fabric)

    def send(self, tensors: list[Tensor], destination: int, tag: int) -> None:
        (data,) = tensors
        self._add(Operation(self.rank, destination, data))

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> None:
        (data,) = tensors
        self._add(Operation(source, self.rank, data))

    def _add(self, operation: Operation) -> None:
        assert self.call is not None, "outside a group call NCCL would make a communicator of two"
        self.call.operations.append(operation)

    def _end_coalescing(self, device: torch.device) -> GroupCall:
        assert self.call is not None
        assert self.call.operations, "an empty group call has no work"
        call, self.call = self.call, None
        self.fabric.connect(self.rank, call, self.aborted)
        self.fabric.submit(self.rank, call)
        return call
