"""Reads boxes of weights from any of three kinds of folder.

a Hugging Face folder      model-00001-of-00002.safetensors: whole tensors under their names
a folder of `tepo import`  shards/rank00003-00001.safetensors: "weight|model.norm.weight|0" → the box that starts there
a checkpoint               the same with "master|…", beside the optimizer's moments "exp_avg|…" and "exp_avg_sq|…"
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tepo_megatron.weights.geometry import Box

SHARDS = "shards"
"""Name of the subfolder with the files that hold boxes."""

WEIGHT, MASTER = "weight", "master"
"""Kinds of a stored box: a weight as it was imported, and the fp32 weight that the optimizer updates."""

_FURTHER = "eh_proj.weight"
"""What only a layer has that predicts a further token (DeepSeek-V3's multi-token prediction)."""

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
"""The floating-point types of weights, as safetensors names them."""


@dataclass(frozen=True)
class StoredBox:
    """The file and the key under which ``box`` of a tensor is stored; ``dtype`` as safetensors names it ("F32", "BF16")."""

    file: Path
    key: str
    box: Box
    dtype: str


def box_key(kind: str, tensor: str, box: Box) -> str:
    """Returns the key under which a file holds ``box``. It gives the start only: the extent is the shape of what is stored."""
    return f"{kind}|{tensor}|{','.join(map(str, box.start))}"


@dataclass(frozen=True)
class StoredWeights:
    """The boxes of each tensor that a folder holds; each box once, though several ranks may have written it."""

    folder: Path
    boxes: Mapping[str, list[StoredBox]]

    def check(self, shapes: Mapping[str, tuple[int, ...]], described_by: str = "its config.json") -> None:
        """Raises ValueError that names every missing, unexpected, misshapen and incomplete tensor at once."""
        # Old exports keep RoPE's constants as buffers, and a tied head as a copy; both are derived, not weights of their own.
        # Layers that predict further tokens (MTP) are no part of the model that is trained.
        further = tuple(name.removesuffix(_FURTHER) for name in self.boxes if name.endswith(f".{_FURTHER}"))
        derived = {
            name
            for name in self.boxes
            if name.endswith("rotary_emb.inv_freq") or name == "lm_head.weight" or name.startswith(further)
        }
        found = [f"missing: {name}" for name in shapes if name not in self.boxes]
        found += [f"unexpected: {name}" for name in self.boxes if name not in shapes and name not in derived]
        for name, shape in shapes.items():
            if name in self.boxes:
                found += _problems(name, tuple(shape), self.boxes[name])
        if found and any(".lora_A." in name for name in self.boxes):
            raise ValueError(
                f"{self.folder} holds LoRA adapters alone; resume the run at its last step, which exports the merged model to "
                "OUT/model and the adapters to OUT/adapter"
            )
        if found:
            raise ValueError(f"{self.folder} does not hold the model that {described_by} describes:\n  " + "\n  ".join(found))

    def read(self, tensor: str, box: Box, into: Tensor) -> None:
        """Copies ``box`` of a tensor into ``into`` (of its shape, any dtype), reading no other bytes.

        Raises ValueError if not all of the box is stored, or a file is damaged.
        """
        # The stored boxes of a tensor are parts of one layout and do not overlap, so that counting elements shows a gap.
        filled = 0
        for stored in self.boxes.get(tensor, ()):
            common = box.intersection(stored.box)
            if common is None:
                continue
            with open_safetensors(stored.file) as handle:
                part = handle.get_slice(stored.key)[common.relative_to(stored.box.start).slices]
                into[common.relative_to(box.start).slices].copy_(part)
            filled += part.numel()
        if filled < into.numel():
            raise ValueError(f"{self.folder} holds {filled} of {into.numel()} elements that are needed of {tensor}")


def _problems(name: str, shape: tuple[int, ...], stored: list[StoredBox]) -> Iterator[str]:
    """Yields a sentence if the stored boxes do not make up a tensor of this shape."""
    boxes = [stored_box.box for stored_box in stored]
    is_whole = any(stored_box.key == name for stored_box in stored)
    fits = all(len(box.stop) == len(shape) and all(a <= b for a, b in zip(box.stop, shape, strict=True)) for box in boxes)
    held = sum(math.prod(box.shape) for box in boxes)
    if not fits or (is_whole and boxes[0].shape != shape):
        yield f"misshapen: {name} is {max(box.stop for box in boxes)}, config.json makes it {shape}"
    elif held != math.prod(shape):
        yield f"incomplete: {name}, of which {held} of {math.prod(shape)} elements are there"


def open_weights(folder: Path) -> StoredWeights:
    """Reads the headers of a folder's files. Raises ValueError if it is none of the three kinds, or a file is damaged."""
    if not (folder / SHARDS).is_dir():
        return _open_hugging_face(folder)
    if (folder / "state.json").is_file():
        return open_boxes(folder, MASTER)
    if (folder / "config.json").is_file():
        return open_boxes(folder, WEIGHT)
    raise ValueError(f"{folder} is a checkpoint that was not finished; give another one")


def open_boxes(folder: Path, kind: str) -> StoredWeights:
    """Opens what ``folder/shards`` holds of one kind ("weight", "master", "exp_avg", "exp_avg_sq")."""
    boxes: dict[str, dict[Box, StoredBox]] = {}
    for path in sorted((folder / SHARDS).glob("*.safetensors")):
        with open_safetensors(path) as handle:
            for key in handle.keys():  # noqa: SIM118 (safe_open has keys() but is no mapping)
                fields = key.split("|")
                if len(fields) != 3:
                    raise ValueError(f"{path} holds {key!r}, which is no box of a tensor; it was not written by this package")
                if fields[0] == kind:
                    start = tuple(map(int, fields[2].split(",")))
                    stored = _stored(handle, path, key, start)
                    boxes.setdefault(fields[1], {}).setdefault(stored.box, stored)
    return StoredWeights(folder, {tensor: list(held.values()) for tensor, held in boxes.items()})


def _open_hugging_face(folder: Path) -> StoredWeights:
    boxes: dict[str, list[StoredBox]] = {}
    for name, members in _files(folder).items():
        path = folder / name
        with open_safetensors(path) as handle:
            present = set(handle.keys())
            # A tensor that the index names but the file lacks is left out here, and so found missing.
            for tensor in sorted(present if members is None else present & members):
                boxes[tensor] = [_stored(handle, path, tensor, (0,) * len(handle.get_slice(tensor).get_shape()))]
    return StoredWeights(folder, boxes)


def _files(folder: Path) -> dict[str, set[str] | None]:
    """Returns file name → the tensors that the index says it holds, or None (all in the file) without an index."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        found = sorted(path.name for path in folder.glob("*.safetensors"))
        if not found:
            raise ValueError(
                f"{folder} has no *.safetensors; give a Hugging Face folder with its weights, one of 'tepo import', or a "
                "checkpoint (step_XXXXXX)"
            )
        return dict.fromkeys(found)
    try:
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
        names = set(weight_map.values())
        return {name: {tensor for tensor, file in weight_map.items() if file == name} for name in sorted(names)}
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is damaged ({error}); export or download the model again") from None


def _stored(handle: safe_open, path: Path, key: str, start: tuple[int, ...]) -> StoredBox:
    entry = handle.get_slice(key)
    stop = tuple(a + extent for a, extent in zip(start, entry.get_shape(), strict=True))
    return StoredBox(path, key, Box(start, stop), entry.get_dtype())


@contextmanager
def open_safetensors(path: Path) -> Iterator[safe_open]:
    """Opens a file as ``safe_open`` does, with ValueErrors that name the file and say what to do."""
    try:
        with safe_open(path, framework="pt") as handle:
            yield handle
    except FileNotFoundError:
        raise ValueError(f"{path} is named by the index but is not there; the model folder is incomplete") from None
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or cut short ({error}); copy or download it again") from None
