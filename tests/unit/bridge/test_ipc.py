"""Messages within a shared GPU, with memory of this process in place of CUDA's handles: order, reuse of slots, refusals.

CUDA itself: tests/gpu.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tepo_megatron.bridge.geometry import ReshardPlan
from tepo_megatron.bridge.layouts import MegatronParallel, VllmParallel
from tepo_megatron.bridge.transfer import messages, transport
from tepo_megatron.bridge.transfer.messages import largest_bytes, queues, source_ends
from tepo_megatron.bridge.transfer.transports.gloo import GlooGroup
from tepo_megatron.bridge.transfer.transports.ipc import CudaHandles, IpcGroup, join_ipc
from tests.support.programs import TIMEOUT_S
from tests.support.reshard_models import Case, cases, small_spec
from tests.support.thread_transport import Mailbox
from tests.support.transfers import blank, carry_out, mailboxes, setting

CPU = torch.device("cpu")


class Memory:
    """Handles are numbers of storages of this process. ``corrupt``: the first synchronized copy loses a bit."""

    def __init__(self, location: dict[str, str] | None = None) -> None:
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.numbers = itertools.count()
        self.where = location or {"host": "h", "gpu": "g"}
        self.corrupt = False

    def location(self, device: torch.device) -> dict[str, str]:
        return self.where

    def export(self, slots: Tensor) -> dict[str, Any]:
        number = next(self.numbers)
        self.storages[number] = slots.untyped_storage()
        return {"number": number}

    def open(self, handle: dict[str, Any], device: torch.device) -> torch.UntypedStorage:
        return self.storages[handle["number"]]

    def synchronize(self, device: torch.device) -> None:
        if self.corrupt:
            self.corrupt = False
            torch.empty(0, dtype=torch.uint8).set_(next(iter(self.storages.values())))[5] ^= 1


class Store:
    """The part of a TCPStore that is used; ``get`` waits."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self.changed:
            self.values[key] = value.encode()
            self.changed.notify_all()

    def get(self, key: str) -> bytes:
        with self.changed:
            assert self.changed.wait_for(lambda: key in self.values, timeout=TIMEOUT_S)
            return self.values[key]


def joining(box: Any) -> Callable[[], GlooGroup]:
    """Stands in for joining gloo's group."""
    return lambda: box


def members(plan: ReshardPlan, boxes: list[Mailbox], memory: Memory, *, limit: int) -> list[IpcGroup]:
    """Every rank's transport, as sender and worker make it: destinations find the source on their GPU by ``plan.local``."""
    store: Any = Store()
    made: list[IpcGroup] = []
    for rank in range(plan.num_sources):
        outgoing = queues(source_ends(plan, rank), itemsize=8, limit=limit)
        near = [plan.num_sources + to for to, source in plan.local.items() if source == rank]
        receivers = {peer: largest_bytes(outgoing[peer], 8) for peer in near if peer in outgoing}
        made.append(join_ipc(joining(boxes[rank]), store, rank, CPU, receivers=receivers, senders=(), handles=memory))
    for destination in range(plan.num_destinations):
        near = [source for to, source in plan.local.items() if to == destination]
        senders = [source for source in near if any(move.source == source for move in plan.receives(destination))]
        rank = plan.num_sources + destination
        made.append(join_ipc(joining(boxes[rank]), store, rank, CPU, receivers={}, senders=senders, handles=memory))
    assert all(json.loads(value) for value in store.values.values())
    return made


@settings(max_examples=12, deadline=None)
@given(case=cases(), limit=st.sampled_from([64, 1000, 2**20]), alone=st.sampled_from([1, 100, 2**18]))
def test_what_is_local_goes_through_slots_and_all_of_it_arrives(case: Case, limit: int, alone: int) -> None:
    plan, sources, expected = setting(case)
    found = [blank(params) for params in expected]
    boxes = mailboxes(plan.num_sources + plan.num_destinations)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(messages, "ALONE_BYTES", alone)
        carry_out(plan, sources, found, limit=limit, boxes=members(plan, boxes, Memory(), limit=limit))
    for wanted, got in zip(expected, found, strict=True):
        assert all(torch.equal(wanted[name], got[name]) for name in wanted)
    local = {(source, plan.num_sources + to) for to, source in plan.local.items()}
    if all((move.source, plan.num_sources + move.destination) in local for move in plan.moves):
        assert max(box.largest for box in boxes) <= 1  # only signals crossed


def one_pair() -> tuple[IpcGroup, IpcGroup, Memory]:
    memory = Memory()
    first, second = map(joining, mailboxes(2))
    store: Any = Store()
    sender = join_ipc(first, store, 0, CPU, receivers={1: 32}, senders=(), handles=memory)
    return sender, join_ipc(second, store, 1, CPU, receivers={}, senders=(0,), handles=memory), memory


def test_a_slot_is_used_again_only_when_its_message_was_taken() -> None:
    sender, receiver, _ = one_pair()
    with ThreadPoolExecutor(1) as pool:
        for number in (0, 1):
            sender.send(torch.full((4,), number), 1, number)
        done = pool.submit(sender.wait, 1, 0)
        landing = torch.zeros(4, dtype=torch.int64)
        receiver.receive(landing, 0, 0)
        with pytest.raises(TimeoutError):
            done.result(0.2)  # it has come, but nobody has taken it out
        receiver.wait(0, 0)
        done.result(TIMEOUT_S)
        assert landing.tolist() == [0] * 4
        sender.send(torch.full((4,), 2), 1, 2)  # into the slot of message 0
        for number in (1, 2):
            receiver.receive(landing, 0, number)
            receiver.wait(0, number)
            assert landing.tolist() == [number] * 4


def test_a_bit_that_changes_in_the_shared_memory_is_noticed() -> None:
    case = Case(small_spec(), MegatronParallel(), VllmParallel(), {0: 0})
    plan, sources, expected = setting(case)
    memory = Memory()
    boxes = members(plan, mailboxes(2), memory, limit=2**20)
    memory.corrupt = True
    with pytest.raises(RuntimeError, match=r"1 tensors did not arrive as they were sent: '.*' \(sent .* from rank 0"):
        carry_out(plan, sources, [blank(params) for params in expected], limit=2**20, boxes=boxes)


@pytest.mark.parametrize("what", ["host", "gpu"])
def test_another_host_or_gpu_is_refused(what: str) -> None:
    class Box(Mailbox):
        closed = False

        def close(self) -> None:
            self.closed = True

    store: Any = Store()
    boxes = mailboxes(1)
    join_ipc(joining(boxes[0]), store, 0, CPU, receivers={1: 8}, senders=(), handles=Memory())
    box = Box(1, boxes[0].letters)
    elsewhere = Memory({"host": "h", "gpu": "g"} | {what: "elsewhere"})
    with pytest.raises(RuntimeError, match=rf"rank 0 .* is on {what} [hg], rank 1 on {what} elsewhere; CUDA IPC needs"):
        join_ipc(joining(box), store, 1, CPU, receivers={}, senders=(0,), handles=elsewhere)
    assert box.closed


def test_a_receiver_does_not_wait_for_slots_of_a_sender_that_fails() -> None:
    """A minute is what it would wait otherwise."""

    class Full(Memory):
        def export(self, slots: Tensor) -> dict[str, Any]:
            raise RuntimeError("out of memory")

    host, memory = "127.0.0.1", Memory()
    store, place = transport.listen(host)

    def receive() -> IpcGroup:
        mine = transport.connect(host, place, 60.0)
        return join_ipc(lambda: GlooGroup(mine, host, 1, 2, 60.0), mine, 1, CPU, receivers={}, senders=(0,), handles=memory)

    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(receive)
        with pytest.raises(RuntimeError, match="out of memory"):
            join_ipc(lambda: GlooGroup(store, host, 0, 2, 60.0), store, 0, CPU, receivers={1: 8}, senders=(), handles=Full())
        with pytest.raises(RuntimeError, match="left before all had joined"):
            receiving.result(TIMEOUT_S)


def test_cuda_handles_cross_as_json_and_reach_torch_in_its_own_order(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = (3, b"\x00handle", 64, 512, b"counter", 7, b"\xffevent", True)
    slots: Any = SimpleNamespace(untyped_storage=lambda: SimpleNamespace(_share_cuda_=lambda: shared))
    handle = json.loads(json.dumps(CudaHandles().export(slots)))
    seen: list[Any] = []
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", lambda *given: seen.append(given))
    CudaHandles().open(handle, torch.device("cuda", 1))
    assert seen == [(1, *shared[1:])]  # the receiver's own number of the GPU
