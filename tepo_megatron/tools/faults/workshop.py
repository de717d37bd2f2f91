"""What classes of faults share: tiny runs, outcomes and their record.

A live run trains on two-digit sums, with a server; a replayed run takes two seconds on one rank.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import random
import re
import shutil
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.run.metrics import read_metrics
from tepo_megatron.runtime.files import write_atomically
from tepo_megatron.sampler.rollout_file import write_rollouts
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.tasks.data.problems import load_problems
from tepo_megatron.tasks.data.tokenizer import load_tokenizer
from tepo_megatron.tools.faults import program
from tepo_megatron.tools.faults.processes import by_role, descendants, end_tree, wait_gone, wait_until

_GONE_S = 240.0  # to exit: seconds, ten times more on a busy machine
_PATIENCE_S = 1800.0  # only a hang exceeds it, even on a busy machine

_SHARED = (
    *("rollout.prompts_per_step=4", "rollout.samples_per_prompt=4", "rollout.sampling.max_new_tokens=24"),
    *("train.minibatches=2", "train.save_every=1", "optimizer.lr=5.0e-5", "log.tensorboard=false", "log.progress=plain"),
    "log.curves=false",
)
REPLAYED = (*_SHARED, "evaluate.every=0", "train.keep_checkpoints=3")
_LIVE = (
    *_SHARED,
    *("rollout.server.tp=2", "engine.parallel.tp=2"),  # two workers and two ranks: every kind of process exists
    'rollout.server.extra_args=["--num-gpu-blocks-override=256"]',  # a worker would write zeros to a GiB at each start
    "engine.parallel.sequence_parallel=true",
    "rollout.server.max_restarts=1000",
    *("rollout.server.start_timeout_s=1800", "rollout.server.request_timeout_s=600"),  # limits for a busy machine
    "rollout.server.transfer_timeout_s=600",
    "rollout.record=true",
    *(f"reward.verifier={program.MODULE}:slow_last_word", "reward.timeout_s=10"),
    *("evaluate.every=2", "evaluate.problems=4", "evaluate.samples=0"),
    "train.grace_s=3600",  # shows processes that do not end by themselves
)
_SHORT_TIMEOUTS = ("rollout.server.request_timeout_s=20", "rollout.server.transfer_timeout_s=20")
"""Only for stopped servers: on a busy machine, slow ones would be restarted too."""

_NOT_COMPARED = ("time/", "idle/", "tokens/s", "reward/failed", "faults/", "lost/", "servers/", "requests/", "log/", "memory/")


def _rows(out: Path) -> list[dict[str, Any]]:
    path = out / "metrics.jsonl"
    rows = read_metrics(path) if path.exists() else []
    return [{key: value for key, value in row.items() if not key.startswith(_NOT_COMPARED)} for row in rows]


def last_step(out: Path) -> int:
    rows = _rows(out)
    return rows[-1]["step"] if rows else -1


def differences(out: Path, reference: Path, *, lacking: bool = False) -> str:
    """``lacking``: rows of metrics may be missing."""
    expected, rows = {row["step"]: row for row in _rows(reference)}, _rows(out)
    for row in rows:
        other = expected[row["step"]]
        if wrong := [key for key in (*row, *sorted(other.keys() - row.keys())) if key not in row or other.get(key) != row[key]]:
            return f"row {row['step']} of metrics.jsonl differs in {', '.join(wrong)}"
    if (steps := [row["step"] for row in rows]) != list(range(len(steps))) and not lacking:
        return f"metrics.jsonl has the steps {steps}"
    for path in sorted((out / "rollouts").glob("step_*.jsonl")):
        if path.read_bytes() != (reference / "rollouts" / path.name).read_bytes():
            return f"the rollouts in {path.name} differ"
    weights = "model/model.safetensors"
    if (out / weights).exists() and (out / weights).read_bytes() != (reference / weights).read_bytes():
        return "the exported weights differ"
    return ""


def _train_command(folder: Path, settings: Sequence[str], module: str = "tepo_megatron") -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "run.yaml"
    file.write_text("name: faults\nmodel: {path: builtin:tiny}\n")
    return [sys.executable, "-m", module, "train", str(file), f"output={folder / 'out'}", *settings]


def start(folder: Path, command: Sequence[str], **environment: str) -> subprocess.Popen[bytes]:
    with (folder / "log.txt").open("ab") as stream:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, program.FOLDER: str(folder), **environment},
            start_new_session=True,
        )


class RunEnd(NamedTuple):
    code: int
    printed: str

    @classmethod
    def of(cls, process: subprocess.Popen[bytes], folder: Path) -> RunEnd:
        """Raises subprocess.TimeoutExpired."""
        code = process.wait(_PATIENCE_S)
        return cls(code, (folder / "log.txt").read_text(errors="replace"))

    @property
    def said(self) -> str:
        lines = [line for line in self.printed.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("error: ")]
        return re.sub(r"\s+", " ", errors[-1] if errors else " / ".join(lines[-2:]))[:600]

    @property
    def has_traceback(self) -> bool:
        return "Traceback (most recent call last)" in self.printed


class LiveRun:
    def __init__(self, folder: Path, steps: int, overrides: tuple[str, ...] = ()) -> None:
        self.folder, self.out, self.steps = folder, folder / "out", steps
        self.overrides = overrides  # a change takes effect at the next start
        self._process: subprocess.Popen[bytes] | None = None
        self._log, self._log_start = folder / "log.txt", 0

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def finished(self) -> bool:
        return (self.out / "model" / "model.safetensors").exists()

    @property
    def last_step(self) -> int:
        return last_step(self.out)

    def start(self) -> None:
        resume = any((self.out / "checkpoints").glob("step_*/state.json"))
        if not resume:
            shutil.rmtree(self.out, ignore_errors=True)
        self._log_start = self._log.stat().st_size if self._log.exists() else 0
        settings = [*_LIVE, *self.overrides, f"train.steps={self.steps}", f"train.resume={str(resume).lower()}"]
        self._process = start(self.folder, _train_command(self.folder, settings, program.MODULE))

    @property
    def _pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def roles(self) -> dict[str, list[int]]:
        return by_role(self._pid, program.MODULE)

    @property
    def pids(self) -> list[int]:
        return descendants(self._pid)

    def reach(self, phase: str) -> None:
        """``phase`` is one of the stopwatch's, or ``save``. Raises RuntimeError if the run ends first."""
        reached = self.folder / "reached"
        for name in ("armed", "reached"):
            (self.folder / name).unlink(missing_ok=True)
        write_atomically(self.folder / "armed", phase)
        wait_until(lambda: reached.exists() or not self.running, _PATIENCE_S, f"the phase {phase}")
        if not reached.exists():
            raise RuntimeError(f"the run ended before it came to {phase}: {self.said()}")

    def wait_for_row(self, step: int) -> bool:
        """False if the run ended before."""
        wait_until(lambda: self.last_step >= step or not self.running, _PATIENCE_S, f"the row of step {step}")
        return self.last_step >= step

    def continue_to(self, step: int, pids: Sequence[int] = ()) -> tuple[str, str]:
        """Resumes a run that ends before the row of ``step``, once ``pids`` are gone. Returns (lost, said)."""
        if self.wait_for_row(step):
            return "", ""
        said, code = self.said(), self.wait_end()
        if left := wait_gone(pids, _GONE_S):
            return f"{len(left)} processes were still there {_GONE_S:g} s after the run had ended ({said})", said
        if self._end.has_traceback and code == 1:
            return f"the run ended with a traceback: {said}", said
        self.start()
        return "" if self.wait_for_row(step) else f"it could not be resumed: {self.said()}", said

    def wait_end(self, timeout_s: float = _PATIENCE_S) -> int:
        wait_until(lambda: not self.running, timeout_s, "the end of the run")
        assert self._process is not None
        return self._process.returncode

    @property
    def _end(self) -> RunEnd:
        return RunEnd(0, self._log.read_bytes()[self._log_start :].decode(errors="replace"))

    def said(self) -> str:
        return self._end.said

    def stop(self) -> None:
        if self._process is not None:
            end_tree(self._process)
            self._process = None

    def complete(self) -> None:
        """Raises RuntimeError if the run fails."""
        shutil.rmtree(self.out, ignore_errors=True)
        self.start()
        try:
            if self.wait_end(10 * _PATIENCE_S):
                raise RuntimeError(f"the run that is not disturbed ended with {self.said()}")
        finally:
            self.stop()


SAVED, STEPS = 3, 4  # last steps of the two undisturbed replayed runs; the second resumes the first
LONG = 12  # for faults in the middle of a run


def make_rollouts(folder: Path, steps: int) -> Path:
    tokenizer = load_tokenizer(resolve_model_path("builtin:tiny"))
    rng, sums = random.Random(0), load_problems("builtin:addition")
    for step in range(steps):
        rollouts = []
        problems = random.Random(step).sample(sums, 16)
        for number, problem in enumerate(problems):
            prompt, response = problems[number // 4 * 4].prompt, f"{problem.prompt}{problem.answer} {problem.answer}"
            ids = (*tokenizer.encode(response), tokenizer.eos_ids[0])
            rollouts.append(
                Rollout(
                    problem_id=prompt.removesuffix("="),
                    group=number // 4,
                    prompt_ids=tuple(tokenizer.prompt_ids(prompt)),
                    response_ids=ids,
                    sampler_logprobs=tuple(-rng.random() for _ in ids),
                    finish_reason="stop",
                    versions=WeightsVersion(step),
                    text=response,
                    reward=float(rng.random() < 0.5),
                )
            )
        write_rollouts(folder, step, rollouts)
    return folder


def replay_command(folder: Path, rollouts: Path, steps: int, *overrides: str, resume: bool = False) -> list[str]:
    settings = [*REPLAYED, f"rollout.replay={rollouts}", f"train.steps={steps}", *overrides, *["--resume"] * resume]
    return _train_command(folder, settings)


def replay(folder: Path, rollouts: Path, steps: int, *overrides: str, resume: bool = False) -> RunEnd:
    """Runs the rank without a launcher, in a fork with all modules: both would cost seconds of a core."""
    (folder / "log.txt").unlink(missing_ok=True)
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    rank |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # the rank takes any free one
    command = replay_command(folder, rollouts, steps, *overrides, resume=resume)
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(["tepo_megatron.tools.faults.preloaded"])
    process = forks.Process(target=program.run_rank, args=(folder / "log.txt", command[2:], rank))
    process.start()
    try:
        process.join(_PATIENCE_S)
        if process.exitcode is None:
            raise TimeoutError(f"a replay did not end within {_PATIENCE_S:g} s")
    finally:
        process.kill()
        process.join()
    return RunEnd(process.exitcode, (folder / "log.txt").read_text(errors="replace"))


def _replayed(folder: Path, runs: Mapping[str, int]) -> Path:
    with _locked(folder.with_suffix(".lock")):
        if (folder / "done").exists():
            return folder
        shutil.rmtree(folder, ignore_errors=True)
        rollouts = make_rollouts(folder / "rollouts", max(runs.values()))
        for name, steps in runs.items():
            if resumed := (folder / "saved").exists():
                shutil.copytree(folder / "saved", folder / name)
            result = replay(folder / name, rollouts, steps, resume=resumed)
            if result.code:
                raise RuntimeError(f"the run that is not disturbed ended with {result.said}")
        (folder / "done").touch()
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class Workshop:
    def __init__(self, folder: Path, *, lane: str, quick: bool, say: Callable[[str], None]) -> None:
        self.folder, self.is_quick, self.say, self._lane = folder, quick, say, lane
        self.steps = 14 if quick else 32  # more steps: a longer reference run, but fewer restarts of live runs
        self._overrides = () if quick else _SHORT_TIMEOUTS
        self._run: LiveRun | None = None
        self._runs = sum(1 for _ in folder.glob(f"{lane}-run-*"))  # an interrupted call leaves its runs

    def undisturbed(self) -> Path:
        """Makes ``rollouts``, a run of 3 steps in ``saved``, and its continuation to step 4 in ``whole``."""
        return _replayed(self.folder / "replayed", {"saved": SAVED, "whole": STEPS})

    def long_replay(self) -> Path:
        """Makes ``rollouts`` and a run in ``whole``."""
        return _replayed(self.folder / "replayed-long", {"whole": LONG})

    def reference(self) -> Path:
        with _locked(self.folder / "reference.lock"):
            run = LiveRun(self.folder / "reference", self.steps, self._overrides)
            if not run.finished:
                self.say("the undisturbed run …")
                run.complete()
        return run.out

    def live_run(self, *overrides: str) -> LiveRun:
        """At least four steps are left. Raises RuntimeError if the previous run ended unlike the undisturbed one."""
        self.reference()
        run, settings = self._run, (*self._overrides, *overrides)
        is_over = run is not None and (run.overrides != settings or run.last_step > self.steps - 5)
        if is_over and (wrong := self.finish_run()):
            raise RuntimeError(f"the run before, which survived its faults, ended with a difference: {wrong}")
        if self._run is None:
            self._runs += 1
            self._run = LiveRun(self.folder / f"{self._lane}-run-{self._runs:02d}", self.steps, settings)
        if not self._run.running:
            self._run.start()
            self._run.wait_for_row(0)
        return self._run

    def finish_run(self) -> str | None:
        run, self._run = self._run, None
        if run is None:
            return None
        self.say("the live run continues to its end …")
        try:
            if not run.running and not run.finished:
                run.start()
            return run.said() if run.wait_end() else differences(run.out, self.reference())
        finally:
            run.stop()

    def close(self) -> None:
        if self._run is not None:
            self._run.stop()
            self._run = None


@dataclass(frozen=True)
class FaultOutcome:
    """``survived``: nothing is missing. ``refused``: it stopped with the message ``said``, undamaged. ``lost``: anything
    else. ``recovery_s``: seconds until work continued.
    """

    fault: str
    result: Literal["survived", "refused", "lost"]
    said: str = ""
    recovery_s: float | None = None
    details: Mapping[str, Any] = field(default_factory=dict)


class FaultClass(ABC):
    name: ClassVar[str]
    title: ClassVar[str]
    whole: ClassVar[int]
    quick: ClassVar[int]

    def __init__(self, workshop: Workshop) -> None:
        self.workshop = workshop
        self.folder = workshop.folder / self.name
        self.folder.mkdir(parents=True, exist_ok=True)

    @classmethod
    def count(cls, *, quick: bool) -> int:
        return cls.quick if quick else cls.whole

    @abstractmethod
    def inject(self, number: int, rng: random.Random) -> FaultOutcome:
        """All randomness comes from ``rng``."""

    def new_folder(self, number: int) -> Path:
        folder = self.folder / f"{number:02d}"
        shutil.rmtree(folder, ignore_errors=True)
        return folder

    def outcome_of(self, name: str, folder: Path, base: Path, steps: int, end: RunEnd, start: float) -> FaultOutcome:
        """Resumes a run that failed, without the fault."""
        if end.has_traceback:
            return FaultOutcome(name, "lost", f"a traceback: {end.said}")
        if end.code and (again := replay(folder, base / "rollouts", steps, resume=True)).code:
            return FaultOutcome(name, "lost", f"it ended ({end.said}) and could not be resumed: {again.said}")
        if wrong := differences(folder / "out", base / ("whole/out" if steps == LONG else "saved/out")):
            return FaultOutcome(name, "lost", wrong)
        shutil.rmtree(folder, ignore_errors=True)
        message = f"ended and resumed: {end.said}" if end.code else "it went on"
        return FaultOutcome(name, "survived", message, time.monotonic() - start)

    def close(self) -> None:  # noqa: B027  # not every class has something to end
        ...
