"""Puts the trainer's weights into running servers, which hold responses in progress and continue them with the new weights.

Servers on the trainer's GPUs sleep instead of pausing, and get no cache until the trainer has made room. A failure leaves the
weights undefined: restart the servers, and make a new sync.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from torch import Tensor

from tepo_megatron.core.rollout import WeightsVersion
from tepo_megatron.sampler.vllm.client.client import Client
from tepo_megatron.sampler.vllm.client.connection import ServerFault, ServerGone, ServerSilent
from tepo_megatron.weights.transfer import full_tensors
from tepo_megatron.weights.transfer.full_tensors import TensorManifest
from tepo_megatron.weights.transfer.sender import ShardSender
from tepo_megatron.weights.transfer.transport import announce_departure, listen
from tepo_megatron.weights.transfer.transports.gloo import GlooGroup

T = TypeVar("T")

LOOK_S = 2.0
"""Time between two health checks of a server that is silent in an update."""


class WeightSync(ABC):
    """The servers' part of an update. All errors are RuntimeErrors; ServerSilent if a server hangs.

    ``host`` is an address of this machine that servers reach; ``tp`` the workers of each; ``timeout_s`` bounds every message,
    ``answer_timeout_s`` an answer after all weights are sent. ``asleep``: servers sleep before every update. ``keep_cache``:
    held responses keep their keys and values.
    """

    def __init__(
        self,
        clients: Sequence[Client],
        *,
        host: str,
        tp: int,
        timeout_s: float,
        answer_timeout_s: float | None = None,
        asleep: bool = False,
        keep_cache: bool = False,
    ) -> None:
        self._clients, self._host, self._tp, self._timeout_s = list(clients), host, tp, timeout_s
        self._answer_timeout_s = answer_timeout_s or timeout_s
        self._asleep, self._keep_cache = asleep, keep_cache
        self._pool = ThreadPoolExecutor(len(self._clients) + 1, thread_name_prefix="weight-sync")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._close_group()

    @abstractmethod
    def _close_group(self) -> None:
        """What the workers still wait for then fails."""

    def _start_update(self) -> None:
        if self._asleep:
            self._everywhere(lambda client: client.wake_up("weights"))
        else:
            self._everywhere(lambda client: client.pause(keep_cache=self._keep_cache))
        self._everywhere(Client.start_weight_update)

    def _join_group(
        self,
        enter: Callable[[], T],
        leave: Callable[[], None],
        place: str,
        *,
        first_worker: int,
        world_size: int,
        sharded: bool,
        adapters: bool = False,
    ) -> T:
        """Returns what ``enter``, by which this process joins, returns. ``leave`` tells waiting members that nobody comes."""
        joining = [
            self._pool.submit(
                client.init_weight_transfer,
                self._host,
                place,
                rank_offset=first_worker + self._tp * index,
                world_size=world_size,
                timeout_s=self._timeout_s,
                sharded=sharded,
                adapters=adapters,
            )
            for index, client in enumerate(self._clients)
        ]
        own = self._pool.submit(enter)
        # After a server's failure this side waits for it until the time-out; the error need not.
        members: list[Future[Any]] = [*joining, own]
        wait(members, return_when=FIRST_EXCEPTION)
        if any(_failed(member) for member in members):
            leave()
            self._await_answers(joining)  # servers that waited for another answer now; a silent one is at fault
            message = f"the servers did not join the weight-transfer group. {_causes(members)}"
            raise _failure(message, joining, self._silent(joining))
        return own.result()

    def _transfer(self, receive: Callable[[Client], None], send: Callable[[Callable[[], bool]], None]) -> None:
        receiving = [self._pool.submit(receive, client) for client in self._clients]
        failed: RuntimeError | None = None
        try:
            send(lambda: any(_failed(request) for request in receiving))
            wait(receiving, self._answer_timeout_s, return_when=FIRST_EXCEPTION)
        except RuntimeError as error:
            failed = error
        if failed is None and all(request.done() and not _failed(request) for request in receiving):
            return
        # This end only sees a connection close; which server failed, and at what, is in that server's answer. Other servers
        # may wait for a trainer rank that waits for the one that failed, until this one leaves.
        self._close_group()
        self._await_answers(receiving)
        raise _failure(_causes(receiving) or str(failed or ""), receiving, self._silent(receiving)) from failed

    def _await_answers(self, requests: Sequence[Future[None]]) -> None:
        """Gives servers that wait for a member that left the time of one message to report it."""
        wait(requests, self._timeout_s)

    def _silent(self, requests: Sequence[Future[None]]) -> list[str]:
        return [client.url for client, request in zip(self._clients, requests, strict=True) if not request.done()]

    def _finish_update(self, version: WeightsVersion) -> None:
        self._everywhere(lambda client: client.finish_weight_update(version))
        if not self._keep_cache:  # vLLM forgets nothing while a response holds a part of it
            self._everywhere(Client.reset_prefix_cache)
        if not self._asleep:
            self._everywhere(Client.resume)

    def _everywhere(self, request: Callable[[Client], None]) -> None:
        self._collect([self._pool.submit(request, client) for client in self._clients])

    def _collect(self, requests: Sequence[Future[None]]) -> None:
        while waiting := wait(requests, LOOK_S).not_done:
            for client, request in zip(self._clients, requests, strict=True):
                if request in waiting:
                    _end_if_gone(client)
        causes = [request.exception() for request in requests if _failed(request)]
        if not causes:
            return
        error = _failure(_causes(requests), requests, [])
        first = causes[0]
        # No weights travel here, so only the server can be at fault.
        if isinstance(first, ServerFault) and all(isinstance(cause, ServerFault) for cause in causes):
            error = type(first)(str(error), url=first.url)
        raise error


class BroadcastSync(WeightSync):
    """Sends full tensors from this process to all workers."""

    _group: GlooGroup | None = None
    _adapters = False

    def update_weights(self, version: WeightsVersion, manifest: TensorManifest, tensors: Iterable[Tensor]) -> None:
        """Sends all tensors of the manifest, in order.

        Raises RuntimeError naming the server and the tensor when either side fails, within about the time-out.
        """
        group = self._group = self._group or self._form()
        self._start_update()
        self._transfer(
            lambda client: client.receive_tensors(manifest),
            lambda cancelled: full_tensors.send(group, manifest, tensors, cancelled=cancelled),
        )
        self._finish_update(version)

    def _form(self) -> GlooGroup:
        world_size = 1 + self._tp * len(self._clients)
        store, place = listen(self._host)
        return self._join_group(
            lambda: GlooGroup(store, self._host, 0, world_size, self._timeout_s),
            lambda: announce_departure(store),
            place,
            first_worker=1,
            world_size=world_size,
            sharded=False,
            adapters=self._adapters,
        )

    def _close_group(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


class AdapterSync(BroadcastSync):
    """As :class:`BroadcastSync`, for LoRA adapters."""

    _adapters = True

    def update_adapters(
        self, version: WeightsVersion, manifest: TensorManifest, tensors: Iterable[Tensor], settings: Mapping[str, Any]
    ) -> None:
        """As :meth:`update_weights`; ``settings`` are those of a PEFT folder."""
        group = self._group = self._group or self._form()
        self._start_update()
        self._transfer(
            lambda client: client.receive_adapters(manifest, settings),
            lambda cancelled: full_tensors.send(group, manifest, tensors, cancelled=cancelled),
        )
        self._finish_update(version)
        self._everywhere(Client.use_adapter)


class ShardSync(WeightSync):
    """Sends shards from every trainer rank. Rank 0 calls; the others ``update_as_non_root``."""

    _sender: ShardSender | None = None

    def update_weights(self, version: WeightsVersion, sender: ShardSender) -> None:
        """Raises RuntimeError naming the server, the tensor and the ranks when anything fails, within about the time-out. The
        caller must always call ``sender.finish_update`` afterwards, since the other ranks wait for it.
        """
        if self._sender is None:
            self._sender = sender
            place = sender.open_rendezvous(self._host)
            sender.broadcast_rendezvous()
            self._join_group(
                sender.join_group,
                self._close_group,
                place,
                first_worker=sender.num_sources,
                world_size=sender.world_size,
                sharded=True,
            )
        else:
            sender.broadcast_rendezvous()
        self._start_update()
        self._transfer(Client.receive_shards, sender.send_shards)
        self._finish_update(version)

    def _close_group(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None


def _end_if_gone(client: Client) -> None:
    """A server with a dead engine, or that refuses connections, would never answer its request. A silent one may be slow."""
    try:
        client.progress()
    except ServerGone:
        client.close()
        raise
    except ServerSilent:
        return


def _failed(request: Future[Any]) -> bool:
    return request.done() and request.exception() is not None


def _causes(requests: Sequence[Future[Any]]) -> str:
    return "; ".join(str(request.exception()) for request in requests if _failed(request))


def _failure(message: str, requests: Sequence[Future[Any]], silent: Sequence[str]) -> RuntimeError:
    if silent:
        message = f"{' and '.join(silent)} gave no answer, also when the others had left. {message}".rstrip()
        return ServerSilent(message, url=silent[0])
    hangs = any(isinstance(request.exception(), ServerSilent) for request in requests if request.done())
    return ServerSilent(message) if hangs else RuntimeError(message)
