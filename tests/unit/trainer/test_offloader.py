"""Storages that leave and come back in pieces, and what is dropped with them; tests/dist/test_offload.py has whole runs."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.trainer.megatron import offload

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def small_pieces() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload, "CHUNK_BYTES", 48)
        yield


def offloader_of(model: torch.nn.Module) -> offload.Offloader:
    """With an optimizer without states."""
    optimizer: Any = SimpleNamespace(optimizer=SimpleNamespace(param_groups=[], state={}))
    ddp: Any = SimpleNamespace(offload_grad_buffers=lambda **_: None, restore_grad_buffers=lambda **_: None)
    policy: Any = SimpleNamespace(chunks=[model], ddp=[ddp], optimizer=optimizer)
    return offload.Offloader(policy, CPU, barrier=lambda: None)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=5), st.integers(1, 3))
def test_every_byte_and_every_view_comes_back(sizes: list[int], times: int) -> None:
    whole = [torch.randn(size) for size in sizes]
    views = [tensor[tensor.numel() // 2 :] for tensor in whole]
    before = [tensor.clone() for tensor in whole]
    offloader = offloader_of(torch.nn.ParameterList([*whole, *views]))
    for _ in range(times):
        offloader.keep()
        assert offloader.most_offloaded == 4 * sum(sizes)
        assert not any(tensor.untyped_storage().nbytes() for tensor in whole)
        offloader.keep("weights")
        assert all(torch.equal(tensor, copy) for tensor, copy in zip(whole, before, strict=True))
        assert all(torch.equal(view, copy[copy.numel() // 2 :]) for view, copy in zip(views, before, strict=True))


def test_host_memory_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def empty(size: int, **options: Any) -> torch.Tensor:
        if "pin_memory" in options:
            made.append(size)
        return torch.zeros(size, **options)

    monkeypatch.setattr(torch, "empty", empty)
    offloader = offloader_of(torch.nn.ParameterList([torch.randn(40)]))
    for _ in range(3):
        offloader.keep()
        offloader.keep("weights")
    assert made == [48, 48, 48, 16]


def test_copies_in_fp8_leave_with_the_weights() -> None:
    model: Any = torch.nn.Linear(3, 3)
    model._fp8_workspaces = {"weight": torch.zeros(9)}  # as Transformer Engine's modules have it
    offloader = offloader_of(model)
    offloader.keep("weights")
    assert model._fp8_workspaces
    offloader.keep()
    assert not model._fp8_workspaces
