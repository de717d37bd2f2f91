"""A full disk, when saving, logging, recording or exporting: old files are whole, and one sentence says what to do."""

from __future__ import annotations

import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tepo_megatron.tools.faults import replayed_run, tiny
from tepo_megatron.tools.faults.outcome import FaultClass, Outcome
from tepo_megatron.tools.faults.replayed_run import SAVED

FULL = Path("/dev/full")
PLACES = ("save", "record", "export", "log")
SIZES_KIB = {"save": 17_000, "export": 22_400}
"""A checkpoint of the tiny model takes 7.1 MiB, its export 2.3: room for two of three checkpoints, or for all and no export."""


@contextmanager
def small_disk(folder: Path, kib: int) -> Iterator[None]:
    """A file system of so many KiB at ``folder``; what is in it afterwards is kept. RuntimeError where it cannot be mounted."""
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"a small file system cannot be mounted here ({done.stderr.strip()}); run as root")
    kept = folder.with_name(folder.name + ".kept")
    try:
        yield
        shutil.copytree(folder, kept)
    finally:
        subprocess.run(["umount", str(folder)], check=True)
    folder.rmdir()
    kept.rename(folder)


class FullDisks(FaultClass):
    """Where a link to the kernel's ``/dev/full`` does not do, the disk is a file system that is too small."""

    name = "disks"
    title = "the disk is full: at save, log, record, export"
    whole, quick = len(PLACES), 1

    def inject(self, number: int, rng: random.Random) -> Outcome:
        place = PLACES[number % len(PLACES)]
        if place == "record":
            return self._record(rng)
        base, folder = replayed_run.undisturbed(self.workshop.folder / "replayed"), self.folder / f"{number:02d}"
        shutil.rmtree(folder, ignore_errors=True)
        start = time.monotonic()
        if place == "log":
            # TensorBoard's files; a link in place of metrics.jsonl would be taken for a run that is there
            with small_disk(folder / "out/tensorboard", 4):
                (folder / "out/tensorboard/filler").write_bytes(bytes(4096))
                ended = replayed_run.train(folder, base / "rollouts", SAVED, "log.tensorboard=true")
        else:
            with small_disk(folder / "out", SIZES_KIB[place]):
                ended = replayed_run.train(folder, base / "rollouts", SAVED)
        name = f"full at {place}"
        if ended.has_traceback:
            return Outcome(name, "lost", f"a traceback: {ended.said}")
        said = ended.said if ended.code else ""
        if ended.code:
            ended = replayed_run.train(folder, base / "rollouts", SAVED, resume=True)
            if ended.code:
                return Outcome(name, "lost", f"it ended ({said}) and with room again it could not be resumed: {ended.said}")
        if wrong := tiny.differences(folder / "out", base / "saved/out"):
            return Outcome(name, "lost", wrong)
        return Outcome(name, "survived", said and f"ended, and resumed with room: {said}", time.monotonic() - start)

    def _record(self, rng: random.Random) -> Outcome:
        """In a live run, at a step that is soon to come."""
        name = "full at record"
        run = self.workshop.live_run()
        step = tiny.last_step(run.out) + 2
        link = run.out / "journal" / f"step_{step:07d}.jsonl.partial"  # written first; the record is a link to it
        link.parent.mkdir(exist_ok=True)
        start = time.monotonic()
        link.symlink_to(FULL)
        try:
            goes_on = run.wait_for_row(step + 1)
        finally:
            link.unlink(missing_ok=True)
        said = "" if goes_on else run.said()
        if not goes_on:
            if "Traceback" in run.printed():
                self.workshop.drop_run()
                return Outcome(name, "lost", f"a traceback: {said}")
            run.start()
            if not run.wait_for_row(step + 1):
                return Outcome(name, "lost", f"it could not be resumed: {run.said()}")
        if wrong := tiny.differences(run.out, self.workshop.reference()):
            self.workshop.drop_run()
            return Outcome(name, "lost", wrong)
        return Outcome(name, "survived", said and f"ended, and resumed with room: {said}", time.monotonic() - start)
