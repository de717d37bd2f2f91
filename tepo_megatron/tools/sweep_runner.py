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
from tepo_megatron.config.load import ConfigError, load_run
from tepo_megatron.run.display.figures import duration
from tepo_megatron.run.metrics import read_metrics
from tepo_megatron.runtime.job_control import stopped_together
from tepo_megatron.runtime.machine import available_cores
from tepo_megatron.runtime.preemption import not_ignored
from tepo_megatron.runtime.run_lock import RunLock
from tepo_megatron.tools.report.runs import flat
from tepo_megatron.tools.sweep import SweepFile, SweepRun

_LAST_LINES = 30


@dataclass(frozen=True)
class _RunEnd:
    """``outcome``: ``done``, ``failed`` or ``stopped``; ``seconds`` only if this sweep ran it."""

    run: SweepRun
    outcome: str
    said: str = ""
    seconds: float = 0.0


def check_runs(sweep: SweepFile, runs: Sequence[SweepRun]) -> None:
    """Starts nothing. Raises ValueError for wrong settings or a folder with other ones."""
    for run in runs:
        try:
            expected = _compared(load_run(sweep.run, run.overrides))
        except ConfigError as error:
            raise ValueError(f"the run {run.name} cannot begin:\n{error}") from error
        if (resolved := run.folder / "resolved.yaml").is_file():
            there = _compared(load_run(resolved))
            if other := sorted(path for path in expected.keys() | there.keys() if expected.get(path) != there.get(path)):
                raise ValueError(
                    f"{run.folder} holds a run of other settings ({', '.join(other[:5])}); give another --output, or remove it"
                )


def _compared(config: RunConfig) -> dict[str, str]:
    return flat(config.model_dump(mode="json", exclude={"output": True, "train": {"resume", "resume_from"}, "log": True}))


def core_shares(cores: Sequence[int], jobs: int) -> list[list[int]]:
    """Equal disjoint shares if there are enough, else one core each."""
    if jobs >= len(cores):
        return [[cores[job % len(cores)]] for job in range(jobs)]
    return [list(cores[job * len(cores) // jobs : (job + 1) * len(cores) // jobs]) for job in range(jobs)]


def seconds_left(took: Sequence[float], running: Sequence[float], waiting: int, jobs: int) -> float:
    """``running``: elapsed seconds."""
    item = statistics.fmean(took)
    places = [max(item - since, 0.0) for since in running] + [0.0] * (jobs - len(running))
    heapq.heapify(places)
    for _ in range(waiting):
        heapq.heappush(places, heapq.heappop(places) + item)
    return max(places)


class Sweep:
    """Each run has its share of cores: servers of two runs would otherwise bind the same ones."""

    def __init__(self, sweep: SweepFile, runs: Sequence[SweepRun], *, say: Callable[[str], None], jobs: int = 1) -> None:
        check_runs(sweep, runs)
        self._sweep, self._runs, self._say, self._jobs = sweep, list(runs), say, jobs
        self._living: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
        self._lock = threading.Lock()
        self._stop: int | None = None

    def run(self) -> list[_RunEnd]:
        """Main thread only."""
        waiting = [run for run in self._runs if not run.is_done]
        self._say(
            f"{len(self._runs)} runs: {len(self._runs) - len(waiting)} done, {len(waiting)} to do, {self._jobs} at a time"
        )
        ended = {run.name: _RunEnd(run, "done") for run in self._runs if run.is_done}
        shares: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
        for share in core_shares(available_cores(), self._jobs):
            shares.put(share)

        def use_cores() -> None:
            if hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(0, shares.get())

        with self._signals(), ThreadPoolExecutor(self._jobs, "sweep", use_cores) as pool:
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
            running = [time.monotonic() - start for _, start in self._living.values()]
        waiting = of - len(ended) - len(running)
        known = took and len(ended) < of
        left = f"; about {duration(seconds_left(took, running, waiting, self._jobs))} left" if known else ""
        return f"[{len(ended)}/{of}] {one.run.name} {word}{_last_figures(one.run)}{left}"

    def _one(self, run: SweepRun) -> _RunEnd:
        log = run.folder.parent / "logs" / f"{run.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        start = time.monotonic()
        for _ in range(self._sweep.attempts):
            if self._stop is not None:
                return _RunEnd(run, "stopped")
            try:
                RunLock.check_free(run.folder)
            except ValueError as error:
                return _RunEnd(run, "failed", str(error))
            if self._start(run, log) == 0 and run.is_done:
                return _RunEnd(run, "done", seconds=time.monotonic() - start)
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
                self._say("stopping: each run saves what it trained; the same command continues them")
            self._stop = number
            for process, _ in list(self._living.values()):
                process.send_signal(number)

        stops = not_ignored((signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
        before = {number: signal.signal(number, ask) for number in stops}
        try:
            with stopped_together():
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
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
    return next((line for line in lines if line.startswith("error:")), lines[-1] if lines else "it said nothing")
