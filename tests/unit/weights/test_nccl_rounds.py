"""NCCL transport over a stand-in for NCCL: no plan can deadlock it, no buffer is touched too early, no dead rank hangs it.

NCCL itself: tests/gpu.
"""

from __future__ import annotations

import random
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from tepo_megatron.weights.layouts import MegatronParallel, VllmParallel
from tepo_megatron.weights.transfer.transport import Member, Rendezvous, TransferGroup
from tepo_megatron.weights.transfer.transports import nccl
from tests.support.programs import TIMEOUT_S
from tests.support.reshard_models import Case, cases, small_spec
from tests.support.transfers import SIZES, assert_all_arrives, blank, carry_out, setting

CPU = torch.device("cpu")
TWO_TO_TWO = Case(small_spec(), MegatronParallel(2, 1), VllmParallel(2), {})


# Stand-in for NCCL: point-to-point between threads, with what its documentation promises and no more. A rank's group calls run
# one after the other. An operation starts with its group and waits for its counterpart, given by the pair of ranks and the
# order. Memory may be read or written until a group ends (here: at a time after both sides have come, by the seed). The first
# group call that two ranks share blocks its thread until both are in it or the communicator is aborted.


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
                    sent, received = sends[pair], receives[pair]
                    assert (sent.data.shape, sent.data.dtype) == (received.data.shape, received.data.dtype)
                    assert sent.data.is_contiguous()
                    assert received.data.is_contiguous()
                    received.data.copy_(sent.data)
                    sent.done = received.done = True


class FakeProcessGroup:
    """The parts of torch's process group and of its back end that a coalesced round needs."""

    def __init__(self, fabric: Fabric, rank: int) -> None:
        self.fabric, self.rank = fabric, rank
        self.call: GroupCall | None = None
        self.aborted = threading.Event()

    def eager_connect_single_device(self, device: torch.device) -> None: ...

    def abort(self) -> None:
        self.fabric.abort(self.aborted)

    def _start_coalescing(self, device: torch.device) -> None:
        assert self.call is None
        self.call = GroupCall(self.fabric)

    def send(self, tensors: list[Tensor], destination: int, tag: int) -> None:
        self._add(Operation(self.rank, destination, tensors[0]))

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> None:
        self._add(Operation(source, self.rank, tensors[0]))

    def _add(self, operation: Operation) -> None:
        assert self.call is not None, "outside a group call NCCL would make a communicator of two"
        self.call.operations.append(operation)

    def _end_coalescing(self, device: torch.device) -> GroupCall:
        assert self.call.operations, "an empty group call has no work"
        call, self.call = self.call, None
        self.fabric.connect(self.rank, call, self.aborted)
        self.fabric.submit(self.rank, call)
        return call


def join(store: Store, rank: int, world: int, made: FakeProcessGroup, timeout_s: float) -> TransferGroup:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nccl, "_process_group", lambda *_: (made, made))
        return nccl.TRANSPORT.join(store, Member(rank, world, CPU, ""), timeout_s)


def groups(world: int, fabric: Fabric, *, timeout_s: float = TIMEOUT_S) -> list[TransferGroup]:
    store = HashStore()
    store.add("joined", world - 1)  # they join one after the other
    return [join(store, rank, world, FakeProcessGroup(fabric, rank), timeout_s) for rank in range(world)]


@settings(max_examples=15)
@given(case=cases(), **SIZES, seed=st.integers(0, 2**16))
def test_whatever_the_plan_all_rounds_end_and_bring_what_they_should(case: Case, limit: int, alone: int, seed: int) -> None:
    assert_all_arrives(case, limit=limit, alone=alone, boxes=lambda plan: groups(plan.world_size, Fabric(seed)))


@pytest.mark.parametrize(
    ("lives", "where"),
    [(0, "NCCL could not start a round of messages:"), (2, r"(sending '.*' to rank \d failed|NCCL could not start .*):")],
    ids=["never comes", "dies later"],
)
@pytest.mark.parametrize("cause", ["time-out", "another rank leaves", "cancelled"])
def test_a_dead_worker_ends_the_sending_of_all_ranks(
    cause: str, lives: int, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "FAILURE_POLL_INTERVAL_S", 0.01)
    plan, sources, expected = setting(TWO_TO_TWO)
    timeout_s = 1.0 if cause == "time-out" else TIMEOUT_S
    boxes = groups(4, Fabric(lives={3: lives}, connected=lives > 0), timeout_s=timeout_s)
    if cause == "cancelled":
        boxes[0].cancelled = lambda: True
    elif cause != "time-out":
        threading.Timer(0.2, Rendezvous.announce_departure, [boxes[1]._rendezvous.store]).start()  # type: ignore[attr-defined]
    found = [blank(params) for params in expected]

    first = {"time-out": "NCCL did not finish", "another rank leaves": "another member", "cancelled": "a receiver"}[cause]
    with pytest.raises(RuntimeError, match=rf"{where} ({first}|another member)") as caught:  # the machine decides who is first
        carry_out(plan, sources, found, limit=64, boxes=boxes)  # and all threads have ended
    assert first in str(caught.value)
    assert cause == "time-out" or "did not finish" not in str(caught.value)


def test_one_thread_of_a_rank_watches_all_rounds_and_ends_with_the_group() -> None:
    boxes = groups(4, Fabric())
    with mock.patch.object(threading.Thread, "start", autospec=True, side_effect=threading.Thread.start) as start:
        assert_all_arrives(TWO_TO_TWO, limit=64, alone=64, boxes=lambda _: boxes, updates=2)
    watchers = [call.args[0] for call in start.call_args_list if call.args[0].name.startswith("watch-transfer")]
    assert len(watchers) == 4
    for box in boxes:
        box.close()
    assert not any(watcher.join(TIMEOUT_S) or watcher.is_alive() for watcher in watchers)


def test_a_failure_within_a_round_closes_the_group_call() -> None:
    """NCCL counts open group calls by thread: the trainer's own communication comes next in this one."""
    made, store = FakeProcessGroup(Fabric(connected=True), 0), HashStore()
    group = join(store, 0, 1, made, TIMEOUT_S)

    def fail() -> None:
        with group.round():
            group.send(torch.zeros(1), 1, 0)
            raise ValueError("unpacked")

    with pytest.raises(ValueError, match="unpacked"):
        fail()
    assert made.call is None
    with pytest.raises(AssertionError, match="within round"):
        group.send(torch.zeros(1), 1, 1)


@pytest.mark.parametrize("kind", ["late", "refused", "left"])
def test_connecting_ends_when_a_member_leaves_or_is_late(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    message = {"late": "the weight-transfer group within 0.1 s", "left": "a member left while NCCL connected"}.get(kind, kind)
    monkeypatch.setattr(nccl, "FAILURE_POLL_INTERVAL_S", 0.01)
    never, store = threading.Event(), HashStore()

    class Hanging(FakeProcessGroup):
        def eager_connect_single_device(self, device: torch.device) -> None:
            if kind == "refused":
                raise OSError("refused")
            if kind == "left":
                Rendezvous.announce_departure(store)
            never.wait(TIMEOUT_S)

    with pytest.raises((RuntimeError, OSError), match=message):
        join(store, 0, 1, Hanging(Fabric(), 0), 0.1 if kind == "late" else TIMEOUT_S)
    assert store.check(["left"])  # and the others know
    never.set()
