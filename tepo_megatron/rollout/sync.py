"""Puts the trainer's weights into running servers: pause, stream, finish, forget the prefix cache, resume."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any

from torch import Tensor

from tepo_megatron.bridge import transport
from tepo_megatron.bridge.transport import Manifest
from tepo_megatron.rollout.client import Client
from tepo_megatron.types import WeightsVersion


class WeightSync:
    """The transfer group of rank 0 (the trainer) and all workers of the servers, and the protocol of an update.

    The group is formed at the first update. After a failure the servers' weights are undefined: they must be restarted, and a
    new WeightSync made. ``host`` is an address of this machine that the servers reach; ``tp`` the workers of each.
    """

    def __init__(self, clients: Sequence[Client], *, host: str, tp: int, timeout_s: float) -> None:
        self._clients, self._host, self._tp, self._timeout_s = list(clients), host, tp, timeout_s
        self._pool = ThreadPoolExecutor(len(self._clients) + 1, thread_name_prefix="weight-sync")
        self._group: transport.TransferGroup | None = None

    def push(self, version: WeightsVersion, manifest: Manifest, tensors: Iterable[Tensor]) -> None:
        """Send all tensors of the manifest, in its order, and have every server use them from the next token on.

        Raises RuntimeError naming the server and the tensor when either side fails, within about the time-out.
        """
        if self._group is None:
            self._group = self._join()
        self._everywhere(Client.pause)
        self._everywhere(Client.start_update)
        receiving = [self._pool.submit(client.receive_weights, manifest) for client in self._clients]
        try:
            transport.send(self._group, manifest, tensors, cancelled=lambda: any(_failed(f) for f in receiving))
        except RuntimeError as error:
            # The trainer's end only sees a connection close; which server failed, and at what, is in that server's answer.
            wait(receiving, self._timeout_s)
            raise RuntimeError(_causes(receiving) or str(error)) from error
        self._collect(receiving)
        self._everywhere(lambda client: client.finish_update(version))
        self._everywhere(Client.reset_prefix_cache)
        self._everywhere(Client.resume)

    def close(self) -> None:
        """Leave the group. Requests that still run go on in their threads until they are answered or time out."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._group is not None:
            self._group.close()
            self._group = None

    def _join(self) -> transport.TransferGroup:
        world_size = 1 + self._tp * len(self._clients)
        store, port = transport.listen(self._host)
        joining = [
            self._pool.submit(client.join_transfer, self._host, port, 1 + self._tp * index, world_size, self._timeout_s)
            for index, client in enumerate(self._clients)
        ]
        own = self._pool.submit(transport.TransferGroup, store, self._host, 0, world_size, self._timeout_s)
        # A server that fails leaves this side waiting for it until the time-out; the error need not wait for that.
        members: list[Future[Any]] = [*joining, own]
        wait(members, return_when=FIRST_EXCEPTION)
        if causes := _causes(members):
            raise RuntimeError(f"the servers did not enter the weight-transfer group. {causes}")
        return own.result()

    def _everywhere(self, request: Callable[[Client], None]) -> None:
        self._collect([self._pool.submit(request, client) for client in self._clients])

    def _collect(self, requests: Sequence[Future[None]]) -> None:
        wait(requests)
        if causes := _causes(requests):
            raise RuntimeError(causes)


def _failed(request: Future[Any]) -> bool:
    return request.done() and request.exception() is not None


def _causes(requests: Sequence[Future[Any]]) -> str:
    return "; ".join(str(request.exception()) for request in requests if _failed(request))
