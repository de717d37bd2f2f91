"""All ranks of a plan as threads of one process, over transports of any kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from tepo_megatron.weights.geometry import ReshardPlan
from tepo_megatron.weights.layouts import megatron_ranks, vllm_ranks
from tepo_megatron.weights.reshard import reshard_plan
from tepo_megatron.weights.table import tensor_shapes
from tepo_megatron.weights.transfer import move
from tepo_megatron.weights.transfer.move import move_ends, queues, wire_dtype
from tepo_megatron.weights.transfer.sender import ReceiveOrder
from tepo_megatron.weights.transfer.transport import TransferGroup
from tests.support.reshard_models import Case, numbered_model, parameters
from tests.support.thread_transport import Letters, Mailbox

Params = dict[str, Tensor]


def carry_out(
    plan: ReshardPlan,
    sources: Sequence[Params],
    destinations: Sequence[Params],
    *,
    limit: int,
    boxes: Sequence[TransferGroup] | None = None,
) -> list[list[str]]:
    """All ranks as threads, which leave when they fail; returns what each destination reported complete, in order.

    Raises RuntimeError with the errors of all ranks.
    """
    wire = wire_dtype(next(iter(sources[0].values())).dtype, next(iter(destinations[0].values())).dtype)
    boxes = boxes or mailboxes(plan.world_size)
    completed: list[list[str]] = [[] for _ in destinations]

    def give(rank: int) -> None:
        outgoing = queues(move_ends(plan, rank), itemsize=wire.itemsize, limit=limit)
        move.send(boxes[rank], outgoing, sources[rank], wire)
        boxes[rank].finish()

    def take(rank: int) -> None:
        worker = plan.num_sources + rank
        order = ReceiveOrder(move_ends(plan, worker), str(wire).removeprefix("torch."), limit)
        order = ReceiveOrder.decode(order.encode())
        move.receive(boxes[worker], order.incoming, destinations[rank], order.wire, completed[rank].append)

    def take_part(rank: int) -> str:
        try:
            give(rank) if rank < plan.num_sources else take(rank - plan.num_sources)
        except RuntimeError as error:
            boxes[rank].close()
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
    alone: int,
    boxes: Callable[[ReshardPlan], Sequence[TransferGroup]] = lambda plan: mailboxes(plan.world_size),
    updates: int = 1,
) -> list[list[str]]:
    """Makes updates over ``boxes``; returns what each destination reported complete in the last. ``alone``: the size from which
    segments travel alone.
    """
    plan, sources, expected = setting(case)
    completed: list[list[str]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(move, "SINGLE_SEGMENT_BYTES", alone)
        groups = boxes(plan)
        for _ in range(updates):
            found = [blank(params) for params in expected]
            completed = carry_out(plan, sources, found, limit=limit, boxes=groups)
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
    sources = parameters(megatron_ranks(case.spec, case.source), model)
    return plan, sources, parameters(vllm_ranks(case.spec, case.destination), model)


def blank(params: Params, dtype: torch.dtype | None = None) -> Params:
    return {name: torch.zeros_like(tensor, dtype=dtype) for name, tensor in params.items()}
