"""Rank 0's side of W&B and MLflow, each a child process for which only the run's end waits."""

import json
import math
import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from tepo_megatron.config import LogConfig, RunConfig
from tepo_megatron.runtime.text import valid_text
from tepo_megatron.runtime.worker_process import WorkerProcess

Ending = Literal["finished", "stopped", "failed"]

HIDDEN = "***"

_POLL_INTERVAL_S = 0.05
_EXIT_TIMEOUT_S = 60.0  # of an interpreter, after its output was closed, on a busy machine
_MAX_UNSENT_BYTES = 2**20

_SECRET_NAME = re.compile(
    r"(?i:(^|[_-])(api[_-]?key|key|token|secret|password|passwd|credentials?|authorization))$"
    r"|[^\W_](Key|Token|Secret|Password|Passwd|Credentials?|Authorization)$"
)
_USER_AND_PASSWORD = re.compile(r"(?<=://)[^/\s]+(?=@)")
_MIN_SECRET_LENGTH = 8  # a shorter value of the environment may occur anywhere


def _sections(config: LogConfig) -> dict[str, Any]:
    sections = config.model_dump(mode="json", include={"wandb", "mlflow"})
    return {kind: section for kind, section in sections.items() if section is not None}


def without_secrets(value: Any) -> Any:
    """Hides what fields …key, …token, …secret, …password hold, a URL's user and password, and such environment variables."""
    values = {value for name, value in os.environ.items() if _SECRET_NAME.search(name) and len(value) >= _MIN_SECRET_LENGTH}
    return _hide(value, sorted(values, key=len, reverse=True))


class Loggers:
    """Rank 0 only. No method raises for a logger's failure."""

    def __init__(self, config: RunConfig, notify: Callable[[str], None], count_failure: Callable[[], None]) -> None:
        self._timeout_s = config.log.finish_timeout_s
        shown = without_secrets(config.model_dump(mode="json"))
        folder = str(config.output.absolute())
        setup = {"folder": folder, "name": config.name, "config": shown, "finish_timeout_s": self._timeout_s}
        self._processes = [
            _LoggerProcess(config.output, {"kind": kind, "settings": section, **setup}, notify, count_failure)
            for kind, section in _sections(config.log).items()
        ]

    @staticmethod
    def check_installed(config: LogConfig) -> None:
        """Imports no package. Raises ValueError."""
        for kind, section in _sections(config).items():
            uri = section.get("tracking_uri") or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite"
            needs_database = kind == "mlflow" and uri.startswith(("sqlite", "postgresql", "mysql", "mssql"))
            packages = (kind, "sqlalchemy") if needs_database else (kind,)
            # A folder of that name, such as the wandb that W&B creates, is no package.
            missing = [name for name in packages if (spec := find_spec(name)) is None or spec.origin is None]
            if missing:
                raise ValueError(
                    f"log.{kind} is given, but the package {' and '.join(missing)} is not installed here: "
                    f"pip install 'tepo-megatron[{kind}]', or leave log.{kind} out"
                )

    def write_row(self, row: Mapping[str, float]) -> None:
        for process in self._processes:
            process.post({"row": {valid_text(key): value for key, value in row.items() if math.isfinite(value)}})

    def take_reports(self) -> None:
        for process in self._processes:
            process.take_reports()

    def close(self, ending: Ending, timeout_s: float) -> None:
        """Waits at most ``timeout_s`` and ``log.finish_timeout_s``, then ends the processes."""
        deadline = time.monotonic() + min(self._timeout_s, timeout_s)
        for process in self._processes:
            process.post({"finish": ending})
        while self._processes:
            self._processes.pop(0).finish(deadline)


class _LoggerProcess(WorkerProcess):
    """Drops rows beyond a waiting megabyte: no step waits for a logger."""

    def __init__(
        self, output: Path, setup: Mapping[str, Any], notify: Callable[[str], None], count_failure: Callable[[], None]
    ) -> None:
        self._title = {"wandb": "W&B", "mlflow": "MLflow"}[setup["kind"]]
        self._metrics, self._log = output / "metrics.jsonl", output / "logs" / f"{setup['kind']}.log"
        self._timeout_s, self._notify, self._count_failure = setup["finish_timeout_s"], notify, count_failure
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            super().__init__("tepo_megatron.run.loggers.process", stderr=log)
        self._has_ended = self._has_reported = False
        self._unsent = bytearray()
        self.post(setup)

    def post(self, message: Mapping[str, Any]) -> None:
        if len(self._unsent) < _MAX_UNSENT_BYTES or "row" not in message:
            self._unsent += json.dumps(message).encode() + b"\n"
        self._flush()

    def take_reports(self, timeout_s: float = 0.0) -> None:
        while not self._has_ended and self._has_data(timeout_s):
            timeout_s = 0.0
            try:
                reports = self.receive()
            except EOFError:
                self._has_ended = True
                status = self.exit_status(_EXIT_TIMEOUT_S)
                reports = [] if status == "exit status 0" else [{"failed": f"the process that logs has ended ({status})"}]
            for report in reports:
                self._report(report)

    def finish(self, deadline: float) -> None:
        self.take_reports()  # it may have ended while the deadline passed with another one
        while not self._has_ended and time.monotonic() < deadline:
            self._flush()
            self.take_reports(_POLL_INTERVAL_S)
        if self._has_ended:
            self.close()
            return
        self._notify(
            f"{self._title} has not taken everything by the end of the run (log.finish_timeout_s = {self._timeout_s:g}); "
            f"{self._metrics} has every row, and {self._log} what it said"
        )
        self.kill()

    def _flush(self) -> None:
        with suppress(BrokenPipeError):
            while self._unsent and (written := self._stdin.write(self._unsent)):
                del self._unsent[:written]

    def _report(self, report: Mapping[str, str]) -> None:
        if "note" in report:
            self._notify(f"{self._title}: {report['note']}")
            return
        self._count_failure()
        if not self._has_reported:
            self._has_reported = True
            self._notify(
                f"{self._title} cannot be logged to: {report['failed']} ({self._log}). The run continues; metrics.jsonl has "
                "every row (log/failed counts the attempts)"
            )


def _is_secret(name: str, value: Any) -> bool:
    return value is not None and not isinstance(value, bool) and _SECRET_NAME.search(name) is not None


def _hide(value: Any, secrets: list[str]) -> Any:
    if isinstance(value, Mapping):
        return {
            valid_text(str(key)): HIDDEN if _is_secret(str(key), item) else _hide(item, secrets) for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_hide(item, secrets) for item in value]
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, HIDDEN)
        return valid_text(_USER_AND_PASSWORD.sub(HIDDEN, value))
    return value
