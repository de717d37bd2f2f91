"""Transports: config names them all, a new file is a new one, and members that cannot form a group are told so before."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist

from tepo_megatron.config.rollout import ServerConfig
from tepo_megatron.weights.transfer import transports
from tepo_megatron.weights.transfer.transport import (
    Introduction,
    Member,
    Rendezvous,
    TransportSpec,
    check_members,
    connect,
    listen,
)
from tepo_megatron.weights.transfer.transports import find_transport, gloo, join, transport_names
from tepo_megatron.weights.transfer.transports.gloo import GlooGroup
from tests.support.programs import TIMEOUT_S

HOST = "127.0.0.1"
TRAINER = Introduction("trainer rank 0", "a", "10.0.0.1", "GPU-1", "2.29.7")
WORKER = Introduction("worker 0 of a rollout server", "b", "10.0.0.2", "GPU-2", "2.29.7")

PLANTED = {
    "versions": (replace(WORKER, nccl="2.27.3"), r"trainer rank 0 \(10.0.0.1\) has NCCL 2.29.7, worker 0 .* has NCCL 2.27.3"),
    "no NCCL": (replace(WORKER, nccl=""), "joins equal versions only"),
    "one GPU": (
        replace(WORKER, host="a", gpu="GPU-1"),
        "on the same GPU, GPU-1, and NCCL takes .*transport = auto or gloo",
    ),
    "interface": (
        replace(WORKER, address="127.0.0.1"),
        r"worker 0 .*\(127.0.0.1\) offers a loopback .* rollout.server.interface",
    ),
}


def roll(*members: Introduction, nccl: bool = True, may_share: bool = False) -> str:
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    for rank, member in enumerate(members):
        member.announce(store, rank)
    return check_members(store, len(members), nccl=nccl, may_share=may_share)


@pytest.mark.parametrize("planted", PLANTED)
def test_what_cannot_be_joined_is_named_with_what_to_set(planted: str) -> None:
    worker, message = PLANTED[planted]
    with pytest.raises(RuntimeError, match=message):
        roll(TRAINER, worker)


def test_what_can_be_joined_is_not_refused_and_a_shared_gpu_is_said_where_gloo_may_stand_in() -> None:
    """Whatever the versions there; what gloo cannot do is refused as ever."""
    shared = replace(WORKER, host="a", gpu="GPU-1", nccl="2.27.3")
    assert roll(TRAINER, WORKER) == roll(TRAINER, WORKER, may_share=True) == roll(TRAINER, shared, nccl=False) == ""
    assert roll(TRAINER, replace(WORKER, gpu="GPU-1")) == "", "GPUs of one uuid on two machines are two"
    assert roll(TRAINER, replace(WORKER, host="a", address="127.0.0.1"), nccl=False) == ""
    assert roll(TRAINER, shared, may_share=True) == (
        "trainer rank 0 (10.0.0.1) and worker 0 of a rollout server (10.0.0.2) are on the same GPU, GPU-1"
    )
    for planted in ("versions", "interface"):
        with pytest.raises(RuntimeError, match=PLANTED[planted][1]):
            roll(TRAINER, PLANTED[planted][0], may_share=True)


def test_all_members_of_a_shared_gpu_take_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a real store, where NCCL was chosen; its own joining would fail here, where there is no GPU."""

    introduce = Introduction.of
    monkeypatch.setattr(Introduction, "of", lambda member: replace(introduce(member), gpu="GPU-1", nccl="2.29.7"))
    monkeypatch.setattr(transports, "find_transport", lambda name: gloo.TRANSPORT if name == "gloo" else TransportSpec(refuse))
    store, place = listen(HOST)

    def enter(rank: int) -> Any:
        own = store if rank == 0 else connect(HOST, place, TIMEOUT_S)
        return transports.join("nccl", own, Member(rank, 2, torch.device("cpu"), HOST), TIMEOUT_S, or_gloo=True)

    with ThreadPoolExecutor(2) as pool, pytest.warns(UserWarning, match=r"on the same GPU, GPU-1: the weights take gloo"):
        groups = list(pool.map(enter, (0, 1)))
    assert [type(group) for group in groups] == [gloo.GlooGroup] * 2
    for group in groups:
        group.close()


def refuse(store: object, member: object, timeout_s: float) -> Any:
    raise AssertionError("NCCL was to join")


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

    introduce = Introduction.of
    host = {0: "here", 1: "elsewhere"}
    monkeypatch.setattr(Introduction, "of", lambda member: replace(introduce(member), host=host[member.rank]))
    store, place = listen(HOST)

    def enter(rank: int) -> None:
        name = "trainer rank 0" if rank == 0 else "worker 0"
        own = store if rank == 0 else connect(HOST, place, TIMEOUT_S)
        if late and rank == 1:
            assert came.wait(TIMEOUT_S)
        try:
            transports.join("gloo", own, Member(rank, 2, torch.device("cpu"), HOST, name), TIMEOUT_S)
        finally:
            gone.set()

    if late:
        monkeypatch.setattr(Rendezvous, "member_left", look_late)
    with ThreadPoolExecutor(2) as pool:
        for entering in [pool.submit(enter, rank) for rank in (0, 1)]:
            with pytest.raises(RuntimeError, match=r"trainer rank 0 \(127.0.0.1\) offers a loopback address"):
                entering.result(TIMEOUT_S)


# -- the list of transports

MODULE = """
from tepo_megatron.weights.transfer.transport import TransportSpec

TRANSPORT = TransportSpec(join=lambda store, member, timeout_s: (store, member, timeout_s))
"""


def test_config_offers_every_transport_that_there_is_and_no_other() -> None:
    offered = get_args(ServerConfig.model_fields["transport"].annotation)
    assert sorted(offered) == sorted(["auto", *transport_names()])
    explained = Path(sys.modules[ServerConfig.__module__].__file__ or "").read_text()
    for name in transport_names():
        assert isinstance(find_transport(name), TransportSpec)
        assert f"``{name}``" in explained


def test_a_new_file_is_a_new_transport(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pigeon.py").write_text(MODULE)
    monkeypatch.setattr(transports, "__path__", [*transports.__path__, str(tmp_path)])
    member, store = Member(0, 1, torch.device("cpu"), "127.0.0.1"), dist.HashStore()  # type: ignore[attr-defined]
    try:
        assert "pigeon" in transport_names()
        given: Any = join("pigeon", store, member, 2.0)
        assert given == (store, member, 2.0)
    finally:
        sys.modules.pop(f"{transports.__name__}.pigeon", None)


def test_an_unknown_transport_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=f"transport = pigeon is not known; known: {', '.join(transport_names())}"):
        find_transport("pigeon")


def test_a_member_that_hangs_between_arriving_and_joining_is_not_waited_for_beyond_the_time_out() -> None:
    """All are counted as there, but one takes no part in forming the group: gloo's own rendezvous has no default of minutes."""
    store, place = listen("127.0.0.1")
    hanging = connect("127.0.0.1", place, 60.0)
    hanging.add("joined", 1)
    with pytest.raises(RuntimeError, match="timeout"):
        GlooGroup(store, "127.0.0.1", 0, 2, 2.0)
    assert hanging.check(["left"])  # and the others know
