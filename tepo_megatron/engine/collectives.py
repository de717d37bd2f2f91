"""Sends small values between ranks without pickle."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


def broadcast_json(value: Any, *, source: int, device: torch.device, group: dist.ProcessGroup | None = None) -> Any:
    """Returns ``source``'s value on every rank; the value of the others is not read.

    The value is anything that JSON carries; floats arrive exactly. ``group`` has all ranks and works on tensors of ``device``;
    by default it is torch's own. Every rank calls.
    """
    if dist.get_world_size() == 1:
        return value
    data = json.dumps(value).encode() if dist.get_rank() == source else b""
    size = torch.tensor([len(data)], device=device)
    dist.broadcast(size, src=source, group=group)
    payload = torch.zeros(int(size.item()), dtype=torch.uint8)
    if data:
        payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    payload = payload.to(device)
    dist.broadcast(payload, src=source, group=group)
    return json.loads(bytes(payload.cpu().tolist()))


def gather_json(value: Any, *, device: torch.device, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Returns every rank's value, in the order of ranks, on every rank; values and ``group`` as for :func:`broadcast_json`."""
    world = dist.get_world_size()
    if world == 1:
        return [value]
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(data)], device=device), group=group)
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: len(data)] = data
    payloads = [torch.zeros_like(padded) for _ in range(world)]
    dist.all_gather(payloads, padded, group=group)
    return [json.loads(bytes(each[: int(size)].cpu().tolist())) for each, size in zip(payloads, sizes, strict=True)]
