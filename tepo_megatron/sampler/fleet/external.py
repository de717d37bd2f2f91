"""The trainer's side of a server that ``tepo serve`` runs on another node: found in the registry, never started from here."""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path
from urllib.parse import urlsplit

from tepo_megatron.config.rollout_server import ServerConfig
from tepo_megatron.sampler.fleet.server_registry import Registration, claim, registered, retire, shared_key, with_own_address
from tepo_megatron.sampler.vllm.server.server import is_healthy

POLL_S = 0.5


class ExternalServer:
    """Stands in for a ``Server``, with the same methods: ``start`` and ``stop`` only decide what is waited for.

    A server that failed is retired when it is started again; its node ends it, starts another and registers that.
    ``log`` is the file that the node writes, on the shared disk.
    """

    def __init__(self, config: ServerConfig, *, folder: Path, index: int, log: Path) -> None:
        self.config, self.log, self.port = config, log, 0
        self._folder, self._index = folder, index
        self._current: Registration | None = None
        self._retired = ""
        self._wanted = False

    @property
    def url(self) -> str:
        """The address of the server that is in use; empty before there is one."""
        return self._current.url if self._current else ""

    @property
    def alive(self) -> bool:
        """Whether a server is in use; it may not answer."""
        return self._current is not None

    def start(self, taken: Collection[int] = ()) -> None:
        """Want a server, and another one than before; ``taken`` is for servers of this machine."""
        if self._current is not None:
            self._retired, self._current = self._current.life, None
        if self._retired:
            retire(self._folder, self._index, self._retired)
        self._wanted = True

    def wait_ready(self, timeout_s: float | None = None) -> None:
        """Return when the node has registered a server that answers; RuntimeError if that takes too long, or after stop()."""
        timeout_s = self.config.start_timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        while self._wanted:
            found = registered(self._folder, self._index)
            if found is not None and found.life != self._retired and _is_healthy(found):
                if claim(self._folder, self._index, found.life):
                    self._current = found
                    return
                self._retired = found.life  # another trainer has put its weights there
                retire(self._folder, self._index, found.life)
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"external rollout server {self._index} was not there within {timeout_s:g} s "
                    "(rollout.server.start_timeout_s); does 'tepo serve' run on its node, and is its registry "
                    f"{self._folder}? {self.log_end()}"
                )
            time.sleep(POLL_S)
        raise RuntimeError(f"waiting for external rollout server {self._index} was ended")

    def healthy(self) -> bool:
        """Whether the server in use answers and says that its engine works."""
        return self._current is not None and _is_healthy(self._current)

    def stop(self) -> None:
        """Want no server. It goes on running: it is its node's."""
        self._wanted = False
        if self._current is not None:
            self._retired, self._current = self._current.life, None

    def log_end(self, lines: int = 0) -> str:
        """For messages: where the server's log lies."""
        return f"Its log is {self.log}"


def external_servers(config: ServerConfig, log_dir: Path) -> tuple[ServerConfig, str, list[ExternalServer]]:
    """The config with this machine's address as ``host``, the key of the registry, and a stand-in for each server."""
    config = with_own_address(config)
    folder = config.registry
    assert folder is not None
    servers = [
        ExternalServer(config, folder=folder, index=index, log=log_dir / f"server-{index}.log") for index in range(config.count)
    ]
    return config, shared_key(folder), servers


def _is_healthy(registration: Registration) -> bool:
    parts = urlsplit(registration.url)
    return is_healthy(parts.hostname or "", parts.port or 0)
