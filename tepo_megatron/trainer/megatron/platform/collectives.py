"""Sends small values between ranks without pickle."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist


def broadcast_json(value: Any, *, source: int, device: torch.device, group: dist.ProcessGroup | None = None) -> Any:
    """Returns ``source``'s value on every rank; the value of the others is not read.

    The value is anything that JSON carries; floats arrive exactly. ``group`` has all ranks and works on tensors of ``device``;
    by default it is torch's own. Every rank calls.
    """
    if dist.get_world_size() == 1:
        return json.loads(json.dumps(value))
    data = json.dumps(value).encode() if dist.get_rank() == source else b""
    size = torch.tensor([len(data)], device=device)
    dist.broadcast(size, src=source, group=group)
    payload = torch.zeros(int(size.item()), dtype=torch.uint8)
    if data:
        payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    payload = payload.to(device)
    dist.broadcast(payload, src=source, group=group)
    return json.loads(bytes(payload.cpu().tolist()))


def all_gather_json(value: Any, *, device: torch.device, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Returns the values of all ranks of ``group`` (default: all), by rank. They are anything that JSON carries; floats arrive
    exactly. Travels on tensors of ``device``. Every rank of the group calls.
    """
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([data.numel()], device=device), group=group)
    lengths = [int(size.item()) for size in sizes]
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: data.numel()] = data
    everyone = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(everyone, padded, group=group)
    return [json.loads(bytes(each[:length].cpu().tolist())) for each, length in zip(everyone, lengths, strict=True)]


@contextmanager
def objects_as_json(device: torch.device) -> Iterator[None]:
    """Within the block ``torch.distributed.all_gather_object`` sends JSON instead of a pickle: of each rank a list of tuples.

    For Megatron's optimizers, which compare the keys of their parameter groups between ranks when they are built.
    """
    original = dist.all_gather_object

    def gather(object_list: list[Any], obj: list[Any], group: dist.ProcessGroup | None = None) -> None:
        if group is not None:
            raise ValueError("all_gather_object travels as JSON here, and between all ranks only")
        object_list[:] = [[_as_tuples(key) for key in keys] for keys in all_gather_json(obj, device=device)]

    dist.all_gather_object = gather
    try:
        yield
    finally:
        dist.all_gather_object = original


def _as_tuples(value: Any) -> Any:
    """JSON has lists only; what is compared and hashed are tuples."""
    return tuple(_as_tuples(item) for item in value) if isinstance(value, list) else value
