"""Sends small values between ranks without pickle."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined] # torch exports it without saying so


def broadcast_json(value: Any, *, source: int, device: torch.device, group: dist.ProcessGroup | None = None) -> Any:
    """Returns ``source``'s value as JSON, with exact floats. Every rank calls."""
    if dist.get_world_size() == 1:
        return json.loads(json.dumps(value))
    data = json.dumps(value).encode() if dist.get_rank() == source else b""
    size = torch.tensor([len(data)], device=device)
    dist.broadcast(size, src=source, group=group)
    payload = torch.frombuffer(bytearray(data or int(size.item())), dtype=torch.uint8).to(device)
    dist.broadcast(payload, src=source, group=group)
    return json.loads(bytes(payload.cpu().tolist()))


def all_gather_json(value: Any, *, device: torch.device, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Returns values by rank. Every rank of the group calls."""
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([data.numel()], device=device), group=group)
    lengths = [int(size.item()) for size in sizes]
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: data.numel()] = data
    everyone = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(everyone, padded, group=group)
    return [json.loads(bytes(payload[:length].cpu().tolist())) for payload, length in zip(everyone, lengths, strict=True)]


@contextmanager
def objects_as_json(device: torch.device) -> Iterator[None]:
    """Makes ``torch.distributed.all_gather_object``, for Megatron's optimizers, send JSON."""
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
    return tuple(_as_tuples(item) for item in value) if isinstance(value, list) else value


_FOR_EVER = timedelta(days=365)  # the heartbeat watch ends what hangs; a lost machine breaks the connection
_KEPT = 1000  # no rank is so many signals late: every step has collectives of all ranks


class RootSignal:
    def __init__(self) -> None:
        self._count = 0
        self._alone = dist.get_world_size() == 1
        self._is_root = dist.get_rank() == 0
        if not self._alone:
            # A separate connection: waiting on the process group's would keep NCCL's threads from the store.
            store: Any = dist.distributed_c10d._get_default_store()  # clone() is missing in torch's stubs
            self._store = PrefixStore("tepo/root", store.clone())

    def pass_on(self) -> None:
        if self._alone:
            return
        self._count += 1
        if not self._is_root:
            self._store.wait([str(self._count)], _FOR_EVER)
            return
        self._store.set(str(self._count), "1")
        if self._count > _KEPT:
            self._store.delete_key(str(self._count - _KEPT))
