"""Puts the trainer's weights into running servers, which then continue their responses.

Servers on the trainer's GPUs sleep instead of pausing. After a failure the weights are undefined: restart the servers, and make
a new sync.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any, TypeVar

from torch import Tensor

from tepo_megatron.config.rollout import ServerConfig
from tepo_megatron.core.rollout import WeightsVersion
from tepo_megatron.sampler.vllm.client import Client, ServerFault, ServerGone, ServerSilent
from tepo_megatron.weights.transfer import full_tensors, move
from tepo_megatron.weights.transfer.full_tensors import TensorManifest
from tepo_megatron.weights.transfer.sender import ShardSender
from tepo_megatron.weights.transfer.transport import Rendezvous, TransferError, listen
from tepo_megatron.weights.transfer.transports.gloo import GlooGroup

T = TypeVar("T")
LOOK_S = 2.0


class WeightSync:
    """Raises only RuntimeErrors; ServerFaults if another try may succeed."""

    _group: GlooGroup | ShardSender | None = None
    keep_cache = False
    """In the next update."""

    def __init__(self, clients: Sequence[Client], config: ServerConfig) -> None:
        self._clients, self._config = list(clients), config
        self._asleep = config.placement == "colocated"
        self._timeout_s = config.transfer_timeout_s
        self._pool = ThreadPoolExecutor(len(self._clients) + 1, thread_name_prefix="weight-sync")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._close_group()

    def _close_group(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def update_from_tensors(
        self,
        version: WeightsVersion,
        manifest: TensorManifest,
        tensors: Iterable[Tensor],
        adapter_settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Sends full tensors, or LoRA adapters with a PEFT folder's ``adapter_settings``, to all workers.

        Raises RuntimeError naming server and tensor.
        """
        has_adapters = adapter_settings is not None
        if not isinstance(self._group, GlooGroup):
            self._close_group()
            host, world_size = self._config.host, 1 + self._config.tp * len(self._clients)
            store, place = listen(host)
            self._group = self._join_group(
                lambda: GlooGroup(store, host, 0, world_size, self._timeout_s),
                lambda: Rendezvous.announce_departure(store),
                first_worker=1,
                info={"place": place, "world_size": world_size, "sharded": False, "adapters": has_adapters},
            )
        group = self._group
        self._start_update()
        info = {"manifest": [[name, list(shape), dtype] for name, shape, dtype in manifest]}
        self._transfer(
            lambda client: client.receive_weights(info | ({"settings": dict(adapter_settings)} if adapter_settings else {})),
            lambda cancelled: full_tensors.send(group, manifest, tensors, cancelled=cancelled),
        )
        self._finish_update(version)
        if has_adapters:
            self._everywhere(Client.use_adapter)

    def update_from_shards(self, version: WeightsVersion, sender: ShardSender) -> None:
        """Rank 0 calls; the others ``update_as_non_root``, and wait for ``sender.finish_update``: always call it afterwards.

        Raises RuntimeError naming server, tensor and ranks.
        """
        if self._group is not sender:
            self._close_group()
            self._group = sender
            place = sender.open_rendezvous(self._config.host)
            sender.broadcast_rendezvous()
            info = {"place": place, "world_size": sender.world_size, "sharded": True}
            self._join_group(sender.join_group, self._close_group, first_worker=sender.num_sources, info=info)
        else:
            sender.broadcast_rendezvous()
        self._start_update()
        try:
            self._transfer(lambda client: client.receive_weights({}), sender.send_shards)
        except ServerFault as error:
            if sender.own_fault:
                raise RuntimeError(str(error)) from error  # another rank is at fault, which no new servers mend
            raise
        self._finish_update(version)

    def _start_update(self) -> None:
        if self._asleep:
            self._everywhere(lambda client: client.wake_up("weights"))
        else:
            self._everywhere(lambda client: client.pause(keep_cache=self.keep_cache))
        self._everywhere(Client.start_weight_update)

    def _join_group(
        self, enter: Callable[[], T], leave: Callable[[], None], *, first_worker: int, info: Mapping[str, Any]
    ) -> T:
        """This process joins by ``enter``, and returns its result; ``leave`` ends the others' waits."""
        info = {"host": self._config.host, "timeout_s": self._timeout_s, **info}
        joining = [
            self._pool.submit(client.init_weight_transfer, {**info, "rank_offset": first_worker + self._config.tp * index})
            for index, client in enumerate(self._clients)
        ]
        entering = self._pool.submit(enter)
        # After a server's failure this side waits for it until the time-out; the error need not.
        members: list[Future[Any]] = [*joining, entering]
        wait(members, return_when=FIRST_EXCEPTION)
        if any(_failed(member) for member in members):
            leave()
            wait(joining, self._timeout_s)  # servers that waited for another answer now; a silent one is at fault
            raise self._failure(f"the servers did not join the weight-transfer group. {_causes(members)}", joining)
        return entering.result()

    def _transfer(self, receive: Callable[[Client], None], send: Callable[[Callable[[], bool]], None]) -> None:
        receiving = [self._pool.submit(receive, client) for client in self._clients]
        failed: RuntimeError | None = None
        try:
            send(lambda: any(_failed(request) for request in receiving))
            wait(receiving, self._config.request_timeout_s, return_when=FIRST_EXCEPTION)
        except RuntimeError as error:
            failed = error
        if failed is None and all(request.done() and not _failed(request) for request in receiving):
            return
        # This end only sees a connection close; which server failed, and at what, is in that server's answer. Other servers
        # may wait for a trainer rank that waits for the one that failed, until this one leaves.
        self._close_group()
        wait(receiving, self._timeout_s)
        causes = [request.exception() for request in receiving if _failed(request)]
        if failed is not None and not isinstance(failed, TransferError):  # no new servers mend this rank's own fault
            raise RuntimeError(f"trainer rank 0 failed: {failed}. {_causes(receiving)}".rstrip()) from failed
        repeats = causes and all(isinstance(cause, ServerFault) and move.NOT_AS_SENT not in str(cause) for cause in causes)
        kind = ServerFault if repeats else RuntimeError
        raise self._failure(_causes(receiving) or str(failed or ""), receiving, kind) from failed

    def _failure(self, message: str, requests: Sequence[Future[None]], kind: type[RuntimeError] = RuntimeError) -> RuntimeError:
        silent = [client.url for client, request in zip(self._clients, requests, strict=True) if not request.done()]
        if silent:
            message = f"{' and '.join(silent)} gave no answer, also when the others had left. {message}".rstrip()
        hangs = silent or any(isinstance(request.exception(), ServerSilent) for request in requests)
        return ServerSilent(message) if hangs else kind(message)

    def _finish_update(self, version: WeightsVersion) -> None:
        self._everywhere(lambda client: client.finish_weight_update(version))
        if not self.keep_cache:  # vLLM forgets nothing while a response holds a part of it
            self._everywhere(Client.reset_prefix_cache)
        if not self._asleep:
            self._everywhere(Client.resume)

    def _everywhere(self, ask: Callable[[Client], None]) -> None:
        requests = [self._pool.submit(ask, client) for client in self._clients]
        while waiting := wait(requests, LOOK_S).not_done:
            for client, request in zip(self._clients, requests, strict=True):
                if request in waiting:
                    _end_if_gone(client)
        causes = [request.exception() for request in requests if _failed(request)]
        faults = [cause for cause in causes if isinstance(cause, ServerFault)]
        if causes and len(faults) == len(causes):  # no weights travel here, so only the server can be at fault
            raise type(faults[0])(_causes(requests))
        if causes:
            raise self._failure(_causes(requests), requests)


def _end_if_gone(client: Client) -> None:
    """A dead engine never answers; a silent server may be slow."""
    with suppress(ServerSilent):
        try:
            client.progress()
        except ServerGone:
            client.close()
            raise


def _failed(request: Future[Any]) -> bool:
    return request.done() and request.exception() is not None


def _causes(requests: Sequence[Future[Any]]) -> str:
    return "; ".join(str(request.exception()) for request in requests if _failed(request))
