"""A transport between threads of one process: ``weights.transfer.move`` without a network."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.support.programs import TIMEOUT_S


class Letters:
    """Messages on their way, by sender, receiver and number. Whoever takes one waits for this one alone: were all woken by
    every message, 40 ranks would do little else.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slots: defaultdict[tuple[int, int, int], queue.SimpleQueue[Tensor]] = defaultdict(queue.SimpleQueue)

    def put(self, key: tuple[int, int, int], letter: Tensor) -> None:
        self._slot(key).put(letter)

    def take(self, key: tuple[int, int, int]) -> Tensor:
        try:
            letter = self._slot(key).get(timeout=TIMEOUT_S)
        except queue.Empty:
            raise RuntimeError("timed out") from None
        with self._lock:
            del self._slots[key]
        return letter

    def _slot(self, key: tuple[int, int, int]) -> queue.SimpleQueue[Tensor]:
        with self._lock:
            return self._slots[key]


class Mailbox:
    """One rank's transport. Ranks of one world share ``letters``, and send by copy."""

    def __init__(self, rank: int, letters: Letters) -> None:
        self.rank, self.letters = rank, letters
        self.landing: dict[tuple[int, int], Tensor] = {}
        self.largest = 0
        self.sizes: list[tuple[int, int]] = []
        """(peer, bytes) of everything sent."""
        self.corrupt = False
        """The first message of more than a byte loses a bit on its way."""
        self.cancelled: Callable[[], bool] = lambda: False

    rounds = 0

    def device(self, peer: int) -> torch.device:
        return torch.device("cpu")

    def round(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def send(self, data: Tensor, peer: int, number: int) -> None:
        self.largest = max(self.largest, data.nbytes)
        self.sizes.append((peer, data.nbytes))
        letter = data.clone()
        if self.corrupt and data.nbytes > 1:
            self.corrupt = False
            letter.view(torch.uint8)[5] ^= 1
        self.letters.put((self.rank, peer, number), letter)

    def receive(self, data: Tensor, peer: int, number: int) -> None:
        assert data.is_contiguous()
        self.landing[peer, number] = data

    def wait(self, peer: int, number: int) -> None:
        if (peer, number) not in self.landing:
            return
        letter = self.letters.take((peer, self.rank, number))
        landing = self.landing.pop((peer, number))
        assert letter.shape == landing.shape
        assert letter.dtype == landing.dtype
        landing.copy_(letter)

    def finish(self) -> None: ...

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
