"""Transports: config names them all, and a group's members meet, transfer and end together, over real gloo connections."""

import queue
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from tepo_megatron.config.rollout import ServerConfig
from tepo_megatron.weights.geometry import Box, Region, ReshardPlan
from tepo_megatron.weights.transfer import full_tensors as broadcast
from tepo_megatron.weights.transfer import move, sender, transports
from tepo_megatron.weights.transfer.sender import ReceiveOrder, ShardSender
from tepo_megatron.weights.transfer.transport import Member, Rendezvous, TransferError, TransportSpec, connect, listen
from tepo_megatron.weights.transfer.transports import Introduction, find_transport, gloo, join, transport_names
from tepo_megatron.weights.transfer.transports.gloo import GlooGroup
from tests.support.programs import TIMEOUT_S
from tests.support.transfers import meeting

CPU, HOST = torch.device("cpu"), "127.0.0.1"
TRAINER = Introduction("trainer rank 0", "a", "10.0.0.1", "GPU-1", "2.29.7")
WORKER = Introduction("worker 0 of a rollout server", "b", "10.0.0.2", "GPU-2", "2.29.7")

PLANTED = {
    "versions": (replace(WORKER, nccl="2.27.3"), r"trainer rank 0 \(10.0.0.1\) has NCCL 2.29.7, worker 0 .* has NCCL 2.27.3"),
    "no NCCL": (replace(WORKER, nccl=""), "joins equal versions only"),
    "one GPU": (replace(WORKER, host="a", gpu="GPU-1"), "on the same GPU, GPU-1, and NCCL takes .*transport = auto or gloo"),
    "interface": (replace(WORKER, address="127.0.0.1"), r"worker 0 .*\(127.0.0.1\) offers a loopback .*server.interface"),
}


def roll(*members: Introduction, nccl: bool = True, may_share: bool = False) -> str:
    store = Mock(wraps=HashStore())
    for rank, member in enumerate(members):
        member.announce(store, rank)
    store.reset_mock()
    try:
        return Introduction.check_all(store, len(members), nccl=nccl, may_share=may_share)
    finally:
        assert len(store.method_calls) == 1, "of thousands of members each asks the store once"


@pytest.mark.parametrize(
    ("planted", "may_share"), [*((planted, False) for planted in PLANTED), ("versions", True), ("interface", True)]
)
def test_what_cannot_be_joined_is_named_with_what_to_set(planted: str, may_share: bool) -> None:
    """Also where gloo may stand in, which is for a shared GPU alone."""
    worker, message = PLANTED[planted]
    with pytest.raises(RuntimeError, match=message):
        roll(TRAINER, worker, may_share=may_share)


def test_what_can_be_joined_is_not_refused_and_a_shared_gpu_is_said_where_gloo_may_stand_in() -> None:
    """Whatever the versions there."""
    shared = replace(WORKER, host="a", gpu="GPU-1", nccl="2.27.3")
    assert roll(TRAINER, WORKER) == roll(TRAINER, WORKER, may_share=True) == roll(TRAINER, shared, nccl=False) == ""
    assert roll(TRAINER, replace(WORKER, gpu="GPU-1")) == "", "GPUs of one uuid on two machines are two"
    assert roll(TRAINER, replace(WORKER, host="a", address="127.0.0.1"), nccl=False) == ""
    assert roll(TRAINER, shared, may_share=True) == (
        "trainer rank 0 (10.0.0.1) and worker 0 of a rollout server (10.0.0.2) are on the same GPU, GPU-1"
    )


def test_all_members_of_a_shared_gpu_take_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a real store, where NCCL was chosen; its own joining would fail here, where there is no GPU."""
    introduce = Introduction.of
    monkeypatch.setattr(Introduction, "of", lambda member: replace(introduce(member), gpu="GPU-1", nccl="2.29.7"))
    nccl = TransportSpec(Mock(side_effect=AssertionError("NCCL was to join")))
    monkeypatch.setattr(transports, "find_transport", {"gloo": gloo.TRANSPORT, "nccl": nccl}.__getitem__)
    store_of = meeting()

    def enter(rank: int) -> Any:
        return join("nccl", store_of(rank), Member(rank, 2, CPU, HOST), TIMEOUT_S, or_gloo=True)

    with ThreadPoolExecutor(2) as pool, pytest.warns(UserWarning, match=r"on the same GPU, GPU-1: the weights take gloo"):
        groups = list(pool.map(enter, (0, 1)))
    assert [type(group) for group in groups] == [GlooGroup] * 2
    for group in groups:
        group.close()


@pytest.mark.parametrize("late", [False, True])
def test_all_members_hear_it_and_none_joins(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a real store: a member of another machine that offers a loopback address. ``late``: rank 0 has come first, and looks
    who is there only when the other has heard it, and has left.
    """
    came, gone, member_left = threading.Event(), threading.Event(), Rendezvous.member_left

    def look_late(self: Rendezvous) -> bool:
        came.set()
        assert gone.wait(TIMEOUT_S)
        return member_left(self)

    introduce, store_of = Introduction.of, meeting()
    monkeypatch.setattr(Introduction, "of", lambda member: replace(introduce(member), host=f"host {member.rank}"))

    def enter(rank: int) -> None:
        store = store_of(rank)
        if late and rank == 1:
            assert came.wait(TIMEOUT_S)
        try:
            join("gloo", store, Member(rank, 2, CPU, HOST, ("trainer rank 0", "worker 0")[rank]), TIMEOUT_S)
        finally:
            gone.set()

    if late:
        monkeypatch.setattr(Rendezvous, "member_left", look_late)
    with ThreadPoolExecutor(2) as pool:
        for entering in [pool.submit(enter, rank) for rank in (0, 1)]:
            with pytest.raises(RuntimeError, match=r"trainer rank 0 \(127.0.0.1\) offers a loopback address"):
                entering.result(TIMEOUT_S)


# -- the list of transports


def test_config_offers_every_transport_that_there_is_and_no_other() -> None:
    offered = get_args(ServerConfig.model_fields["transport"].annotation)
    assert sorted(offered) == sorted(["auto", *transport_names()])
    explained = Path(sys.modules[ServerConfig.__module__].__file__ or "").read_text()
    for name in transport_names():
        assert isinstance(find_transport(name), TransportSpec)
        assert f"``{name}``" in explained


def test_a_new_file_is_a_new_transport_and_other_names_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=f"transport = pigeon is not known; known: {', '.join(transport_names())}"):
        find_transport("pigeon")
    imported = "from tepo_megatron.weights.transfer.transport import TransportSpec"
    (tmp_path / "pigeon.py").write_text(f"{imported}\n\nTRANSPORT = TransportSpec(lambda *given: given)\n")
    monkeypatch.setattr(transports, "__path__", [*transports.__path__, str(tmp_path)])
    member, store = Member(0, 1, CPU, HOST), HashStore()
    try:
        assert "pigeon" in transport_names()
        given: Any = join("pigeon", store, member, 2.0)
        assert given == (store, member, 2.0)
    finally:
        sys.modules.pop(f"{transports.__name__}.pigeon", None)


def test_a_member_that_hangs_between_arriving_and_joining_is_not_waited_for_beyond_the_time_out() -> None:
    """All are counted as there, but one takes no part in forming the group: gloo's own rendezvous has no default of minutes."""
    store_of = meeting()
    hanging = store_of(1)
    hanging.add("joined", 1)
    with pytest.raises(RuntimeError, match="timeout"):
        GlooGroup(store_of(0), HOST, 0, 2, 2.0)
    assert hanging.check(["left"])  # and the others know


def test_a_member_leaves_at_once_though_rank_0_is_gone_with_the_folder_of_the_rendezvous() -> None:
    """A worker whose trainer was killed; a store whose file is missing waits for it."""
    store, place = listen(HOST)
    member = connect(HOST, place, TIMEOUT_S)
    store.set("joined", "1")
    Path(place).unlink()
    Rendezvous.announce_departure(member)
    assert not Path(place).exists()


def test_rank_0_closes_at_once_though_the_file_of_the_rendezvous_was_removed() -> None:
    options: dict[str, Any] = {"dtype": torch.float32, "timeout_s": TIMEOUT_S, "broadcast_from_root": lambda _: None}
    root = ShardSender(ReshardPlan((), 2, 2), {"p": torch.zeros(2, 2)}, rank=0, **options)
    Path(root.open_rendezvous(HOST)).unlink()
    root._store.set_timeout(timedelta(seconds=1))  # in place of torch's five minutes, after which it raises
    root.close()


WORLD = 3


def make_group(world_size: int, timeout_s: float = TIMEOUT_S) -> list[GlooGroup]:
    store_of = meeting()
    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(lambda rank: GlooGroup(store_of(rank), HOST, rank, world_size, timeout_s), range(world_size)))


@pytest.fixture(scope="module")
def group() -> Iterator[list[GlooGroup]]:
    members = make_group(WORLD)
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


@settings(max_examples=40)
@given(specs=tensor_specs, limit=st.sampled_from([1, 16, 64, 2**20]), seed=st.integers(0, 2**31))
def test_every_receiver_gets_every_tensor_bit_by_bit(
    group: list[GlooGroup], specs: list[tuple[tuple[int, ...], str]], limit: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    manifest = [(f"t{i}", shape, dtype) for i, (shape, dtype) in enumerate(specs)]
    sent = [random_tensor(shape, dtype, generator) for shape, dtype in specs]
    with ThreadPoolExecutor(WORLD) as pool:
        receiving = pool.map(lambda member: list(broadcast.receive(member, manifest, limit=limit)), group[1:])
        broadcast.send(group[0], manifest, iter(sent), limit=limit)
        for received in receiving:
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
        ([("a", (2,), "float32")], [torch.zeros(3)], r"'a' is torch.float32 \(3,\), but the manifest .* torch.float32 \(2,\)"),
        ([("a", (2,), "float32")], [torch.zeros(2)] * 2, r"more tensors than the 1"),
    ],
)
def test_a_bad_manifest_or_tensors_that_do_not_match_it_are_refused(
    manifest: broadcast.TensorManifest, tensors: list[torch.Tensor], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        broadcast.send(make_group(1)[0], manifest, tensors)


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

    with pytest.raises(TransferError, match=rf"transfer of tensor 'big' failed{reason}"):
        transfer()
    sender.close()
    receiver.close()


def test_rank_0_hears_why_another_rank_failed_and_nobody_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it entered the group, where rank 0 would only see that somebody left."""
    sent: queue.Queue[Any] = queue.Queue()
    plan = ReshardPlan((), 2, 2)
    options: dict[str, Any] = {"dtype": torch.float32, "timeout_s": TIMEOUT_S}
    params = {"p": torch.zeros(2, 2)}
    root = ShardSender(plan, params, rank=0, broadcast_from_root=sent.put, **options)
    other = ShardSender(plan, params, rank=1, broadcast_from_root=lambda _: sent.get(timeout=TIMEOUT_S), **options)

    def enter(name: str, store: Any, member: Member, *args: Any, **options: Any) -> Any:
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


@pytest.mark.parametrize("error", [RuntimeError("no memory"), TransferError("sending 'p' to rank 2 failed")])
def test_rank_0_hears_if_another_rank_failed_at_its_own_work(error: RuntimeError, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Any] = []
    options: dict[str, Any] = {"dtype": torch.float32, "timeout_s": TIMEOUT_S, "broadcast_from_root": lambda _: heard.pop()}
    root, other = (ShardSender(ReshardPlan((), 2, 2), {"p": torch.zeros(2, 2)}, rank=rank, **options) for rank in range(2))
    heard += [False, [HOST, root.open_rendezvous(HOST)]]
    monkeypatch.setattr(sender, "join", Mock())
    monkeypatch.setattr(move, "send", Mock(side_effect=error))
    other.update_as_non_root()
    root.close()
    assert (root.failed, root.own_fault) == (
        f"The first other trainer rank to fail was rank 1: {error}", not isinstance(error, TransferError)
    )  # fmt: skip


def test_a_rank_that_cannot_reach_the_meeting_says_so_itself(tmp_path: Path) -> None:
    heard: Iterator[Any] = iter([[HOST, str(tmp_path / "of another machine")], False])
    options: dict[str, Any] = {"dtype": torch.float32, "timeout_s": TIMEOUT_S}
    params = {"p": torch.zeros(2, 2)}
    other = ShardSender(ReshardPlan((), 2, 2), params, rank=1, broadcast_from_root=lambda _: next(heard), **options)
    with pytest.warns(
        UserWarning, match=r"rank 1 cannot take part in .*: .* meets in .*of another machine, which is not there"
    ):
        other.update_as_non_root()


@pytest.mark.parametrize("name", ["nccl", "ipc"])
def test_a_member_without_a_gpu_is_told_what_to_set(name: str) -> None:
    with pytest.raises(RuntimeError, match=rf"rank 1 .* runs on cpu, but rollout.server.transport = {name} needs CUDA on both"):
        join(name, HashStore(), Member(1, 2, CPU, HOST), 1.0)


def test_an_order_of_many_experts_passes_through_the_store() -> None:
    """torch's TCPStore closes the connection at a value above 8 MiB."""
    regions = [Region(Box((192 * row, 0), (192 * row + 192, 4096))) for row in range(256)]
    names = [f"model.layers.{layer}.mlp.experts.routed_experts.w13_weight" for layer in range(180)]
    ends = [move.MoveEnd(row % 8, name, name, region) for name in names for row, region in enumerate(regions)]
    order, store = ReceiveOrder(ends, "bfloat16", 2**20), TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    store.set("order", order.encode())  # type: ignore[arg-type]  # takes bytes
    assert ReceiveOrder.decode(store.get("order")) == order
