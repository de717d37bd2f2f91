"""The list of transports: each module declares one, config offers the same names, and a new file is a new transport."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist

from tepo_megatron.config.rollout import ServerConfig
from tepo_megatron.weights.transfer import transports
from tepo_megatron.weights.transfer.transport import Member, TransportSpec, connect, listen
from tepo_megatron.weights.transfer.transports import find_transport, join, transport_names
from tepo_megatron.weights.transfer.transports.gloo import GlooGroup

MODULE = """
from tepo_megatron.weights.transfer.transport import TransportSpec

TRANSPORT = TransportSpec(join=lambda store, member, timeout_s: (store, member, timeout_s))
"""


def test_config_offers_every_transport_that_there_is_and_no_other() -> None:
    offered = get_args(ServerConfig.model_fields["transport"].annotation)
    assert sorted(offered) == sorted(["auto", *transport_names()])


@pytest.mark.parametrize("name", transport_names())
def test_every_module_of_the_folder_declares_a_transport(name: str) -> None:
    assert isinstance(find_transport(name), TransportSpec)
    assert f"``{name}``" in (Path(sys.modules[ServerConfig.__module__].__file__ or "").read_text()), (
        "config does not explain it"
    )


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
