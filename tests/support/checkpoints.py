"""Small whole checkpoints without a model, and the ways in which disks and people damage them."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tepo_megatron.weights.storage.manifest import FORMAT, CheckpointManifest, FileRecord
from tepo_megatron.weights.storage.stored import write_boxes


def make_whole(parent: Path, step: int, *, ranks: int = 2, **state: Any) -> Path:
    """``parent/step_XXXXXX`` with a few boxes of each rank, drawn by the step."""
    folder = parent / f"step_{step:06d}"
    (folder / "shards").mkdir(parents=True)
    generator = torch.Generator().manual_seed(step)
    files: dict[str, FileRecord] = {}
    for rank in range(ranks):
        boxes = ((f"master|t{at}|{8 * rank},0", torch.randn(8, 16, generator=generator)) for at in range(4))
        written = write_boxes(folder, f"rank{rank:05d}", boxes, metadata={"step": str(step)}, file_bytes=1500)
        assert written.error is None
        files |= written.files
    content = {"format": FORMAT, "step": step, "updates": 4 * step, "model": "model", "weights_digest": "0" * 16, **state}
    record = FileRecord.write(folder / "state.json", json.dumps(content, indent=2) + "\n")
    CheckpointManifest.write(folder, step, {**files, "state.json": record})
    return folder


def shards(folder: Path) -> list[Path]:
    return sorted((folder / "shards").iterdir())


def flip_bit(path: Path, at: int) -> None:
    """Flips the bit number ``at`` of a file, counted modulo its length."""
    data = bytearray(path.read_bytes())
    at %= 8 * len(data)
    data[at // 8] ^= 1 << at % 8
    path.write_bytes(data)


def change_state(folder: Path, **changes: Any) -> None:
    """Values of ``None`` are taken out."""
    path = folder / "state.json"
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def _zero(path: Path, start: int, stop: int | None) -> None:
    data = bytearray(path.read_bytes())
    stop = len(data) if stop is None else stop
    data[start:stop] = bytes(len(data[start:stop]))
    path.write_bytes(data)


def _swap(one: Path, other: Path) -> None:
    ours, theirs = one.read_bytes(), other.read_bytes()
    one.write_bytes(theirs)
    other.write_bytes(ours)


def _take_from(folder: Path, other: Path, name: str) -> None:
    shutil.copy(other / name, folder / name)


def _become(folder: Path, other: Path | None) -> None:
    """The folder becomes a copy of the other, or empty."""
    shutil.rmtree(folder)
    if other is None:
        folder.mkdir()
    else:
        shutil.copytree(other, folder)


Damage = Callable[[Path, Path], object]
"""What happens to a checkpoint; the second folder is a whole one of another step, of which files may be taken."""

DAMAGES: dict[str, tuple[Damage, str]] = {
    "a bit of a shard": (lambda c, o: flip_bit(shards(c)[1], 7777), "shards/rank00000-00002.safetensors was changed"),
    "a zeroed block": (lambda c, o: _zero(shards(c)[0], 800, 1100), "shards/rank00000-00001.safetensors was changed"),
    "all zeros": (lambda c, o: _zero(shards(c)[0], 0, None), "shards/rank00000-00001.safetensors was changed"),
    "a shard of another step": (lambda c, o: _take_from(c, o, "shards/rank00001-00001.safetensors"), "is of step"),
    "two shards exchanged": (lambda c, o: _swap(shards(c)[0], shards(c)[1]), "shards/rank00000-00001.safetensors"),
    "a truncated shard": (lambda c, o: os.truncate(shards(c)[0], shards(c)[0].stat().st_size - 100), "bytes instead of"),
    "an empty shard": (lambda c, o: shards(c)[0].write_bytes(b""), "has 0 bytes instead of"),
    "a missing shard": (lambda c, o: shards(c)[-1].unlink(), "is missing"),
    "a shard too many": (
        lambda c, o: shutil.copy(shards(o)[0], c / "shards" / "rank00009-00001.safetensors"),
        "shards/rank00009-00001.safetensors does not belong to it",
    ),
    "no shards at all": (lambda c, o: shutil.rmtree(c / "shards"), "is missing"),
    "garbage for state": (lambda c, o: (c / "state.json").write_text("{" * 40), "state.json"),
    "no state": (lambda c, o: (c / "state.json").unlink(), "state.json is missing"),
    "keys missing of the state": (lambda c, o: change_state(c, updates=None), "state.json"),
    "the state of another step": (lambda c, o: _take_from(c, o, "state.json"), "state.json"),
    "another step in the state": (lambda c, o: change_state(c, step=1), "state.json"),
    "negative updates": (lambda c, o: change_state(c, updates=-4), "state.json"),
    "garbage for manifest": (lambda c, o: (c / "manifest.json").write_bytes(bytes(range(256))), "manifest.json"),
    "no manifest": (lambda c, o: (c / "manifest.json").unlink(), "manifest.json is missing"),
    "a manifest of another step": (lambda c, o: _take_from(c, o, "manifest.json"), "its files are of step"),
    "another checkpoint under its name": (_become, "its files are of step"),
    "an empty folder": (lambda c, o: _become(c, None), "it has neither manifest.json nor state.json"),
}
"""Kind of damage → what does it, and words of the sentence that names it."""

ONLY_BY_READING = ("a bit of a shard", "a zeroed block", "all zeros", "a shard of another step", "two shards exchanged")
"""Kinds that leave every file there in its length: the digests find them."""
