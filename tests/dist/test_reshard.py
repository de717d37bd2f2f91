"""Shards from trainer ranks to workers and full tensors to rank 0, over real gloo connections: every byte what the layouts say,
the former also after a failure.
"""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tepo_megatron.tools.bench.reshard import ReshardSetting
from tepo_megatron.weights.layouts import MegatronParallel, VllmParallel, pipeline_stages
from tepo_megatron.weights.reshard import reshard_plan
from tepo_megatron.weights.table import tensor_shapes
from tepo_megatron.weights.transfer import move
from tepo_megatron.weights.transfer.full_tensors import GatherPlan
from tepo_megatron.weights.transfer.sender import ReceiveOrder, ShardSender
from tepo_megatron.weights.transfer.transport import TransferError, connect
from tepo_megatron.weights.transfer.transports import Member, join
from tests.support.launch import run_dist
from tests.support.reshard_models import numbered_model, parameters, small_spec

HOST, TIMEOUT_S = "127.0.0.1", 60.0
LEAVES = 1
"""The update in which the last worker leaves instead of receiving."""


def values(layouts: Any, model: dict[str, Tensor], rank: int, dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: tensor.to(dtype) for name, tensor in parameters(layouts, model)[rank].items()}


def trainer(rank: int, sender: ShardSender, number: int) -> str:
    """One update on a trainer rank; what went wrong."""
    if rank:
        dist.broadcast_object_list([None], src=0)
        sender.update_as_non_root()
        return ""
    dist.broadcast_object_list([sender.open_rendezvous(HOST) if number in (0, LEAVES + 1) else ""], src=0)
    sender.broadcast_rendezvous()
    try:
        sender.join_group()
        sender.send_shards()
    except TransferError as error:
        sender.close()
        assert not sender.own_fault
        sender.finish_update(arrived=False)
        return str(error)
    sender.finish_update(arrived=True)
    return ""


def worker(rank: int, world: int, group: Any, params: dict[str, Tensor], number: int) -> tuple[Any, str]:
    """One update on a worker; the group for the next, and what went wrong."""
    place = [""]
    dist.broadcast_object_list(place, src=0)
    try:
        if place[0]:
            store = connect(HOST, place[0], TIMEOUT_S)
            order = ReceiveOrder.decode(store.get(ReceiveOrder.key(rank)))
            group = (join("gloo", store, Member(rank, world, torch.device("cpu"), HOST), TIMEOUT_S), order)
        if number == LEAVES and rank == world - 1:
            raise RuntimeError("leaves")
        move.receive(group[0], group[1].incoming, params, group[1].wire)
    except RuntimeError as error:
        group[0].close()
        return None, str(error)
    return group, ""


def updates(rank: int, world: int, source: MegatronParallel, destination: VllmParallel, dtypes: tuple[str, str]) -> Any:
    """Three updates with other values each; per update what went wrong on this rank and whether it has what it should."""
    spec = small_spec(tied_embeddings=source.pp == 2)
    trained, served = (getattr(torch, name) for name in dtypes)
    plan = reshard_plan(spec, source, destination)
    models = [{name: tensor + 1000 * at for name, tensor in numbered_model(tensor_shapes(spec)).items()} for at in range(3)]
    is_trainer = rank < plan.num_sources
    trainers = dist.new_group(list(range(plan.num_sources)))

    def broadcast_from_root(value: Any) -> Any:
        box = [value]
        dist.broadcast_object_list(box, src=0, group=trainers)
        return box[0]

    seen = []
    params: dict[str, Tensor] = {}
    sender: Any = None
    group: Any = None
    for number, model in enumerate(models):
        if is_trainer:
            params.update(values(source.layouts(spec), model, rank, trained))
            options = {"dtype": served, "broadcast_from_root": broadcast_from_root, "timeout_s": TIMEOUT_S}
            sender = sender or ShardSender(plan, params, rank=rank, **options)
            seen.append((trainer(rank, sender, number), True))
        else:
            layouts, at = destination.layouts(spec), rank - plan.num_sources
            expected = {k: v.to(trained).to(served) for k, v in values(layouts, model, at, torch.float64).items()}
            params = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
            group, error = worker(rank, world, group, params, number)
            seen.append((error, all(torch.equal(params[name], expected[name]) for name in expected)))
    if sender is not None:
        sender.close()
    return seen


@pytest.mark.parametrize(
    ("source", "destination", "dtypes"),
    [
        (MegatronParallel(tp=2), VllmParallel(tp=2), ("bfloat16", "float32")),
        (MegatronParallel(pp=2, stages=pipeline_stages(4, 2, chunks=2)), VllmParallel(replicas=2), ("float32", "bfloat16")),
    ],
    ids=["tp2totp2", "pp2vpp2to2x1"],
)
def test_updates_arrive_fail_everywhere_when_a_worker_leaves_and_arrive_again(
    source: MegatronParallel, destination: VllmParallel, dtypes: tuple[str, str]
) -> None:
    world = source.world_size + destination.world_size
    ranks = run_dist(world, updates, source, destination, dtypes)
    for number in range(3):
        errors = [seen[number][0] for seen in ranks]
        if number == LEAVES:
            assert errors[-1] == "leaves"
            # In every case rank 0 sends to the worker that leaves, and no message that it waits for earlier can fail.
            assert f"to rank {world - 1} failed" in errors[0]
            # The other workers wait for digests that rank 0 no longer sends.
            assert all(error.startswith("receiving ") and " failed: " in error for error in errors[source.world_size : -1])
        else:
            assert errors == [""] * world
            assert all(seen[number][1] for seen in ranks)


def test_the_benchmark_counts_the_fewest_bytes_and_brings_the_same_weights_every_way() -> None:
    """``run`` itself compares what the ways bring."""
    setting = ReshardSetting(tp=1, pp=1, server_tp=1, servers=1, layers=1, dtype="bfloat16")
    wire_bytes = {row["method"]: row["wire_bytes"] for row in setting.run(repeats=1)}
    least = sum(setting.plan.bytes_between(2).values())
    assert wire_bytes["shard to shard"] == wire_bytes["raw point-to-point copy"] == least
    assert wire_bytes["gather and broadcast"] == least  # one trainer rank has nothing to gather


def gather(rank: int, world: int) -> dict[str, Tensor | None]:
    """Outside a batch each pair of ranks would make an NCCL communicator of its own, and keep it."""
    spec = small_spec()
    layouts = MegatronParallel(tp=2).layouts(spec)
    params = parameters(layouts, numbered_model(tensor_shapes(spec)))[rank]
    alone = AssertionError("a message outside batch_isend_irecv")
    with mock.patch.object(dist, "send", side_effect=alone), mock.patch.object(dist, "recv", side_effect=alone):
        return dict(GatherPlan(layouts).gather_to_root({name: param.float() for name, param in params.items()}))


def test_full_tensors_travel_through_the_communicator_of_all_ranks() -> None:
    root, other = run_dist(2, gather)
    expected = numbered_model(tensor_shapes(small_spec()))
    assert root.keys() == other.keys() == expected.keys()
    assert all(torch.equal(root[name], value.float()) for name, value in expected.items())
    assert set(other.values()) == {None}
