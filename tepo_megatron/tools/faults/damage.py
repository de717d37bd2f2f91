"""Damage to the newest of three checkpoints: named, and the run goes on from the one before, to the same weights."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tepo_megatron.tools.faults import replayed_run, tiny
from tepo_megatron.tools.faults.outcome import FaultClass, Outcome
from tepo_megatron.tools.faults.replayed_run import SAVED, STEPS, Ended

Damage = Callable[[Path, random.Random], None]


def _shard(checkpoint: Path) -> Path:
    return sorted((checkpoint / "shards").glob("*.safetensors"))[0]


def _data_start(path: Path) -> int:
    """Where the header of a safetensors file ends."""
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def _flip_a_bit(checkpoint: Path, rng: random.Random) -> None:
    path = _shard(checkpoint)
    data = bytearray(path.read_bytes())
    data[rng.randrange(_data_start(path), len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def _zero_a_block(checkpoint: Path, rng: random.Random) -> None:
    path = _shard(checkpoint)
    data = bytearray(path.read_bytes())
    at = rng.randrange(_data_start(path), len(data) - 4096)
    data[at : at + 4096] = bytes(4096)
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
    at = rng.randrange(8, _data_start(path) - 16)
    data[at : at + 16] = rng.randbytes(16)
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

    def inject(self, number: int, rng: random.Random) -> Outcome:
        name, damage = list(DAMAGES.items())[number % len(DAMAGES)]
        base, folder = replayed_run.undisturbed(self.workshop.folder / "replayed"), self.folder / f"{number:02d}"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(base / "saved", folder)
        damage(folder / "out/checkpoints" / f"step_{SAVED:06d}", rng)
        start = time.monotonic()
        ended = replayed_run.train(folder, base / "rollouts", STEPS, resume=True)
        return self._judge(name, ended, folder / "out", base / "whole/out", time.monotonic() - start)

    def _judge(self, name: str, ended: Ended, out: Path, whole: Path, seconds: float) -> Outcome:
        if ended.has_traceback:
            return Outcome(name, "lost", f"a traceback: {ended.said}")
        if ended.code:
            return Outcome(name, "refused", ended.said)
        if wrong := tiny.differences(out, whole):
            return Outcome(name, "lost", f"resumed without a word: {wrong}")
        told = [line for line in ended.printed.splitlines() if "step_" in line]
        shutil.rmtree(out.parent, ignore_errors=True)
        return Outcome(name, "survived", told[0].strip()[:300] if told else "", seconds)
