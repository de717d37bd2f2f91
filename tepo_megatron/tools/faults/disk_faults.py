"""A full disk when saving, logging, recording or exporting: old files stay whole, and the error says what to do."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tepo_megatron.tools.faults import replayed_run, tiny
from tepo_megatron.tools.faults.replayed_run import SAVED, STEPS, ReplayEnd
from tepo_megatron.tools.faults.workshop import FaultClass, FaultOutcome

FULL = Path("/dev/full")
PLACES = ("save", "record", "export", "log")
SIZES_KIB = {"save": 17_000, "export": 22_400}
"""A checkpoint of the tiny model takes 7.1 MiB, its export 2.3: room for two of three checkpoints, or for all but the export.
"""


@contextmanager
def _small_disk(folder: Path, kib: int) -> Iterator[None]:
    """Mount a file system at ``folder``; its content is kept afterwards. Raises RuntimeError if the mount fails."""
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"a small file system cannot be mounted here ({done.stderr.strip()}); run as root")
    retained = folder.with_name(folder.name + ".kept")
    try:
        yield
        shutil.copytree(folder, retained)
    finally:
        subprocess.run(["umount", str(folder)], check=True)
    folder.rmdir()
    retained.rename(folder)


class FullDisks(FaultClass):
    name = "disks"
    title = "the disk is full: at save, log, record, export"
    whole, quick = len(PLACES), 1

    def inject(self, number: int, rng: random.Random) -> FaultOutcome:
        place = PLACES[number % len(PLACES)]
        if place == "record":
            return self._record(rng)
        base, folder = replayed_run.undisturbed(self.workshop.folder / "replayed"), self.folder / f"{number:02d}"
        shutil.rmtree(folder, ignore_errors=True)
        start = time.monotonic()
        if place == "log":
            # TensorBoard's files; a link instead of metrics.jsonl would count as an existing run
            with _small_disk(folder / "out/tensorboard", 4):
                (folder / "out/tensorboard/filler").write_bytes(bytes(4096))
                ended = replayed_run.train(folder, base / "rollouts", SAVED, "log.tensorboard=true")
        else:
            with _small_disk(folder / "out", SIZES_KIB[place]):
                ended = replayed_run.train(folder, base / "rollouts", SAVED)
        name = f"full at {place}"
        if ended.has_traceback:
            return FaultOutcome(name, "lost", f"a traceback: {ended.said}")
        said = ended.said if ended.code else ""
        if ended.code:
            ended = replayed_run.train(folder, base / "rollouts", SAVED, resume=True)
            if ended.code:
                return FaultOutcome(
                    name, "lost", f"it ended ({said}) and with room again it could not be resumed: {ended.said}"
                )
        if wrong := tiny.differences(folder / "out", base / "saved/out"):
            return FaultOutcome(name, "lost", wrong)
        return FaultOutcome(name, "survived", said and f"ended, and resumed with room: {said}", time.monotonic() - start)

    def _record(self, rng: random.Random) -> FaultOutcome:
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
                return FaultOutcome(name, "lost", f"a traceback: {said}")
            run.start()
            if not run.wait_for_row(step + 1):
                return FaultOutcome(name, "lost", f"it could not be resumed: {run.said()}")
        if wrong := tiny.differences(run.out, self.workshop.reference()):
            self.workshop.drop_run()
            return FaultOutcome(name, "lost", wrong)
        return FaultOutcome(name, "survived", said and f"ended, and resumed with room: {said}", time.monotonic() - start)


Damage = Callable[[Path, random.Random], None]


def _shard(checkpoint: Path) -> Path:
    return sorted((checkpoint / "shards").glob("*.safetensors"))[0]


def _data_start(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def _flip_a_bit(checkpoint: Path, rng: random.Random) -> None:
    path = _shard(checkpoint)
    data = bytearray(path.read_bytes())
    data[rng.randrange(_data_start(path), len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def _zero_a_block(checkpoint: Path, rng: random.Random) -> None:
    path = _shard(checkpoint)
    data = bytearray(path.read_bytes())
    index = rng.randrange(_data_start(path), len(data) - 4096)
    data[index : index + 4096] = bytes(4096)
    path.write_bytes(data)


def _zero_all(checkpoint: Path, rng: random.Random) -> None:
    path = _shard(checkpoint)
    data, start = path.read_bytes(), _data_start(path)
    path.write_bytes(data[:start] + bytes(len(data) - start))


def _cut(checkpoint: Path, rng: random.Random) -> None:
    path = _shard(checkpoint)
    data = path.read_bytes()
    path.write_bytes(data[: rng.randrange(1, len(data))])


def _remove_a_shard(checkpoint: Path, rng: random.Random) -> None:
    _shard(checkpoint).unlink()


def _shard_of_another_step(checkpoint: Path, rng: random.Random) -> None:
    shutil.copyfile(_shard(checkpoint.with_name(f"step_{SAVED - 1:06d}")), _shard(checkpoint))


def _damage_a_header(checkpoint: Path, rng: random.Random) -> None:
    path = _shard(checkpoint)
    data = bytearray(path.read_bytes())
    index = rng.randrange(8, _data_start(path) - 16)
    data[index : index + 16] = rng.randbytes(16)
    path.write_bytes(data)


def _change_state(change: Callable[[dict[str, Any]], object]) -> Damage:
    def damage(checkpoint: Path, rng: random.Random) -> None:
        path = checkpoint / "state.json"
        state = json.loads(path.read_text())
        change(state)
        path.write_text(json.dumps(state, indent=2) + "\n")

    return damage


def _cut_state(checkpoint: Path, rng: random.Random) -> None:
    path = checkpoint / "state.json"
    text = path.read_text()
    path.write_text(text[: rng.randrange(1, len(text) - 2)])


def _remove_state(checkpoint: Path, rng: random.Random) -> None:
    (checkpoint / "state.json").unlink()


DAMAGES: dict[str, Damage] = {
    "one bit of a shard flipped": _flip_a_bit,
    "state.json names another step": _change_state(lambda state: state.update(step=SAVED - 1)),
    "a shard of the step before": _shard_of_another_step,
    "state.json cut off": _cut_state,
    "a block of a shard zeroed": _zero_a_block,
    "all data of a shard zeroed": _zero_all,
    "a shard cut off": _cut,
    "a shard missing": _remove_a_shard,
    "the header of a shard overwritten": _damage_a_header,
    "state.json counts other updates": _change_state(lambda state: state.update(updates=state["updates"] + 7)),
    "state.json lacks a key": _change_state(lambda state: state.pop("updates")),
    "state.json missing": _remove_state,
}


class CheckpointDamage(FaultClass):
    name = "damage"
    title = "damage to the newest checkpoint, then --resume"
    whole, quick = len(DAMAGES), 2

    def inject(self, number: int, rng: random.Random) -> FaultOutcome:
        name, damage = list(DAMAGES.items())[number % len(DAMAGES)]
        base, folder = replayed_run.undisturbed(self.workshop.folder / "replayed"), self.folder / f"{number:02d}"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(base / "saved", folder)
        damage(folder / "out/checkpoints" / f"step_{SAVED:06d}", rng)
        start = time.monotonic()
        ended = replayed_run.train(folder, base / "rollouts", STEPS, resume=True)
        return self._judge(name, ended, folder / "out", base / "whole/out", time.monotonic() - start)

    def _judge(self, name: str, ended: ReplayEnd, out: Path, whole: Path, seconds: float) -> FaultOutcome:
        if ended.has_traceback:
            return FaultOutcome(name, "lost", f"a traceback: {ended.said}")
        if ended.code:
            return FaultOutcome(name, "refused", ended.said)
        if wrong := tiny.differences(out, whole):
            return FaultOutcome(name, "lost", f"resumed without a word: {wrong}")
        told = [line for line in ended.printed.splitlines() if "step_" in line]
        shutil.rmtree(out.parent, ignore_errors=True)
        return FaultOutcome(name, "survived", told[0].strip()[:300] if told else "", seconds)
