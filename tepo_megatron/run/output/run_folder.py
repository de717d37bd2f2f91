"""The output folder before a run: writable, unused, and without another run unless resumed. Imports no torch."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tepo_megatron.config import RunConfig
from tepo_megatron.run.loggers.loggers import check_installed
from tepo_megatron.runtime.run_lock import RunLock, check_free
from tepo_megatron.trainer.checkpoints.folder import checkpoints

MADE_BY_A_RUN = (
    "resolved.yaml",
    "resolved.*.yaml",
    "metrics.jsonl",
    "metrics.before-*.jsonl",
    "samples.jsonl",
    "samples.before-*.jsonl",
    "train_samples.jsonl",
    "train_samples.before-*.jsonl",
    "tokens/step_*",
    "tokens.before-*",
    "curves.png",
    "model",
    "tensorboard/events.out.tfevents.*",
    "checkpoints/step_*",
    "rollouts/step_*",
    "journal/step_*",
    "skipped/step_*",
    "status/*",
    "logs/server-*",
    "logs/hang-*",
    "logs/wandb.log",
    "logs/mlflow.log",
    "wandb/*",
    "mlflow/*",
)
"""``--overwrite`` removes these; all else stays, such as the files of ``tepo launch``."""


_FIRST_ROW = re.compile(rb'\{"step": 0[,}]')


def prepare_folder(config: RunConfig, *, overwrite: bool = False) -> None:
    """Checks that a run can start or resume in ``config.output``; with ``overwrite`` removes its run. Call it once per run.
    Raises ValueError.
    """
    folder = config.output
    if overwrite and config.train.resume:
        raise ValueError(f"--overwrite starts anew and train.resume = {config.train.resume} goes on; give one of the two")
    check_installed(config.log)
    _check_writable(folder)
    with unwritable_is_a_sentence(folder):
        check_free(folder)
    if overwrite and holds_run(folder):
        _remove_run(config)
    check_no_run(config)


def holds_run(folder: Path) -> bool:
    """Looks for a checkpoint or the row of a trained step; a failed start leaves neither."""
    return bool(checkpoints(folder / "checkpoints")) or _has_trained(folder / "metrics.jsonl")


def _has_trained(metrics: Path) -> bool:
    """Step 0 is the evaluation before the first; a damaged row counts as trained."""
    whole = metrics.read_bytes().split(b"\n")[:-1] if metrics.is_file() else []
    return any(line.strip() and not _FIRST_ROW.match(line) for line in whole)


def forget_start(folder: Path) -> None:
    """Removes the logs of a start without a trained step."""
    logged = ("metrics.jsonl", "samples.jsonl", "train_samples.jsonl", "tokens/step_*", "tensorboard/events.out.tfevents.*")
    for pattern in (*logged, "wandb/run.json", "mlflow/run.json"):
        for path in folder.glob(pattern):
            path.unlink()


def check_no_run(config: RunConfig) -> None:
    """Raises ValueError if the folder has a run that this one does not resume."""
    if not config.train.resume and holds_run(config.output):
        saved = checkpoints(config.output / "checkpoints")
        resume = "continue it (--resume)" if saved else "which --resume cannot continue, as it left no checkpoint"
        raise ValueError(
            f"output {config.output} already holds a run; give another folder (output=…), {resume}, or remove what it has "
            "written and start anew (--overwrite)"
        )


@contextmanager
def unwritable_is_a_sentence(folder: Path) -> Iterator[None]:
    """Turns an OSError into a ValueError that names folder and cause."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"output {folder} cannot be written: {error.strerror or error} ({error.filename or folder}); give another folder "
            "(output=…), or make room and rights there"
        ) from error


def _check_writable(folder: Path) -> None:
    with unwritable_is_a_sentence(folder):
        there = folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(bytes(4096))
                file.flush()
                os.fsync(file.fileno())
        finally:
            if not there:
                with suppress(OSError):  # another run may have come into it
                    folder.rmdir()


def _remove_run(config: RunConfig) -> None:
    folder = config.output
    _check_nothing_is_read_from(config)
    lock = RunLock(folder)
    with unwritable_is_a_sentence(folder):
        lock.take()
        try:
            for pattern in MADE_BY_A_RUN:
                for path in folder.glob(pattern):
                    if path.is_dir() and not path.is_symlink():
                        shutil.rmtree(path)
                    else:
                        path.unlink()
                if "/" in pattern:
                    with suppress(OSError):  # not empty: others' files lie there; or never made
                        (folder / pattern).parent.rmdir()
        finally:
            lock.release()


def _check_nothing_is_read_from(config: RunConfig) -> None:
    reads = {
        "rollout.replay": config.rollout.replay,
        "model.path": config.model.path,
        "model.shards": config.model.shards,
        **config.data.paths,
        **{f"evaluate.sets.{name}.path": path for name, path in config.evaluate.paths.items()},
    }
    for name, path in reads.items():
        if path is not None and Path(path).resolve().is_relative_to(config.output.resolve()):
            raise ValueError(f"--overwrite would remove what {name} = {path} reads; move it, or give another folder (output=…)")
