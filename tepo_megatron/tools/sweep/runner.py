"""Runs a sweep: skips finished runs, resumes started ones, reports failures and continues."""

from __future__ import annotations

import heapq
import os
import queue
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from tepo_megatron.config import RunConfig
from tepo_megatron.config.loading.load import ConfigError, load_run
from tepo_megatron.run.display.figures import duration
from tepo_megatron.run.metrics.metrics import read_metrics
from tepo_megatron.runtime.cores import available_cores
from tepo_megatron.runtime.run_lock import check_free
from tepo_megatron.tools.sweep.file import SweepFile, SweepRun

Say = Callable[[str], None]
LAST_LINES = 30


@dataclass(frozen=True)
class _RunEnd:
    """``outcome`` is ``done``, ``failed`` (error in ``said``) or ``stopped`` on request; ``seconds`` only if this sweep ran
    it."""

    run: SweepRun
    outcome: str
    said: str = ""
    seconds: float = 0.0


def is_done(run: SweepRun) -> bool:
    """Whether the model was exported: a run's last action."""
    return (run.folder / "model").is_dir()


def check_runs(sweep: SweepFile, runs: Sequence[SweepRun]) -> None:
    """Read every run's configuration and compare it with its folder; start nothing.

    Raises ValueError that names the run if its settings are wrong, or its folder holds other settings.
    """
    for run in runs:
        try:
            expected = load_run(sweep.run, run.overrides)
        except ConfigError as error:
            raise ValueError(f"the run {run.name} cannot begin:\n{error}") from error
        resolved = run.folder / "resolved.yaml"
        if resolved.is_file():
            there = load_run(resolved)
            other = sorted(_differing(_compared(expected), _compared(there)))
            if other:
                raise ValueError(
                    f"{run.folder} holds a run of other settings ({', '.join(other[:5])}); give another --output, or remove it"
                )


def _compared(config: RunConfig) -> dict[str, object]:
    return config.model_dump(mode="json", exclude={"output": True, "train": {"resume", "resume_from"}, "log": True})


def _differing(one: object, other: object, path: str = "") -> Iterator[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in one.keys() | other.keys():
            yield from _differing(one.get(key), other.get(key), f"{path}.{key}".lstrip("."))
    elif one != other:
        yield path


def core_shares(cores: Sequence[int], jobs: int) -> list[list[int]]:
    """The cores of each of ``jobs`` parallel runs: equal disjoint shares if there are enough, else one core each."""
    if jobs >= len(cores):
        return [[cores[job % len(cores)]] for job in range(jobs)]
    return [list(cores[job * len(cores) // jobs : (job + 1) * len(cores) // jobs]) for job in range(jobs)]


def seconds_left(took: Sequence[float], running: Sequence[float], waiting: int, jobs: int) -> float:
    """Seconds until the last run ends, if each takes the mean of ``took``; ``running`` has the elapsed seconds of current
    runs."""
    item = statistics.fmean(took)
    places = [max(item - since, 0.0) for since in running] + [0.0] * (jobs - len(running))
    heapq.heapify(places)
    for _ in range(waiting):
        heapq.heappush(places, heapq.heappop(places) + item)
    return max(places)


def _use_cores(cores: Sequence[int]) -> None:
    """Bind this thread and processes that it starts later."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


class Sweep:
    """Run ``jobs`` runs at a time, each on its share of cores: servers of two runs would otherwise bind the same ones. Runs
    get the stop signals, and save their state."""

    def __init__(self, sweep: SweepFile, runs: Sequence[SweepRun], *, say: Say, jobs: int = 1) -> None:
        """``say`` gets progress lines. Raises ValueError as :func:`check_runs`."""
        check_runs(sweep, runs)
        self._sweep, self._runs, self._say, self._jobs = sweep, list(runs), say, jobs
        self._living: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
        self._lock = threading.Lock()
        self._stop: int | None = None

    def run(self) -> list[_RunEnd]:
        """Run what is not done; return all ends in order. Call from the main thread."""
        waiting = [run for run in self._runs if not is_done(run)]
        self._say(
            f"{len(self._runs)} runs: {len(self._runs) - len(waiting)} done, {len(waiting)} to do, {self._jobs} at a time"
        )
        ended = {run.name: _RunEnd(run, "done") for run in self._runs if is_done(run)}
        shares: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
        for share in core_shares(available_cores(), self._jobs):
            shares.put(share)
        with self._signals(), ThreadPoolExecutor(self._jobs, "sweep", lambda: _use_cores(shares.get())) as pool:
            pending: set[Future[_RunEnd]] = {pool.submit(self._one, run) for run in waiting}
            while pending:
                finished, pending = wait(pending, timeout=0.5, return_when=FIRST_COMPLETED)
                for future in finished:
                    one = future.result()
                    ended[one.run.name] = one
                    if one.outcome != "stopped":
                        self._say(self._line(one, [ended[run.name] for run in waiting if run.name in ended], len(waiting)))
        return [ended[run.name] for run in self._runs]

    def _line(self, one: _RunEnd, ended: Sequence[_RunEnd], of: int) -> str:
        word = f"{one.outcome}: {one.said}" if one.said else one.outcome
        took = [item.seconds for item in ended if item.outcome == "done"]
        with self._lock:
            running = [time.monotonic() - begun for _, begun in self._living.values()]
        waiting = of - len(ended) - len(running)
        known = took and len(ended) < of
        left = f"; about {duration(seconds_left(took, running, waiting, self._jobs))} left" if known else ""
        return f"[{len(ended)}/{of}] {one.run.name} {word}{_last_figures(one.run)}{left}"

    def _one(self, run: SweepRun) -> _RunEnd:
        log = run.folder.parent / "logs" / f"{run.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        begun = time.monotonic()
        for _ in range(self._sweep.attempts):
            if self._stop is not None:
                return _RunEnd(run, "stopped")
            try:
                check_free(run.folder)
            except ValueError as error:
                return _RunEnd(run, "failed", str(error))
            status = self._start(run, log)
            if status == 0 and is_done(run):
                return _RunEnd(run, "done", seconds=time.monotonic() - begun)
            if self._stop is not None:
                return _RunEnd(run, "stopped")
        return _RunEnd(run, "failed", f"{_error(log)} ({log})")

    def _start(self, run: SweepRun, log: Path) -> int:
        command = [sys.executable, "-m", "tepo_megatron", "train", str(self._sweep.run), *run.overrides, "train.resume=auto"]
        with log.open("ab") as file:
            with self._lock:
                if self._stop is not None:
                    return self._stop
                # Its own session: Ctrl-C reaches it only once, from here.
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
                )
                self._living[run.name] = process, time.monotonic()
            try:
                return process.wait()
            finally:
                with self._lock:
                    del self._living[run.name]

    @contextmanager
    def _signals(self) -> Iterator[None]:
        def ask(number: int, frame: FrameType | None) -> None:
            del frame
            if self._stop is None:
                self._say("stopping: each run saves what it trained; the same command goes on")
            self._stop = number
            for process, _ in list(self._living.values()):
                process.send_signal(number)

        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _last_figures(run: SweepRun) -> str:
    path = run.folder / "metrics.jsonl"
    rows = read_metrics(path) if path.is_file() else []
    evaluated = [row for row in rows if row.get("accuracy/greedy") is not None]
    if not evaluated:
        return ""
    return f", accuracy/greedy {evaluated[-1]['accuracy/greedy']:.3f} at step {evaluated[-1]['step']}"


def _error(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
    return next((line for line in lines if line.startswith("error:")), lines[-1] if lines else "it said nothing")
