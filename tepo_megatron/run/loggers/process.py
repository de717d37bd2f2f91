"""The process that passes ``metrics.jsonl`` on to W&B or MLflow: ``python -m tepo_megatron.run.loggers.process``.

Rank 0 writes JSON lines to its input: first what to log and how, then ``{"row": true}`` whenever the file has grown, at last
``{"finish": "finished"}``. An input that ends without that means that rank 0 died. To its output it writes what rank 0 should
say (``note``) or count (``failed``). What the packages print goes to its error output, a file in ``OUT/logs``.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from tepo_megatron.run.loggers.client import Client, Ending, RunSettings
from tepo_megatron.run.loggers.follow import Follower, SentRows
from tepo_megatron.run.loggers.redact import without_secrets
from tepo_megatron.runtime.preemption import STOP_SIGNALS

_RETRY_S = (30.0, 3600.0)
"""After a failure rows wait so long, and twice as long after each further one, up to the second: W&B leaves a folder
each time."""

_QUIET = {
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_SILENT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
}
"""Environment of the packages where the user has set nothing: they report nothing to their makers, and give up in time."""


class Session:
    """One logger of one run. What fails is told to rank 0, and tried again with a later row."""

    def __init__(
        self,
        run: RunSettings,
        kind: str,
        client: Callable[[], Client],
        tell: Callable[[Mapping[str, Any]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ValueError where the file of what was sent is damaged."""
        self._make, self._tell, self._clock = client, tell, clock
        self._sent = SentRows(run.folder / kind / "sent.jsonl")
        self._follower = Follower(run.folder / "metrics.jsonl", self._sent)
        self._client: Client | None = None
        self._is_open = self._has_said_where = False
        self._not_before = -math.inf
        self._wait = _RETRY_S[0]

    def open(self) -> None:
        """Begins the run over there, or goes on with it, before there is a row."""
        self._attempt(self._open)

    def pass_on(self, *, at_once: bool = False) -> bool:
        """Logs the rows that are new. Returns whether nothing failed; false, too, while a failure is not long enough ago."""
        return self._attempt(self._pass_on, at_once=at_once)

    def finish(self, ending: Ending) -> None:
        """Logs what is left. Where W&B is not reached, it writes that to the disk instead."""
        has_failed = self._not_before > -math.inf
        if has_failed and not self._has_said_where and self._client is not None:
            self._client.go_offline()
        was_open = self._is_open
        done = self.pass_on(at_once=True) or (was_open and self.pass_on(at_once=True))
        if not done and self._client is not None and self._client.go_offline():
            self._has_said_where = False
            self.pass_on(at_once=True)
        self._follower.close()
        if self._is_open and self._client is not None:
            try:
                self._end(self._client, ending)
            except Exception as error:
                traceback.print_exc()
                self._tell({"note": f"the end of the run was not taken: {without_secrets(_sentence(error))}"})

    def _end(self, client: Client, ending: Ending) -> None:
        try:
            client.finish(ending)
        except TimeoutError:
            raise
        except Exception:  # W&B's own process may be gone; another start replaces it
            traceback.print_exc()
            client.forget()
            client.open(self._sent.run_id)
            client.finish(ending)

    def _attempt(self, work: Callable[[], None], *, at_once: bool = False) -> bool:
        if not at_once and self._clock() < self._not_before:
            return False
        try:
            work()
        except Exception as error:  # clients raise whatever they like, and none of it may end a run
            traceback.print_exc()
            self._not_before = self._clock() + self._wait
            self._wait = min(2 * self._wait, _RETRY_S[1])
            self._tell({"failed": without_secrets(_sentence(error))})
            if self._client is not None:
                self._client.forget()
            self._is_open = False
            return False
        self._wait = _RETRY_S[0]
        return True

    def _open(self) -> None:
        if self._is_open:
            return
        if self._client is None:
            self._client = self._make()
        run_id = self._client.open(self._sent.run_id)
        if self._sent.run_id is None:
            self._sent.begin(run_id)
        self._is_open = True
        if not self._has_said_where:
            self._has_said_where = True
            self._tell({"note": without_secrets(self._client.where())})

    def _pass_on(self) -> None:
        self._open()
        client = self._client
        assert client is not None
        self._follower.pass_on(lambda position, step, row: client.log(position, step, _numbers(row)))


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Without what was not finite, ``null`` in the file."""
    return {key: value for key, value in row.items() if key != "step" and value is not None}


def _sentence(error: Exception) -> str:
    """The first line of what went wrong, with the kind of error where that says more."""
    text = str(error).strip().partition("\n")[0]
    return text[:250] or type(error).__name__


def serve(session: Session, requests: Iterable[bytes]) -> Ending:
    """Until rank 0 says how the run ended, or is gone."""
    session.open()
    for line in requests:
        if not line.strip():
            continue
        ending: Ending | None = json.loads(line).get("finish")
        if ending is not None:
            return ending
        session.pass_on()
    return "failed"


def _make_client(kind: str, run: RunSettings) -> Client:
    if kind == "wandb":
        from tepo_megatron.run.loggers.wandb_client import WandbClient

        return WandbClient(run)
    from tepo_megatron.run.loggers.mlflow_client import MlflowClient

    return MlflowClient(run)


def _own_streams() -> tuple[BinaryIO, BinaryIO]:
    """The pipes to rank 0, which the packages do not get: they read nothing, and print to the error output."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, replies


def main() -> None:
    for number in (*STOP_SIGNALS, signal.SIGHUP):  # they ask the run to stop, and rank 0 says when it has
        signal.signal(number, signal.SIG_IGN)
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    requests, replies = _own_streams()

    def tell(report: Mapping[str, Any]) -> None:
        try:
            replies.write(json.dumps(report).encode() + b"\n")
        except BrokenPipeError:
            print(f"rank 0 is gone, and is not told: {report}", file=sys.stderr)  # noqa: T201

    first = json.loads(requests.readline())
    kind = first["kind"]
    run = RunSettings(
        Path(first["folder"]), first["name"], first["settings"], first["config"], float(first["finish_timeout_s"])
    )
    try:
        session = Session(run, kind, lambda: _make_client(kind, run), tell)
    except (OSError, ValueError) as error:
        tell({"failed": without_secrets(_sentence(error))})
        sys.exit(1)
    ending = serve(session, requests)
    # Rank 0 ends this process if it takes longer; where rank 0 is gone, the clock does.
    signal.setitimer(signal.ITIMER_REAL, run.finish_timeout_s + 5)
    session.finish(ending)


if __name__ == "__main__":
    main()
