"""Servers beside ranks that may be restarted: a process of the launcher's holds them (docs/decisions/043-restarts.md)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tepo_megatron.config import RunConfig
from tepo_megatron.config.load import dump_resolved
from tepo_megatron.runtime.files import write_atomically
from tepo_megatron.runtime.supervise import folder_name

_REGISTRY = "TEPO_SERVERS"
_COMMAND = (sys.executable, "-m", "tepo_megatron", "serve")
_STOP_TIMEOUT_S = 60.0


def registry_for_ranks() -> Path | None:
    """None if rank 0 starts its servers itself."""
    folder = os.environ.get(_REGISTRY)
    return Path(folder) if folder else None


@contextmanager
def servers_for_ranks(config: RunConfig) -> Iterator[None]:
    """The servers outlive ranks, but not this process. Ranks that start in the context use them."""
    with tempfile.TemporaryDirectory(prefix=f"{folder_name()}-") as folder:
        registry = Path(folder) / "servers"
        registry.mkdir(mode=0o700)
        run = Path(folder) / "run.yaml"
        run.write_text(dump_resolved(config), encoding="utf-8")
        holder = _Holder(run, registry, config.rollout.server.max_restarts, config.engine.parallel.world_size)
        os.environ[_REGISTRY] = str(registry)
        try:
            yield
        finally:
            del os.environ[_REGISTRY]
            holder.stop()


class _Holder:
    """Runs ``tepo serve``, and starts it again if it was killed."""

    def __init__(self, run: Path, registry: Path, max_restarts: int, local_ranks: int) -> None:
        self._command = [*_COMMAND, str(run), "--for-ranks", str(registry)]
        self._registry, self._max_restarts = registry, max_restarts
        self._environment = {**os.environ, "LOCAL_WORLD_SIZE": str(local_ranks)}
        self._lock, self._is_stopped = threading.Lock(), False
        self._process = self._start()
        self._thread = threading.Thread(target=self._watch, name="servers", daemon=True)
        self._thread.start()

    def _start(self) -> subprocess.Popen[bytes]:
        # Its standard input is the pipe that ends it with this process; a Ctrl-C at the terminal is the ranks'.
        return subprocess.Popen(self._command, stdin=subprocess.PIPE, env=self._environment, start_new_session=True)

    def _watch(self) -> None:
        for _ in range(self._max_restarts):
            self._process.wait()
            with self._lock:
                if self._is_stopped or any(self._registry.glob("failed-*")):
                    return
                self._process = self._start()
        code = self._process.wait()
        if not self._is_stopped:
            sentence = f"the process that holds the rollout servers ended with exit code {code}, too often to start it again"
            write_atomically(self._registry / "failed-holder", sentence)

    def stop(self) -> None:
        with self._lock:
            self._is_stopped = True
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)  # the servers' supervisors end them
        self._thread.join()


def end_with_starter() -> None:
    """Sends this process SIGTERM when standard input closes."""

    def wait() -> None:
        while os.read(0, 1):
            continue
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="starter", daemon=True).start()
