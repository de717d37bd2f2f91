"""All ranks of a plan as threads of one process, over transports of any kind."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from tepo_megatron.weights.geometry import ReshardPlan
from tepo_megatron.weights.reshard import reshard_plan
from tepo_megatron.weights.table import tensor_shapes
from tepo_megatron.weights.transfer import move
from tepo_megatron.weights.transfer.move import MoveEnd, queues, wire_dtype
from tepo_megatron.weights.transfer.sender import ReceiveOrder
from tepo_megatron.weights.transfer.transport import TransferError, TransferGroup, connect, listen
from tests.support.programs import TIMEOUT_S
from tests.support.reshard_models import Case, numbered_model, parameters

Params = dict[str, Tensor]


def meeting() -> Callable[[int], Any]:
    """A new store, as each rank reaches it."""
    store, place = listen("127.0.0.1")
    return lambda rank: store if rank == 0 else connect("127.0.0.1", place, TIMEOUT_S)


class Letters:
    """Messages on their way, by sender, receiver and number. Whoever takes one waits for this one alone: were all woken by
    every message, 40 ranks would do little else.
    """

    def __init__(self) -> None:
        self._slots: dict[tuple[int, int, int], queue.SimpleQueue[Tensor]] = {}

    def put(self, key: tuple[int, int, int], letter: Tensor) -> None:
        self._slot(key).put(letter)

    def take(self, key: tuple[int, int, int]) -> Tensor:
        try:
            letter = self._slot(key).get(timeout=TIMEOUT_S)
        except queue.Empty:
            raise RuntimeError("timed out") from None
        del self._slots[key]
        return letter

    def _slot(self, key: tuple[int, int, int]) -> queue.SimpleQueue[Tensor]:
        return self._slots.setdefault(key, queue.SimpleQueue())  # which is one step for all threads


class Mailbox(TransferGroup):
    """One rank's transport. Ranks of one world share ``letters``, and send by copy."""

    def __init__(self, rank: int, letters: Letters) -> None:
        self.rank, self.letters = rank, letters
        self.landing: dict[tuple[int, int], Tensor] = {}
        self.sizes: list[tuple[int, int]] = []
        """(peer, bytes) of everything sent."""
        self.corrupt = False
        """The first message of more than a byte loses a bit on its way."""

    def device(self, peer: int) -> torch.device:
        return torch.device("cpu")

    def send(self, data: Tensor, peer: int, number: int) -> None:
        self.sizes.append((peer, data.nbytes))
        letter = data.clone()
        if self.corrupt and data.nbytes > 1:
            self.corrupt = False
            letter.view(torch.uint8)[5] ^= 1
        self.letters.put((self.rank, peer, number), letter)

    def receive(self, data: Tensor, peer: int, number: int) -> None:
        assert data.is_contiguous()
        self.landing[peer, number] = data

    def wait(self, peer: int, number: int) -> None:
        if (peer, number) not in self.landing:
            return
        letter = self.letters.take((peer, self.rank, number))
        landing = self.landing.pop((peer, number))
        assert letter.shape == landing.shape
        assert letter.dtype == landing.dtype
        landing.copy_(letter)

    def close(self) -> None: ...

    # what gloo offers beside, for a transport that stands on it

    def start_send(self, data: Tensor, peer: int, number: int) -> Work:
        self.send(data, peer, number)
        return Work(lambda: None)

    def start_receive(self, data: Tensor, peer: int, number: int) -> Work:
        def wait() -> None:
            self.receive(data, peer, number)
            self.wait(peer, number)

        return Work(wait)


@dataclass
class Work:
    wait: Callable[[], None]


def carry_out(
    plan: ReshardPlan,
    sources: Sequence[Params],
    destinations: Sequence[Params],
    *,
    limit: int,
    alone: int = move.SINGLE_SEGMENT_BYTES,
    boxes: Sequence[TransferGroup] | None = None,
) -> list[list[str]]:
    """All ranks as threads, which leave when they fail; returns what each destination reported complete, in order.

    Raises RuntimeError with the errors of all ranks.
    """
    wire = wire_dtype(next(iter(sources[0].values())).dtype, next(iter(destinations[0].values())).dtype)
    boxes = boxes or mailboxes(plan.world_size)
    completed: list[list[str]] = [[] for _ in destinations]

    def give(rank: int) -> None:
        outgoing = queues(MoveEnd.of(plan, rank), itemsize=wire.itemsize, limit=limit, alone=alone)
        move.send(boxes[rank], outgoing, sources[rank], wire)
        boxes[rank].finish()

    def take(rank: int) -> None:
        worker = plan.num_sources + rank
        order = ReceiveOrder(MoveEnd.of(plan, worker), str(wire).removeprefix("torch."), limit, alone=alone)
        order = ReceiveOrder.decode(order.encode())
        move.receive(boxes[worker], order.incoming, destinations[rank], order.wire, completed[rank].append)

    def take_part(rank: int) -> str:
        try:
            give(rank) if rank < plan.num_sources else take(rank - plan.num_sources)
        except RuntimeError as error:
            boxes[rank].close()
            if rank < plan.num_sources and not isinstance(error, TransferError):
                raise AssertionError("a sender fails as if it were its own fault") from error
            return str(error)
        return ""

    with ThreadPoolExecutor(plan.world_size) as pool:
        errors = list(filter(None, pool.map(take_part, range(plan.world_size))))
    if errors:
        raise RuntimeError("\n".join(errors))
    return completed


def assert_all_arrives(
    case: Case,
    *,
    limit: int,
    alone: int = move.SINGLE_SEGMENT_BYTES,
    boxes: Callable[[ReshardPlan], Sequence[TransferGroup]] = lambda plan: mailboxes(plan.world_size),
    updates: int = 1,
) -> list[list[str]]:
    """Makes updates over ``boxes``; returns what each destination reported complete in the last. ``alone``: the size from which
    segments travel alone.
    """
    plan, sources, expected = setting(case)
    completed: list[list[str]] = []
    groups = boxes(plan)
    for _ in range(updates):
        found = [blank(params) for params in expected]
        completed = carry_out(plan, sources, found, limit=limit, alone=alone, boxes=groups)
        for wanted, got in zip(expected, found, strict=True):
            assert all(torch.equal(wanted[name], got[name]) for name in wanted)
    return completed


SIZES = {"limit": st.sampled_from([64, 1000, 2**20]), "alone": st.sampled_from([1, 100, 2**18])}


def mailboxes(world: int) -> list[Mailbox]:
    letters = Letters()
    return [Mailbox(rank, letters) for rank in range(world)]


def setting(case: Case) -> tuple[ReshardPlan, list[Params], list[Params]]:
    """A plan, the sources' parameters and those that the destinations must end up with."""
    plan = reshard_plan(case.spec, case.source, case.destination, case.local)
    model = numbered_model(tensor_shapes(case.spec))
    sources = parameters(case.source.layouts(case.spec), model)
    return plan, sources, parameters(case.destination.layouts(case.spec), model)


def blank(params: Params, dtype: torch.dtype | None = None) -> Params:
    return {name: torch.zeros_like(tensor, dtype=dtype) for name, tensor in params.items()}
