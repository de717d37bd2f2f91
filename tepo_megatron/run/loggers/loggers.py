"""Rank 0's side of the loggers: it starts their processes, says when there is a row, and waits for them at the end alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from tepo_megatron.config import RunConfig
from tepo_megatron.run.loggers.client import Ending
from tepo_megatron.run.loggers.installed import TITLES, sections
from tepo_megatron.run.loggers.redact import without_secrets

_LOOK_S = 0.05


class Loggers:
    """All loggers that a run switches on; none, and nothing happens. Rank 0 only.

    No method raises for what happens over there. ``say`` tells the user a sentence, ``count`` adds to ``log/failed``.
    """

    def __init__(self, config: RunConfig, say: Callable[[str], None], count: Callable[[int], None]) -> None:
        """Starts the processes; the packages are there (:func:`installed.check_installed`)."""
        self._say, self._count = say, count
        self._timeout_s = config.log.finish_timeout_s
        resolved = without_secrets(config.model_dump(mode="json"))
        self._processes = [_LoggerProcess(kind, settings, config, resolved) for kind, settings in sections(config.log).items()]
        self._said: set[str] = set()

    def row_written(self) -> None:
        """After each row of ``metrics.jsonl``."""
        for process in self._processes:
            process.send({"row": True})

    def take_reports(self) -> None:
        """Says and counts what the processes have told since the last call."""
        for process in self._processes:
            self._take(process)
            if not process.lives():
                self._failed(process, "the process that logs has ended")

    def close(self, ending: Ending, at_most_s: float) -> None:
        """Gives the processes at most so many seconds, and ``log.finish_timeout_s``, to pass on the rest; then ends them."""
        processes, self._processes = self._processes, []
        for process in processes:
            process.send({"finish": ending})
            process.close_input()
        deadline = time.monotonic() + min(self._timeout_s, at_most_s)
        for process in processes:
            in_time = process.wait_until(deadline)
            self._take(process)
            if in_time and process.failed():
                self._failed(process, "the process that logs has ended")
            if not in_time:
                process.kill()
                self._say(
                    f"{process.title} has not taken everything by the end of the run (log.finish_timeout_s = "
                    f"{self._timeout_s:g}); {process.folder / 'metrics.jsonl'} has every row, and {process.log} what it said"
                )

    def _take(self, process: _LoggerProcess) -> None:
        for report in process.reports():
            if "failed" in report:
                self._failed(process, report["failed"])
            else:
                self._say(f"{process.title}: {report['note']}")

    def _failed(self, process: _LoggerProcess, why: str) -> None:
        self._count(1)
        if process.kind not in self._said:
            self._said.add(process.kind)
            self._say(
                f"{process.title} cannot be logged to: {why} ({process.log}). The run goes on; metrics.jsonl has every row, "
                "and what is missing is sent as soon as it can be (log/failed counts the attempts)"
            )


class _LoggerProcess:
    """The process of one logger, and the pipes to it. Neither blocks: a process that stands still holds up no step."""

    def __init__(self, kind: str, settings: Mapping[str, Any], config: RunConfig, resolved: Any) -> None:
        """Raises OSError where the folder of logs cannot be written, or no process started."""
        self.kind, self.title = kind, TITLES[kind]
        self.folder: Path = config.output
        self.log = self.folder / "logs" / f"{kind}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            # A session of its own: Ctrl-C in the terminal is for the run, which ends this process when it has saved.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tepo_megatron.run.loggers.process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to: IO[bytes] = self._process.stdin
        self._from: IO[bytes] = self._process.stdout
        self._read = b""
        first = {
            "kind": kind,
            "folder": str(self.folder.absolute()),
            "name": config.name,
            "settings": settings,
            "config": resolved,
            "finish_timeout_s": config.log.finish_timeout_s,
        }
        with suppress(BrokenPipeError):  # it is seen to have ended
            self._to.write(json.dumps(first).encode() + b"\n")
            self._to.flush()
        os.set_blocking(self._to.fileno(), False)
        os.set_blocking(self._from.fileno(), False)

    def lives(self) -> bool:
        return self._process.poll() is None

    def failed(self) -> bool:
        """Whether the process has ended otherwise than it should."""
        return self._process.poll() not in (None, 0)

    def send(self, message: Mapping[str, Any]) -> None:
        """A line that finds the pipe full is left out: the process looks at the file anyway, and has thousands to read."""
        with suppress(BrokenPipeError, BlockingIOError):
            os.write(self._to.fileno(), json.dumps(message).encode() + b"\n")

    def close_input(self) -> None:
        with suppress(BrokenPipeError):
            self._to.close()

    def reports(self) -> list[dict[str, Any]]:
        """What the process has written since the last call."""
        with suppress(BlockingIOError):
            while piece := os.read(self._from.fileno(), 1 << 16):
                self._read += piece
        *lines, self._read = self._read.split(b"\n")
        return [json.loads(line) for line in lines]

    def wait_until(self, deadline: float) -> bool:
        """Whether the process has ended by then."""
        while self.lives():
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_S)
        return True

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
