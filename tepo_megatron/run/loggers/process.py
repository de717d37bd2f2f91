"""The logger's process: ``python -m tepo_megatron.run.loggers.process``.

It reads JSON lines: the settings, ``{"row": {…}}`` per step, and ``{"finish": "finished"}``, unless rank 0 died. It reports
messages (``note``) and failures (``failed``).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, BinaryIO, cast

from tepo_megatron.run.loggers.clients import Client, MlflowClient, RunSettings, WandbClient
from tepo_megatron.run.loggers.loggers import Ending, without_secrets
from tepo_megatron.runtime.files import write_atomically
from tepo_megatron.runtime.preemption import STOP_SIGNALS
from tepo_megatron.runtime.workers.child import redirect_standard_streams, reply

_RETRY_S = (30.0, 3600.0)
"""Seconds in which rows are dropped after a failure: doubled up to the second value."""

_MAX_WAITING_ROWS = 10_000

_QUIET = {
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_SILENT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
}
"""Defaults of the environment: no telemetry, and requests time out."""


class Session:
    """One logger of one run. A row that fails is reported and lost; ``state`` keeps the run's id for a resumed run."""

    def __init__(
        self,
        make_client: Callable[[], Client],
        state: Path,
        report: Callable[[Mapping[str, Any]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make_client, self._state, self._report, self._clock = make_client, state, report, clock
        self._client: Client | None = None
        self._is_open = self._has_noted_address = False
        self._retry_at, self._retry_s = clock(), _RETRY_S[0]
        self._run_id: str | None = None
        self._rows = 0
        with suppress(OSError, ValueError, KeyError, TypeError):
            content = json.loads(state.read_text())
            self._run_id, self._rows = str(content["id"]), int(content["rows"])

    def open(self) -> None:
        self._attempt(self._open)

    def log(self, row: Mapping[str, Any]) -> None:
        values = {key: value for key, value in row.items() if key != "step"}
        if self._clock() >= self._retry_at:
            self._attempt(lambda: self._log(row["step"], values))

    def finish(self, ending: Ending) -> None:
        if self._has_noted_address:  # a server that never answered is not asked once more
            self._attempt(lambda: self._open().finish(ending))

    def _log(self, step: int, row: Mapping[str, float]) -> None:
        self._open().log(self._rows, step, row)
        self._rows += 1
        self._save()

    def _open(self) -> Client:
        if self._client is None:
            self._client = self._make_client()
        if not self._is_open:
            self._run_id = self._client.open(self._run_id)
            self._is_open = True
            self._save()
        if not self._has_noted_address:
            self._has_noted_address = True
            self._report({"note": without_secrets(self._client.address())})
        return self._client

    def _save(self) -> None:
        write_atomically(self._state, json.dumps({"id": self._run_id, "rows": self._rows}))

    def _attempt(self, work: Callable[[], Any]) -> None:
        """An open client that fails is opened again once: W&B's service process may have ended."""
        for is_last in (False, True) if self._is_open else (True,):
            try:
                work()
            except Exception as error:  # clients raise whatever they like, and none of it may end the process
                traceback.print_exc()
                if self._client is not None:
                    self._client.forget()
                self._is_open = False
                if is_last or isinstance(error, TimeoutError):
                    self._retry_at = self._clock() + self._retry_s
                    self._retry_s = min(2 * self._retry_s, _RETRY_S[1])
                    self._report({"failed": without_secrets(_first_line(error))})
                    return
            else:
                self._retry_s = _RETRY_S[0]
                return


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:250] or type(error).__name__


def _read(requests: BinaryIO, inbox: SimpleQueue[dict[str, Any]]) -> None:
    """Runs in a thread, so that rank 0 can always write."""
    for line in requests:
        if inbox.qsize() < _MAX_WAITING_ROWS or b'"finish"' in line[:12]:
            inbox.put(json.loads(line))
    inbox.put({"finish": "failed"})


def main() -> None:
    for number in (*STOP_SIGNALS, signal.SIGHUP):  # they ask the run to stop; rank 0 sends "finish" afterwards
        signal.signal(number, signal.SIG_IGN)
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    requests, replies = redirect_standard_streams()

    def report(message: Mapping[str, Any]) -> None:
        try:
            reply(replies, message)
        except BrokenPipeError:
            print(f"rank 0 is gone; not reported: {message}", file=sys.stderr)  # noqa: T201

    inbox: SimpleQueue[dict[str, Any]] = SimpleQueue()
    Thread(target=_read, args=(requests, inbox), daemon=True).start()
    first = inbox.get()
    if "kind" not in first:
        return
    kind = first.pop("kind")
    run = RunSettings(**{**first, "folder": Path(first["folder"])})
    session = Session(
        lambda: WandbClient(run) if kind == "wandb" else MlflowClient(run), run.folder / kind / "run.json", report
    )
    session.open()
    while "row" in (message := inbox.get()):
        session.log(message["row"])
    # Rank 0 ends this process if it needs longer; if rank 0 is gone, the clock does.
    signal.setitimer(signal.ITIMER_REAL, run.finish_timeout_s + 5)
    session.finish(cast(Ending, message["finish"]))


if __name__ == "__main__":
    main()
