"""A live run that is started, disturbed and resumed, and the undisturbed run to compare it with."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tepo_megatron.tools.faults import program, tiny
from tepo_megatron.tools.faults.processes import by_role, descendants, end_tree, wait_until

PATIENCE_S = 1800.0
"""Only a hang exceeds it, even on a busy machine."""


class LiveRun:
    def __init__(self, folder: Path, steps: int, overrides: tuple[str, ...] = ()) -> None:
        self.folder, self.out, self.steps = folder, folder / "out", steps
        folder.mkdir(parents=True, exist_ok=True)
        self._overrides = (*tiny.LIVE, *overrides)
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def finished(self) -> bool:
        return (self.out / "model" / "model.safetensors").exists()

    def start(self) -> None:
        resume = any((self.out / "checkpoints").glob("step_*/state.json"))
        if not resume:
            shutil.rmtree(self.out, ignore_errors=True)
        log = self.folder / "log.txt"
        self._log_start = log.stat().st_size if log.exists() else 0
        given = [f"output={self.out}", f"train.steps={self.steps}", f"train.resume={str(resume).lower()}"]
        with log.open("ab") as stream:
            self._process = subprocess.Popen(
                [sys.executable, "-m", program.MODULE, "train", str(tiny.write_run(self.folder)), *self._overrides, *given],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**os.environ, program.FOLDER: str(self.folder)},
                start_new_session=True,
            )

    def roles(self) -> dict[str, list[int]]:
        return by_role(self.pid, program.MODULE)

    def pids(self) -> list[int]:
        return descendants(self.pid)

    def reach(self, phase: str) -> None:
        """Wait until the run enters a phase. Raises TimeoutError, or RuntimeError if the run ends first."""
        program.arm(self.folder, phase)
        wait_until(lambda: program.is_reached(self.folder) or not self.running, PATIENCE_S, f"the phase {phase}")
        if not program.is_reached(self.folder):
            raise RuntimeError(f"the run ended before it came to {phase}: {self.said()}")

    def wait_for_row(self, step: int, timeout_s: float = PATIENCE_S) -> bool:
        """Whether the step's row was written before the run ended. Raises TimeoutError."""
        wait_until(lambda: tiny.last_step(self.out) >= step or not self.running, timeout_s, f"the row of step {step}")
        return tiny.last_step(self.out) >= step

    def wait_end(self, timeout_s: float = PATIENCE_S) -> int:
        """Raises TimeoutError."""
        wait_until(lambda: not self.running, timeout_s, "the end of the run")
        assert self._process is not None
        return self._process.returncode

    def printed(self) -> str:
        with (self.folder / "log.txt").open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")

    def said(self) -> str:
        """The last error, else the last lines of the output."""
        return last_sentence(self.printed())

    def stop(self, others: list[int] | None = None) -> None:
        if self._process is not None:
            end_tree(self._process, others or [])
            self._process = None


def last_sentence(printed: str) -> str:
    lines = [line for line in printed.splitlines() if line.strip()]
    errors = [index for index, line in enumerate(lines) if line.startswith("error: ")]
    result = lines[errors[-1]] if errors else " / ".join(lines[-2:])
    return re.sub(r"\s+", " ", result)[:600]


def reference(folder: Path, steps: int, overrides: tuple[str, ...] = ()) -> Path:
    """The undisturbed run's output, made if missing. Raises RuntimeError if it fails."""
    run = LiveRun(folder, steps, overrides)
    if not run.finished:
        shutil.rmtree(run.out, ignore_errors=True)
        run.start()
        try:
            if run.wait_end(10 * PATIENCE_S):
                raise RuntimeError(f"the run that is not disturbed ended with {run.said()}")
        finally:
            run.stop()
    return run.out
