"""NCCL's point-to-point semantics between threads: what its documentation promises, and not more.

A rank's group calls run one after the other. An operation starts when its group does, and waits for its counterpart, which is
told by the pair of ranks and the order alone. A group ends when all its operations have; memory may be read or written at any
moment until then (here: some time after both sides have come, by the seed).
"""

from __future__ import annotations

import random
import threading
from collections import defaultdict, deque
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
    """What is_completed of torch's work tells."""

    fabric: Fabric
    operations: list[Operation] = field(default_factory=list)

    def is_completed(self) -> bool:
        self.fabric.progress()
        return all(operation.done for operation in self.operations)

    def wait(self) -> None:
        assert self.is_completed()


class Fabric:
    """All ranks of one communicator. ``dead`` ranks do nothing any more."""

    def __init__(self, seed: int = 0) -> None:
        self._lock = threading.Lock()
        self._random = random.Random(seed)
        self._streams: dict[int, deque[GroupCall]] = defaultdict(deque)
        self.dead: set[int] = set()

    def submit(self, rank: int, call: GroupCall) -> None:
        with self._lock:
            self._streams[rank].append(call)

    def progress(self) -> None:
        with self._lock:
            for stream in self._streams.values():
                while stream and all(operation.done for operation in stream[0].operations):
                    stream.popleft()
            running = [(rank, stream[0]) for rank, stream in self._streams.items() if stream and rank not in self.dead]
            sends, receives = {}, {}
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
    """Of torch's process group, what a coalesced round needs."""

    def __init__(self, fabric: Fabric, rank: int) -> None:
        self.fabric, self.rank = fabric, rank
        self.call: GroupCall | None = None

    def _start_coalescing(self, device: torch.device) -> None:
        assert self.call is None
        self.call = GroupCall(self.fabric)

    def send(self, tensors: list[Tensor], destination: int, tag: int) -> None:
        self._add(Operation(self.rank, destination, *tensors))

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> None:
        self._add(Operation(source, self.rank, *tensors))

    def _add(self, operation: Operation) -> None:
        assert self.call is not None, "outside a group call NCCL would make a communicator of two"
        self.call.operations.append(operation)

    def _end_coalescing(self, device: torch.device) -> GroupCall:
        assert self.call is not None
        assert self.call.operations, "an empty group call has no work"
        call, self.call = self.call, None
        self.fabric.submit(self.rank, call)
        return call
