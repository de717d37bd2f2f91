"""Members of one transfer group as threads of this process, over real gloo connections."""

import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tepo_megatron.weights.geometry import ReshardPlan
from tepo_megatron.weights.transfer import full_tensors as broadcast
from tepo_megatron.weights.transfer import sender, transport
from tepo_megatron.weights.transfer.sender import ShardSender
from tepo_megatron.weights.transfer.transport import TransportName
from tepo_megatron.weights.transfer.transports import Member, join
from tepo_megatron.weights.transfer.transports.gloo import GlooGroup
from tests.support.programs import TIMEOUT_S

HOST = "127.0.0.1"
WORLD = 3


def make_group(world_size: int = WORLD, timeout_s: float = TIMEOUT_S) -> list[GlooGroup]:
    store, place = transport.listen(HOST)

    def member(rank: int) -> GlooGroup:
        return GlooGroup(store if rank == 0 else transport.connect(HOST, place, timeout_s), HOST, rank, world_size, timeout_s)

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(member, range(world_size)))


@pytest.fixture(scope="module")
def group() -> Iterator[list[GlooGroup]]:
    members = make_group()
    yield members
    for member in members:
        member.close()


dtypes = st.sampled_from(["float32", "float64", "bfloat16", "float16", "int64", "int8", "uint8", "bool"])
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
tensor_specs = st.lists(st.tuples(shapes, dtypes), max_size=8)


def random_tensor(shape: tuple[int, ...], dtype: str, generator: torch.Generator) -> torch.Tensor:
    size = torch.empty(shape, dtype=getattr(torch, dtype)).nbytes
    if dtype == "bool":
        return torch.randint(2, shape, generator=generator).bool()
    return torch.randint(256, (size,), generator=generator, dtype=torch.uint8).view(getattr(torch, dtype)).view(shape)


@settings(max_examples=40, deadline=None)
@given(specs=tensor_specs, limit=st.sampled_from([1, 16, 64, 2**20]), seed=st.integers(0, 2**31))
def test_every_receiver_gets_every_tensor_bit_by_bit(
    group: list[GlooGroup], specs: list[tuple[tuple[int, ...], str]], limit: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    manifest = [(f"t{i}", shape, dtype) for i, (shape, dtype) in enumerate(specs)]
    sent = [random_tensor(shape, dtype, generator) for shape, dtype in specs]
    with ThreadPoolExecutor(WORLD) as pool:
        receiving = [pool.submit(lambda m: list(broadcast.receive(m, manifest, limit=limit)), member) for member in group[1:]]
        broadcast.send(group[0], manifest, iter(sent), limit=limit)
        for request in receiving:
            received = request.result()
            assert [name for name, _ in received] == [name for name, _, _ in manifest]
            for a, (_, b) in zip(sent, received, strict=True):
                assert (a.shape, a.dtype) == (b.shape, b.dtype)
                assert torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (a, b)))  # NaNs included


@pytest.mark.parametrize(
    ("manifest", "tensors", "message"),
    [
        ([("a", (2,), "float33")], [], "unknown dtype 'float33'"),
        ([("a", (2,), "int8"), ("a", (2,), "int8")], [], "'a' occurs twice"),
        ([("a", (2,), "float32")], [], r"end before tensor 'a'"),
        (
            [("a", (2,), "float32")],
            [torch.zeros(3)],
            r"'a' is torch.float32 \(3,\), but the manifest announces torch.float32 \(2,\)",
        ),
        ([("a", (2,), "float32")], [torch.zeros(2, dtype=torch.float64)], r"'a' is torch.float64"),
        ([("a", (2,), "float32")], [torch.zeros(2)] * 2, r"more tensors than the 1"),
    ],
)
def test_a_bad_manifest_or_tensors_that_do_not_match_it_are_refused(
    manifest: broadcast.TensorManifest, tensors: list[torch.Tensor], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        broadcast.send(make_group(world_size=1)[0], manifest, tensors)


BIG = [("big", (64 * 2**20,), "uint8")]  # more than the sockets buffer, so that the sender has to wait


@pytest.mark.parametrize("ends", ["cancelled", "receiver", "sender"])
def test_a_transfer_ends_with_the_tensors_name_when_one_side_leaves(ends: str) -> None:
    sender, receiver = make_group(2, timeout_s=120.0)
    cancelled = threading.Event()
    leave = {"cancelled": cancelled.set, "receiver": receiver.close, "sender": sender.close}[ends]
    threading.Timer(0.3, leave).start()
    reason, data = ": a receiver failed" if ends == "cancelled" else "", torch.zeros(64 * 2**20, dtype=torch.uint8)

    def transfer() -> None:
        if ends == "sender":
            list(broadcast.receive(receiver, BIG))
        else:
            broadcast.send(sender, BIG, [data], cancelled=cancelled.is_set)

    with pytest.raises(RuntimeError, match=rf"transfer of tensor 'big' failed{reason}"):
        transfer()
    sender.close()
    receiver.close()


def test_nobody_waits_for_members_when_one_has_left() -> None:
    """They would wait for as long as a hang may last otherwise."""
    store, place = transport.listen(HOST)
    with ThreadPoolExecutor(2) as pool:
        coming = [
            pool.submit(lambda rank: GlooGroup(transport.connect(HOST, place, TIMEOUT_S), HOST, rank, 3, TIMEOUT_S), rank)
            for rank in (1, 2)
        ]
        transport.announce_departure(store)
        for member in coming:
            with pytest.raises(RuntimeError, match="left before all had joined"):
                member.result(TIMEOUT_S)


def test_rank_0_hears_why_another_rank_failed_and_nobody_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it entered the group, where rank 0 would only see that somebody left."""
    sent: queue.Queue[Any] = queue.Queue()
    plan = ReshardPlan((), 2, 2)
    options: dict[str, Any] = {"dtype": torch.float32, "timeout_s": TIMEOUT_S}
    params = {"p": torch.zeros(2, 2)}
    root = ShardSender(plan, params, rank=0, broadcast_from_root=sent.put, **options)
    other = ShardSender(plan, params, rank=1, broadcast_from_root=lambda _: sent.get(timeout=TIMEOUT_S), **options)

    def enter(name: TransportName, store: Any, member: Member, *args: Any, **options: Any) -> Any:
        if member.rank == 1:
            raise RuntimeError("no room for slots")
        return join(name, store, member, *args, **options)

    monkeypatch.setattr(sender, "join", enter)
    for _ in range(2):  # a new meeting forgets the failure of the last one
        with ThreadPoolExecutor(2) as pool:
            root.open_rendezvous(HOST)
            root.broadcast_rendezvous()
            following, joining = pool.submit(other.update_as_non_root), pool.submit(root.join_group)
            with pytest.raises(RuntimeError, match="left before all"):
                joining.result(TIMEOUT_S)
            assert root.finish_update(arrived=False) == "The first other trainer rank to fail was rank 1: no room for slots"
            following.result(TIMEOUT_S)
    assert root.finish_update(arrived=False) == ""


@pytest.mark.parametrize("name", ["nccl", "ipc"])
def test_a_member_without_a_gpu_is_told_what_to_set(name: TransportName) -> None:
    store, _ = transport.listen(HOST)
    with pytest.raises(RuntimeError, match=rf"rank 1 .* runs on cpu, but rollout.server.transport = {name} needs CUDA on both"):
        join(name, store, Member(1, 2, torch.device("cpu"), HOST), 1.0)
