"""A run's output folder and display. Rank 0 only."""

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tepo_megatron.config import RunConfig
from tepo_megatron.config.load import dump_resolved
from tepo_megatron.run.display.figures import fault_lines, final_table
from tepo_megatron.run.display.plots import plot_curves
from tepo_megatron.run.display.progress import Progress
from tepo_megatron.run.loggers import Ending, Loggers
from tepo_megatron.run.metrics import FOLDER, MetricsWriter, TokenSamples, read_metrics, token_file, token_files, value_in
from tepo_megatron.run.output.resume import JOURNAL, LOGGED, check_no_run, resumes, unwritable_is_a_sentence
from tepo_megatron.runtime.files import Failed, LogFile, write_atomically
from tepo_megatron.runtime.preemption import StopSignals
from tepo_megatron.runtime.run_lock import RunLock
from tepo_megatron.runtime.terminal import Terminal
from tepo_megatron.trainer.checkpoint_folder import checkpoints, leftovers, remove, retained, step_of

_OF_CHOSEN_TOKENS = ("mask/fraction", "kl/masked", "entropy/delta_masked", "entropy/delta_unmasked")
"""Only objectives that select tokens have these: a missing mask is not 0 %."""


class Output:
    """Holds the folder's lock. Shows a failed write once, counts it (``log/failed``), and retries with the next row."""

    def __init__(self, config: RunConfig, progress: Progress) -> None:
        """Raises ValueError if the folder is unwritable, in use, or of another run, or a logger's package is missing."""
        Loggers.check_installed(config.log)
        self._config, self.folder, self.progress, self.message = config, config.output, progress, progress.message
        self._finished = False
        self._failures, self._said = 0, set[Path]()
        self._samples, self._train_samples = (
            LogFile(self.folder / name, self.write_failed) for name in ("samples.jsonl", "train_samples.jsonl")
        )
        self.tokens = _TokenLog(self.folder, self.write_failed)
        self._lock = RunLock(self.folder)
        with unwritable_is_a_sentence(self.folder):
            left_behind = self._lock.take()
            try:
                check_no_run(config)
                cut = self._open_files()
                # A save that was killed left them; their room may be what the next one lacks.
                killed = [path for path in leftovers(self.folder / "checkpoints") if ".partial" in path.name]
                failed = [sentence for path in killed if (sentence := remove(path)) is not None]
                self._loggers = Loggers(config, self.message, self._count_failure)
            except BaseException:
                self._lock.release()
                raise
        progress.start(config)
        if left_behind is not None:
            self.message(f"{self.folder} was left locked by {left_behind}, which is gone")
        for path in cut:
            self.message(f"{path}: its last line was cut off when the run ended, and is dropped")
        for sentence in failed:
            self.message(sentence)

    def _open_files(self) -> list[Path]:
        """Returns files whose last line was cut off."""
        self.resumes = resumes(self._config)
        if not self.resumes:
            if self._config.train.resume == "auto":
                _put_aside(self.folder)
            journal = () if self._config.train.resume else JOURNAL  # its rewards may be those of a verifier since corrected
            for pattern in (*LOGGED, *journal, "wandb/run.json", "mlflow/run.json"):  # of a failed start
                for path in self.folder.glob(pattern):
                    path.unlink()
            # A resumed run writes it when the checkpoint has been accepted.
            write_atomically(self.folder / "resolved.yaml", dump_resolved(self._config, with_resume=False))
        present = [file for file in (self._samples, self._train_samples) if file.path.exists()]
        for file in present:
            for _ in file.read("sample"):  # raises for a damaged one, before anything is changed
                pass
        cut = [file.path for file in present if file.is_cut()]
        self._metrics = MetricsWriter(self.folder, self._config.log.tensorboard, self.write_failed)
        return [*([self._metrics.path] if self._metrics.cut else []), *cut]

    @property
    def last_step(self) -> int | None:
        return self._metrics.last_step

    def resume_from(self, step: int) -> tuple[float, int]:
        """Returns the seconds of the dropped steps, and their returns to a checkpoint."""
        with unwritable_is_a_sentence(self.folder):
            rows = [row for row in read_metrics(self._metrics.path) if row["step"] > step]
            names = ("time/step", "lost/resume", "lost/rollback")
            forgotten = sum(row.get(name) or 0.0 for row in rows for name in names)
            returns = sum(int(row.get("rollback/count") or 0) for row in rows)
            if lacking := self._metrics.truncate_after(step):
                steps = ", ".join(map(str, lacking[:5])) + " …" * (len(lacking) > 5)
                self.message(f"{self._metrics.path} lacks the rows of {len(lacking)} earlier steps: {steps}")
            logged = -1 if self.last_step is None else self.last_step
            # An evaluation without its row is done again; a step is not.
            for file, last in ((self._samples, logged), (self._train_samples, step)):
                file.forget_after(step)
                if file.path.exists():
                    file.cut_after(last, "sample")
            self.tokens.forget_after(step)
        return forgotten, returns

    def write_row(self, step: int, row: Mapping[str, float]) -> dict[str, float]:
        """Raises RuntimeError if another run has taken the folder."""
        self._make_again_if_removed()
        self._loggers.take_reports()
        failures, self._failures = self._failures, 0
        if not self._config.objective.selects_tokens:
            row = {name: value for name, value in row.items() if name not in _OF_CHOSEN_TOKENS}
        written = {"step": step, **row, "log/failed": float(failures)}
        self._metrics.write(step, written)
        self._loggers.write_row(written)
        self.progress.step(step, row)
        return written

    def write_samples(self, step: int, samples: Iterable[Mapping[str, Any]], *, trained: bool = False) -> None:
        file = self._train_samples if trained else self._samples
        file.append(_as_lines({"step": step, **sample} for sample in samples))

    def _count_failure(self) -> None:
        self._failures += 1

    def write_failed(self, path: Path, error: OSError) -> None:
        self._count_failure()
        if path.parent not in self._said:
            self._said.add(path.parent)
            self.message(
                f"{path} cannot be written: {error.strerror or error}. The run continues; what is missing is written as soon "
                "as it can be (log/failed counts the attempts)"
            )

    def finish(self) -> None:
        self.progress.close()
        self._write_rest()
        self._finished = True
        metrics, console = self._metrics.path, Terminal.of_output()
        try:
            rows = read_metrics(metrics)
            if self._config.log.curves:
                plot_curves(metrics, self.folder / "curves.png", self._config.name)
            if self._config.log.progress == "none":
                return
            console.print(final_table(rows, self.folder))
            for line in fault_lines(rows):
                console.print(f"  {line}", highlight=False, markup=False)
        except (OSError, ValueError) as error:
            self.message(f"the run is complete, but its picture and table could not be made: {error}")

    def close(self) -> None:
        """Also for failed runs. Restores the terminal and waits for loggers."""
        signals = StopSignals.current()
        ending: Ending = "finished" if self._finished else "failed" if signals.requested is None else "stopped"
        if not self._finished:
            self._write_rest()
            self._finished = True
            with contextlib.suppress(OSError, ValueError):  # the folder is gone, or damaged: what ends the run says more
                for line in fault_lines(read_metrics(self._metrics.path)):
                    self.message(f"  {line}")
        self.progress.close()
        # A run that was asked to stop keeps a second for the rest of its end.
        self._loggers.close(ending, max(0.0, signals.seconds_left() - 1))
        self._lock.release()

    def _write_rest(self) -> None:
        """Makes no removed folder again, and writes into none that another run has taken."""
        others = (self._samples, self._train_samples, self.tokens)
        with contextlib.suppress(RuntimeError):  # another run's: what waits is lost
            self._lock.is_there()
            if os.path.isdir(self.folder):  # not Path.is_dir, which raises if the disk is away
                self._metrics.close()
                for log in others:
                    log.flush()
        for log in (self._metrics, *others):
            if log.waiting:
                self.message(f"{log.path}: {log.waiting} of its writes failed to the end: what they held is lost")

    def _make_again_if_removed(self) -> None:
        """The next checkpoint is worth more than the lost files."""
        if self._lock.is_there():
            return
        resolved = self.folder / "resolved.yaml"
        try:
            what = f"the lock of {self.folder}" if resolved.exists() else f"{self.folder}, with all that it held,"
            self._lock.release()
            self._lock.take()
            write_atomically(resolved, dump_resolved(self._config, with_resume=False))
        except OSError as error:
            self.write_failed(self.folder, error)
        else:
            self.message(f"{what} was removed while the run went on; it is made again")


class _TokenLog:
    def __init__(self, folder: Path, failed: Failed) -> None:
        self.path, self._folder, self._failed = folder / FOLDER, folder, failed
        self._waiting: dict[int, bytes] = {}

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def write(self, samples: TokenSamples) -> None:
        self._waiting[samples.step] = samples.encode()
        self.flush()

    def flush(self) -> None:
        for step in list(self._waiting):
            path = token_file(self._folder, step)
            try:
                write_atomically(path, self._waiting[step])
            except OSError as error:
                self._failed(path, error)
                return
            del self._waiting[step]

    def forget_after(self, step: int) -> None:
        self._waiting = {key: data for key, data in self._waiting.items() if key <= step}
        for recorded, path in token_files(self._folder).items():
            if recorded > step:
                path.unlink()


def _as_lines(rows: Iterable[Mapping[str, Any]]) -> bytes:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return text.encode("utf-8", errors="backslashreplace")


def _put_aside(folder: Path) -> None:
    number = 1 + len(list(folder.glob("metrics.before-*.jsonl")))
    for name in ("metrics", "samples", "train_samples"):
        if (folder / f"{name}.jsonl").exists():
            (folder / f"{name}.jsonl").rename(folder / f"{name}.before-{number}.jsonl")
    if (folder / FOLDER).exists():
        (folder / FOLDER).rename(folder / f"{FOLDER}.before-{number}")


class Retention:
    def __init__(self, config: RunConfig, say: Callable[[str], None]) -> None:
        self._train, self._say = config.train, say
        self._folder, self._metrics = config.output / "checkpoints", config.output / "metrics.jsonl"
        self._said_missing = self._said_unreadable = False
        self._seen = max(map(step_of, checkpoints(self._folder)), default=0)
        self._values: dict[int, Any] = {}  # of keep_best.metric
        self._has_read = False

    def after_row(self, step: int, row: Mapping[str, Any] | None = None) -> None:
        if row is not None and self._train.keep_best is not None:
            value = value_in(row, self._train.keep_best.metric)
            self._values[step] = None if value is None or not math.isfinite(value) else float(value)
        try:
            present = {step_of(path): path for path in checkpoints(self._folder)}
            newest = max(present, default=0)
            if newest > step or newest == self._seen:
                return
            self._seen = newest
            best, unnamed = self.best(present), leftovers(self._folder)
        except (OSError, ValueError) as error:  # as of any log, it does not end the run
            if not self._said_unreadable:
                self._said_unreadable = True
                self._say(f"no older checkpoint is removed: {error}")
            return
        remaining = retained(present, newest=self._train.keep_checkpoints, every=self._train.keep_every, best=best)
        # A save of a later step may be in progress.
        partial = {path: path.name.removeprefix("step_").partition(".partial") for path in unnamed}
        unfinished = [path for path, (number, is_partial, _) in partial.items() if is_partial and int(number) <= newest]
        for folder in [*unfinished, *(path for saved, path in present.items() if saved not in remaining)]:
            failed = remove(folder)
            if failed is not None:
                self._say(failed)

    def best(self, steps: Iterable[int]) -> int | None:
        """Raises OSError or ValueError."""
        best = self._train.keep_best
        if best is None:
            return None
        if not self._has_read:  # once: all ranks wait
            of_file = {row["step"]: value_in(row, best.metric) for row in read_metrics(self._metrics)}
            self._values, self._has_read = of_file | self._values, True
        measured = {step: self._values[step] for step in steps if self._values.get(step) is not None}
        if not measured and not self._said_missing:
            self._said_missing = True
            self._say(f"train.keep_best.metric = {best.metric} is in no row of a step that was saved: none is kept as the best")
        sign = 1 if best.mode == "max" else -1
        return max(measured, key=lambda step: (sign * measured[step], step), default=None)
