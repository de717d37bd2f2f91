"""Objects between vLLM's workers: read only if another worker with the run's key has made them."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import distributed_c10d

from tepo_megatron.sampler.vllm.plugin.patches import sign_objects
from tests.support.launch import run_dist
from tests.support.stranger import Payload


@pytest.fixture(autouse=True)
def torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts back what a test exchanges."""
    monkeypatch.setattr(distributed_c10d, "_pickler", distributed_c10d._pickler)
    monkeypatch.setattr(distributed_c10d, "_unpickler", distributed_c10d._unpickler)


def read(data: bytes) -> Any:
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return distributed_c10d._tensor_to_object(tensor, len(data), None)


def written(value: object) -> bytes:
    distributed_c10d._pickler(file := io.BytesIO()).dump(value)
    return file.getvalue()


def test_a_pickle_without_the_signature_runs_nothing(tmp_path: Path) -> None:
    data = pickle.dumps(Payload(str(tmp_path / "proof")))
    read(data)
    assert (tmp_path / "proof").exists()  # torch's own collectives run it
    (tmp_path / "proof").unlink()
    sign_objects("key")
    for forged in (data, b"\0" * 32 + data, b"\0" * 32, data[:5]):
        with pytest.raises(RuntimeError, match="no other worker of this server has signed"):
            read(forged)
    sign_objects("another key")
    signed = written(Payload(str(tmp_path / "proof")))
    sign_objects("key")
    with pytest.raises(RuntimeError, match="no other worker of this server has signed"):
        read(signed)
    assert not (tmp_path / "proof").exists()


@given(
    value=st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.tuples(inner)),
    bit=st.integers(0),
)
def test_what_is_signed_comes_back_and_no_bit_may_differ(value: object, bit: int) -> None:
    sign_objects("key")
    data = bytearray(written(value))
    assert read(bytes(data)) == value
    data[bit // 8 % len(data)] ^= 1 << bit % 8
    with pytest.raises(RuntimeError, match="signed"):
        read(bytes(data))


def exchange(rank: int, world: int) -> Any:
    sign_objects("key")
    found: list[Any] = [None] * world
    dist.all_gather_object(found, {"rank": rank, "tensor": torch.full((rank,), 1.5)})
    dist.broadcast_object_list(word := [("from", rank)], src=1)
    return [(each["rank"], each["tensor"].tolist()) for each in found], word


def test_workers_exchange_objects_as_before() -> None:
    assert run_dist(2, exchange) == [([(0, []), (1, [1.5])], [("from", 1)])] * 2
