"""Has the other ranks wait for rank 0 outside any collective, and so for as long as it samples: no collective's clock runs."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined] # torch exports it without saying so

_FOR_EVER = timedelta(days=365)
"""Nothing that rank 0 does before it answers has a limit here. What hangs, the watch ends (``watch/``); if rank 0's machine or
the store is gone, the connection breaks."""

_KEPT = 1000
"""Keys that the store keeps. No rank is so many signals behind rank 0: every step has collectives of all ranks."""


class RootSignal:
    """One per rank, made by all; ``pass_on`` returns on every rank when rank 0 has called it as often as this one."""

    def __init__(self) -> None:
        self._count = 0
        self._alone = dist.get_world_size() == 1
        self._is_root = dist.get_rank() == 0
        if not self._alone:
            # A connection of its own: who waits on the process group's would keep NCCL's own threads from the store.
            store: Any = dist.distributed_c10d._get_default_store()  # clone() is missing in torch's stubs
            self._store = PrefixStore("tepo/root", store.clone())

    def pass_on(self) -> None:
        """Every rank calls. Raises torch's DistError if the store is gone."""
        if self._alone:
            return
        self._count += 1
        if not self._is_root:
            self._store.wait([str(self._count)], _FOR_EVER)
            return
        self._store.set(str(self._count), "1")
        if self._count > _KEPT:
            self._store.delete_key(str(self._count - _KEPT))
