"""What ``tepo serve`` does on a node for rollouts: starts the node's servers, registers them, and replaces those that fail."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

from tepo_megatron.config import RunConfig
from tepo_megatron.config.rollout_server import ServerConfig
from tepo_megatron.sampler.fleet.server_registry import Registration, is_retired, register, shared_key, with_own_address
from tepo_megatron.sampler.vllm.server.limits import check_machine, raise_open_files, weights_bytes
from tepo_megatron.sampler.vllm.server.resources import server_seed, worker_cores
from tepo_megatron.sampler.vllm.server.server import Server, has_gpu

POLL_S = 1.0


class Node:
    """The servers of node ``node`` of ``nodes``: an equal share of ``rollout.server.count``.

    A context manager: entering starts the servers and registers each when it answers, leaving ends them. The trainer sends the
    weights; until then a server has none, or those of the model's folder (``rollout.server.load_format``).
    """

    def __init__(self, config: RunConfig, *, model_dir: Path, node: int, nodes: int) -> None:
        """Raises ValueError where servers cannot be spread over the nodes, or this node has no address on their network."""
        server = config.rollout.server
        share = _share(server, node, nodes)
        assert server.registry is not None
        raise_open_files()
        check_machine(server, len(share), weights_bytes=weights_bytes(model_dir), on_gpu=has_gpu())
        self._folder, self._first = server.registry, share.start
        own = with_own_address(server)
        cores = worker_cores(own, len(share))
        key = shared_key(server.registry)
        self._servers = [
            Server(
                own,
                model_dir=model_dir,
                dtype=own.served_dtype(config.model.dtype),
                cores=cores[slot],
                key=key,
                log=config.output / "logs" / f"server-{index}.log",
                seed=server_seed(config.seed, index),
                gpus=range(slot * own.tp, (slot + 1) * own.tp),
                dummy=config.adapter_rank is None and own.starts_with_dummies(trained=True),
                adapter_rank=config.adapter_rank,
                tokenizer=config.servers_need_tokenizer,
            )
            for slot, index in enumerate(share)
        ]
        self._lives = [""] * len(self._servers)
        self._restarts = 0
        self._max_restarts = server.max_restarts * len(self._servers)

    def __enter__(self) -> Node:
        try:
            self._start(list(range(len(self._servers))))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_exception: object) -> None:
        for server in self._servers:
            server.stop()

    def watch(self) -> None:
        """Replace servers that died and those that the trainer retired, until interrupted.

        Raises RuntimeError with the end of a log when that is needed more often than ``rollout.server.max_restarts`` times the
        servers of this node, or a server does not come up.
        """
        while True:
            gone = [slot for slot in range(len(self._servers)) if self._is_gone(slot)]
            if gone:
                self._restarts += len(gone)
                if self._restarts > self._max_restarts:
                    logs = "\n".join(self._servers[slot].log_end() for slot in gone)
                    raise RuntimeError(f"the servers of this node died {self._restarts} times; none is started again.\n{logs}")
                self._start(gone)
            time.sleep(POLL_S)

    def _is_gone(self, slot: int) -> bool:
        return not self._servers[slot].alive or is_retired(self._folder, self._first + slot, self._lives[slot])

    def _start(self, slots: list[int]) -> None:
        for slot in slots:
            self._servers[slot].stop()
        taken = {server.port for server in self._servers if server.alive}
        for slot in slots:
            self._servers[slot].start(taken)
            taken.add(self._servers[slot].port)
        for slot in slots:
            server, self._lives[slot] = self._servers[slot], secrets.token_hex(8)
            server.wait_ready()
            register(self._folder, self._first + slot, Registration(server.url, self._lives[slot]))


def _share(config: ServerConfig, node: int, nodes: int) -> range:
    """The numbers of the servers of this node."""
    if config.placement != "external":
        raise ValueError(
            "tepo serve needs rollout.server.placement = external and rollout.server.registry, a folder that it shares with "
            "the trainer; with placement = local, 'tepo train' starts the servers itself"
        )
    if not 0 <= node < nodes:
        raise ValueError(f"node {node} is not one of {nodes} nodes; number them from 0")
    if config.count % nodes:
        raise ValueError(f"rollout.server.count = {config.count} servers cannot be spread over {nodes} nodes; give a multiple")
    size = config.count // nodes
    return range(node * size, (node + 1) * size)
