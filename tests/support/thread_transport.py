"""A transport between threads of one process: what ``bridge.transfer.move`` does over a network, without one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


class Mailbox:
    """One rank's transport. Ranks of one world share ``letters``, and send by copy."""

    def __init__(self, rank: int, letters: dict[tuple[int, int, int], Tensor], arrived: threading.Condition) -> None:
        self.rank, self.letters, self.arrived = rank, letters, arrived
        self.landing: dict[tuple[int, int], Tensor] = {}
        self.largest = 0

    def device(self, peer: int) -> torch.device:
        return torch.device("cpu")

    def round(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def send(self, data: Tensor, peer: int, number: int) -> None:
        self.largest = max(self.largest, data.nbytes)
        with self.arrived:
            self.letters[self.rank, peer, number] = data.clone()
            self.arrived.notify_all()

    def receive(self, data: Tensor, peer: int, number: int) -> None:
        assert data.is_contiguous()
        self.landing[peer, number] = data

    def wait(self, peer: int, number: int) -> None:
        if (peer, number) not in self.landing:
            return
        with self.arrived:
            key = (peer, self.rank, number)
            if not self.arrived.wait_for(lambda: key in self.letters, timeout=20):
                raise RuntimeError("timed out")
            letter = self.letters.pop(key)
        landing = self.landing.pop((peer, number))
        assert letter.shape == landing.shape
        assert letter.dtype == landing.dtype
        landing.copy_(letter)

    def close(self) -> None: ...

    # what gloo offers beside, for a transport that stands on it

    def start_send(self, data: Tensor, peer: int, number: int) -> Work:
        self.send(data, peer, number)
        return Work(lambda: None)

    def start_receive(self, data: Tensor, peer: int, number: int) -> Work:
        def wait() -> None:
            self.receive(data, peer, number)
            self.wait(peer, number)

        return Work(wait)


@dataclass
class Work:
    wait: Callable[[], None]
