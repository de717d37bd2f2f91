"""Messages within a shared GPU, with memory of this process in place of CUDA's handles: order, reuse of slots, refusals.

CUDA itself: tests/gpu.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from tepo_megatron.weights.geometry import ReshardPlan
from tepo_megatron.weights.layouts import MegatronParallel, VllmParallel
from tepo_megatron.weights.transfer import move
from tepo_megatron.weights.transfer.move import MoveEnd, message_sizes, queues
from tepo_megatron.weights.transfer.sender import ReceiveOrder
from tepo_megatron.weights.transfer.transport import Member, RelayRoutes, TransferGroup, TransportSpec
from tepo_megatron.weights.transfer.transports import ipc, nccl
from tepo_megatron.weights.transfer.transports.gloo import GlooGroup
from tepo_megatron.weights.transfer.transports.ipc import source_routes
from tests.support.programs import TIMEOUT_S
from tests.support.reshard_models import Case, cases, small_spec
from tests.support.transfers import SIZES, Mailbox, assert_all_arrives, blank, carry_out, mailboxes, meeting, setting

CPU, HOST = torch.device("cpu"), "127.0.0.1"


class Memory:
    """Handles are numbers of storages of this process. ``corrupt``: the first synchronized copy loses a bit."""

    def __init__(self) -> None:
        self.storages: list[torch.UntypedStorage] = []
        self.where = {"host": "h", "gpu": "g"}
        self.corrupt = False

    def location(self, device: torch.device) -> dict[str, str]:
        return self.where

    def export(self, slots: Tensor) -> dict[str, Any]:
        self.storages.append(slots.untyped_storage())
        return {"number": len(self.storages) - 1}

    def open(self, handle: dict[str, Any], device: torch.device) -> torch.UntypedStorage:
        return self.storages[handle["number"]]

    def synchronize(self, device: torch.device) -> None:
        if self.corrupt:
            self.corrupt = False
            torch.empty(0, dtype=torch.uint8).set_(self.storages[0])[5] ^= 1


@contextmanager
def standing_in(gloo: Callable[..., Any], memory: Memory) -> Iterator[None]:
    """For CUDA's handles ``memory``; ``gloo`` also connects the trainer's ranks, as NCCL would."""
    made: dict[int, Any] = {}

    def join_gloo(store: Any, host: str, rank: int, *sizes: Any) -> Any:
        made[rank] = gloo(store, host, rank, *sizes)
        return made[rank]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ipc, "GlooGroup", join_gloo)
        patch.setattr(ipc, "_CudaHandles", lambda: memory)
        patch.setattr(nccl, "TRANSPORT", TransportSpec(lambda _store, member, _timeout_s: made[member.rank]))
        yield


def enter(box: Any, store: Any, member: Member, memory: Memory) -> TransferGroup:
    with standing_in(lambda *_: box, memory):
        return ipc.TRANSPORT.join(store, member, TIMEOUT_S)


def member_of(plan: ReshardPlan, rank: int, *, limit: int, alone: int = move.SINGLE_SEGMENT_BYTES, relayed: bool) -> Member:
    """As sender and worker make it: destinations find the source on their GPU by ``plan.local``."""
    if rank < plan.num_sources:
        outgoing = queues(MoveEnd.of(plan, rank), itemsize=8, limit=limit, alone=alone)
        near = {plan.num_sources + to for to, source in plan.local.items() if source == rank}
        receivers = {peer: max(message_sizes(outgoing[peer], 8)) for peer in near & outgoing.keys()}
        routes = source_routes(plan, rank, itemsize=8, limit=limit, alone=alone) if relayed else RelayRoutes()
        return Member(rank, plan.world_size, CPU, HOST, same_gpu_receivers=receivers, routes=routes)
    local = plan.local.get(rank - plan.num_sources)
    order = ReceiveOrder(MoveEnd.of(plan, rank), "float64", limit, alone=alone, near=local, relayed=relayed)
    return Member(rank, plan.world_size, CPU, HOST, writers=ReceiveOrder.decode(order.encode()).writers)


def members(plan: ReshardPlan, boxes: list[Mailbox], memory: Memory, *, relayed: bool, **sizes: int) -> list[TransferGroup]:
    store = HashStore()
    return [enter(box, store, member_of(plan, rank, **sizes, relayed=relayed), memory) for rank, box in enumerate(boxes)]


@settings(max_examples=20)
@given(case=cases(), **SIZES, relayed=st.booleans(), updates=st.sampled_from([1, 2]))
def test_all_arrives_by_slots_and_what_goes_to_another_gpu_through_the_rank_there(
    case: Case, limit: int, alone: int, relayed: bool, updates: int
) -> None:
    """Every tensor is reported. Between a rank and a worker on its GPU nothing but signals cross, and if relayed, between one
    and any worker that has a rank on its GPU.
    """
    plan, _, expected = setting(case)
    boxes = mailboxes(plan.world_size)
    groups = partial(members, boxes=boxes, memory=Memory(), limit=limit, alone=alone, relayed=relayed)
    completed = assert_all_arrives(case, limit=limit, alone=alone, boxes=groups, updates=updates)
    for params, names in zip(expected, completed, strict=True):
        assert sorted(names) == sorted(name for name in params if params[name].any())  # a vocabulary shard may be padding
    near = {(source, plan.num_sources + to) for to, source in plan.local.items()}
    if relayed:
        near = {(rank, worker) for _, worker in near for rank in range(plan.num_sources)}
    for box in boxes:
        for peer, size in box.sizes:
            assert size <= 1 or not {(box.rank, peer), (peer, box.rank)} & near


ALONE = Case(small_spec(), MegatronParallel(), VllmParallel(), {0: 0})
CROSSED = Case(small_spec(), MegatronParallel(tp=2), VllmParallel(tp=1, replicas=2), {0: 0, 1: 1})
"""Two trainer ranks and two workers; half of each worker's weights come from the other's GPU."""


def joining() -> Callable[[Member], TransferGroup]:
    store_of = meeting()
    return lambda member: ipc.TRANSPORT.join(store_of(member.rank), member, TIMEOUT_S)


def test_it_is_passed_on_over_real_gloo_and_a_worker_that_leaves_ends_it_on_all_ranks() -> None:
    (plan, sources, expected), limit = setting(CROSSED), 2000
    members = [member_of(plan, rank, limit=limit, relayed=True) for rank in range(4)]
    with ThreadPoolExecutor(4) as pool:
        with standing_in(GlooGroup, Memory()):
            groups = list(pool.map(joining(), members))
        assert_all_arrives(CROSSED, limit=limit, boxes=lambda _: groups)

        def take_part(rank: int) -> None:
            messages = queues(MoveEnd.of(plan, rank), itemsize=8, limit=limit)
            if rank == 2:
                move.receive(groups[2], messages, blank(expected[0]), torch.float64)
            else:
                move.send(groups[rank], messages, sources[rank], torch.float64)
                groups[rank].finish()

        groups[3].close()
        for rank, work in [(rank, pool.submit(take_part, rank)) for rank in (1, 0, 2)]:
            with pytest.raises(RuntimeError):  # gloo says "failed", or that the connection is closed
                work.result(TIMEOUT_S)
            groups[rank].close()  # as it does where it has failed


@pytest.mark.parametrize("relayed", [False, True])
def test_a_bit_that_changes_in_shared_memory_or_between_ranks_is_noticed(relayed: bool) -> None:
    """The digests are those of the rank that has the weights."""
    plan, sources, expected = setting(CROSSED if relayed else ALONE)
    boxes, memory = mailboxes(plan.world_size), Memory()
    groups = members(plan, boxes, memory, limit=2**20, relayed=relayed)
    boxes[0].corrupt, memory.corrupt = relayed, not relayed
    with pytest.raises(RuntimeError, match=r"tensors did not arrive as they were sent: '.*' \(sent .* from rank [01]"):
        carry_out(plan, sources, [blank(params) for params in expected], limit=2**20, boxes=groups)


def test_a_slot_is_used_again_only_when_its_message_was_taken() -> None:
    store = HashStore()
    (first, second), memory = mailboxes(2), Memory()
    sender = enter(first, store, Member(0, 2, CPU, "", same_gpu_receivers={1: 32}), memory)
    receiver = enter(second, store, Member(1, 2, CPU, "", writers={0: 0}), memory)
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


@pytest.mark.parametrize("what", ["host", "gpu"])
def test_another_host_or_gpu_is_refused(what: str) -> None:
    store, (first, second) = HashStore(), mailboxes(2)
    enter(first, store, Member(0, 2, CPU, "", same_gpu_receivers={1: 8}), Memory())
    elsewhere, message = Memory(), rf"rank 0 .* is on {what} [hg], rank 1 on {what} elsewhere; CUDA IPC needs"
    elsewhere.where |= {what: "elsewhere"}
    with mock.patch.object(second, "close") as close, pytest.raises(RuntimeError, match=message):
        enter(second, store, Member(1, 2, CPU, "", writers={0: 0}), elsewhere)
    close.assert_called_once()


def test_a_receiver_does_not_wait_for_slots_of_a_sender_that_fails() -> None:
    """A minute is what it would wait otherwise."""
    come, full = joining(), mock.patch.object(Memory, "export", side_effect=RuntimeError("out of memory"))
    with ThreadPoolExecutor(1) as pool, standing_in(GlooGroup, Memory()), full:
        receiving = pool.submit(come, Member(1, 2, CPU, HOST, writers={0: 0}))
        with pytest.raises(RuntimeError, match="out of memory"):
            come(Member(0, 2, CPU, HOST, same_gpu_receivers={1: 8}))
        with pytest.raises(RuntimeError, match="left before all had joined"):
            receiving.result(TIMEOUT_S)
