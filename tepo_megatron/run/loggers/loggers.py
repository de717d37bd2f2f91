"""Rank 0's side of W&B and MLflow: each has a child process, and only the run's end waits for it."""

from __future__ import annotations

import json
import math
import os
import re
import select
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, Literal

from tepo_megatron.config import LogConfig, RunConfig
from tepo_megatron.runtime.text import valid_text
from tepo_megatron.runtime.worker_process import WorkerProcess

Ending = Literal["finished", "stopped", "failed"]

TITLES = {"wandb": "W&B", "mlflow": "MLflow"}
HIDDEN = "***"

_PROCESS = "tepo_megatron.run.loggers.process"
_POLL_INTERVAL_S = 0.05
_MAX_UNSENT_BYTES = 2**20

_SECRET_NAME = re.compile(r"(^|[_-])(api[_-]?key|key|token|secret|password|passwd|credentials?|authorization)$", re.IGNORECASE)
_USER_AND_PASSWORD = re.compile(r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)")
_MIN_SECRET_LENGTH = 8  # a shorter value of the environment may occur anywhere


def _sections(config: LogConfig) -> dict[str, Any]:
    all_sections = {"wandb": config.wandb, "mlflow": config.mlflow}
    return {kind: section.model_dump(mode="json") for kind, section in all_sections.items() if section is not None}


def check_installed(config: LogConfig) -> None:
    """Imports no package. Raises ValueError."""
    for kind in _sections(config):
        packages: tuple[str, ...] = (kind,)
        if config.mlflow is not None and kind == "mlflow" and (config.mlflow.tracking_uri or "sqlite").startswith("sqlite"):
            packages = ("mlflow", "sqlalchemy")
        missing = [name for name in packages if not _is_installed(name)]
        if missing:
            raise ValueError(
                f"log.{kind} is given, but the package {' and '.join(missing)} is not installed here: "
                f"pip install 'tepo-megatron[{kind}]', or leave log.{kind} out"
            )


def without_secrets(value: Any) -> Any:
    """Hides fields named …key, …token, …secret or …password, a URL's user and password, and values of such environment
    variables.
    """
    values = {value for name, value in os.environ.items() if _SECRET_NAME.search(name) and len(value) >= _MIN_SECRET_LENGTH}
    return _hide(value, sorted(values, key=len, reverse=True))


class Loggers:
    """Rank 0 only. No method raises for a logger's failure."""

    def __init__(self, config: RunConfig, notify: Callable[[str], None], count_failures: Callable[[int], None]) -> None:
        self._notify, self._count_failures = notify, count_failures
        self._timeout_s = config.log.finish_timeout_s
        resolved = without_secrets(config.model_dump(mode="json"))
        self._processes = [_LoggerProcess(kind, section, config, resolved) for kind, section in _sections(config.log).items()]
        self._reported: set[str] = set()

    def write_row(self, row: Mapping[str, float]) -> None:
        for process in self._processes:
            process.post({"row": {valid_text(key): value for key, value in row.items() if math.isfinite(value)}})

    def take_reports(self) -> None:
        for process in list(self._processes):
            self._take_reports(process)
            if process.has_ended:
                self._processes.remove(process)
                process.close()

    def close(self, ending: Ending, timeout_s: float) -> None:
        """Waits at most ``timeout_s`` and ``log.finish_timeout_s``, and ends the processes."""
        processes, self._processes = self._processes, []
        deadline = time.monotonic() + min(self._timeout_s, timeout_s)
        for process in processes:
            process.post({"finish": ending})
        for process in processes:
            while not process.has_ended and time.monotonic() < deadline:
                process.flush()
                self._take_reports(process, timeout_s=_POLL_INTERVAL_S)
            if not process.has_ended:
                self._notify(
                    f"{process.title} has not taken everything by the end of the run (log.finish_timeout_s = "
                    f"{self._timeout_s:g}); {process.metrics} has every row, and {process.log} what it said"
                )
                process.kill()
            else:
                process.close()

    def _take_reports(self, process: _LoggerProcess, timeout_s: float = 0.0) -> None:
        for report in process.take_reports(timeout_s):
            if "note" in report:
                self._notify(f"{process.title}: {report['note']}")
                continue
            self._count_failures(1)
            if process.kind not in self._reported:
                self._reported.add(process.kind)
                self._notify(
                    f"{process.title} cannot be logged to: {report['failed']} ({process.log}). The run continues; "
                    "metrics.jsonl has every row (log/failed counts the attempts)"
                )


class _LoggerProcess(WorkerProcess):
    """Rows beyond a waiting megabyte are dropped: no step waits for a logger."""

    def __init__(self, kind: str, section: Mapping[str, Any], config: RunConfig, resolved: Any) -> None:
        self.kind, self.title = kind, TITLES[kind]
        self.metrics = config.output / "metrics.jsonl"
        self.log = config.output / "logs" / f"{kind}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            super().__init__(_PROCESS, stderr=log)
        self.has_ended = False
        self._unsent = bytearray()
        self.post(
            {
                "kind": kind,
                "folder": str(config.output.absolute()),
                "name": config.name,
                "settings": section,
                "config": resolved,
                "finish_timeout_s": config.log.finish_timeout_s,
            }
        )

    def post(self, message: Mapping[str, Any]) -> None:
        if len(self._unsent) < _MAX_UNSENT_BYTES or "row" not in message:
            self._unsent += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        with suppress(BrokenPipeError):
            while self._unsent and (written := self._stdin.write(self._unsent)):
                del self._unsent[:written]

    def take_reports(self, timeout_s: float = 0.0) -> list[dict[str, Any]]:
        reports: list[dict[str, Any]] = []
        while not self.has_ended and select.select([self], [], [], timeout_s)[0]:
            try:
                reports += self.receive()
            except EOFError:
                self.has_ended = True
                if (status := self.exit_status()) != "exit status 0":
                    reports.append({"failed": f"the process that logs has ended ({status})"})
            timeout_s = 0.0
        return reports


def _is_installed(name: str) -> bool:
    """A folder of that name, such as the ``wandb`` that W&B creates, is no package."""
    spec = find_spec(name)
    return spec is not None and spec.origin is not None


def _hide(value: Any, secrets: list[str]) -> Any:
    if isinstance(value, Mapping):
        return {
            valid_text(str(key)): HIDDEN if isinstance(item, str) and _SECRET_NAME.search(str(key)) else _hide(item, secrets)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_hide(item, secrets) for item in value]
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, HIDDEN)
        return valid_text(_USER_AND_PASSWORD.sub(HIDDEN, value))
    return value
