"""The manifest of a checkpoint: which files it has, how long they are, and their digests. Standard library only.

    step_000100/manifest.json    {"step": 100, "files": {"state.json": {"bytes": …, "sha256": …}, "shards/…": …}, "sha256": …}

It is written last. It ties the files to the step and to each other: any file that was changed, cut short, lost, added or taken
from another checkpoint is found by it, and its own digest shows damage to itself. ``sha256sum`` gives the same digests.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MANIFEST, STATE = "manifest.json", "state.json"
FORMAT = 2
"""Of checkpoints with a manifest; ``state.json`` has it too. Those of format 1 have neither manifest nor this number."""

_BLOCK = 4 * 2**20
"""Bytes that are read at a time."""


_TENSORS, _BYTES = 64, 4096
"""How many tensors are sampled, and how much of each. In bfloat16 a small update changes one value of a hundred: of so many
values that are some, wherever the update was."""


class DamagedCheckpoint(ValueError):  # noqa: N818
    """A checkpoint that must not be used; the text is ``NAME is damaged (what is wrong)``."""

    def __init__(self, folder: Path, problems: Sequence[str]) -> None:
        self.folder = folder
        self.problems = tuple(problems)
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        super().__init__(f"{folder.name} is damaged ({'; '.join(problems[:3])}{more})")


@dataclass(frozen=True)
class FileRecord:
    """The length of a file in bytes, and its SHA-256 in hexadecimal."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of; ``files`` are paths below its folder."""

    folder: Path
    step: int
    files: Mapping[str, FileRecord]

    @property
    def bytes(self) -> int:
        """The size of the checkpoint, without the manifest."""
        return sum(record.bytes for record in self.files.values())

    def wrong_files(self) -> dict[str, str]:
        """Returns a sentence for each file that is missing, of another length, or a shard too many; reads none of them."""
        shards = {str(path.relative_to(self.folder)) for path in self.folder.glob("*/*.safetensors")}
        found = {name: f"{name} does not belong to it" for name in sorted(shards - self.files.keys())}
        for name, record in self.files.items():
            try:
                size = (self.folder / name).stat().st_size
            except OSError:
                found[name] = f"{name} is missing"
                continue
            if size != record.bytes:
                found[name] = f"{name} has {size:,} bytes instead of {record.bytes:,}"
        return found

    def wrong_contents(self, names: Iterable[str]) -> list[str]:
        """Says which of these files do not have the digest that they were written with; reads them."""
        return [problem for name in names if (problem := self._wrong_content(name))]

    def _wrong_content(self, name: str) -> str | None:
        path = self.folder / name
        try:
            same = digest_file(path) == self.files[name].sha256
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        if same:
            return None
        step = _step_within(path)
        return f"{name} is of step {step}" if step not in (None, self.step) else f"{name} was changed since it was written"

    def shares(self, parts: int) -> list[list[str]]:
        """Divides the files but ``state.json`` into parts of about equal length, to be read by as many processes."""
        shares: list[list[str]] = [[] for _ in range(parts)]
        lengths = [0] * parts
        for name in sorted(self.files.keys() - {STATE}, key=lambda name: (-self.files[name].bytes, name)):
            least = lengths.index(min(lengths))
            shares[least].append(name)
            lengths[least] += self.files[name].bytes
        return shares


def digest_file(path: Path) -> str:
    """Returns the SHA-256 of a file in hexadecimal: about 1 GB/s on one core."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def write_manifest(folder: Path, step: int, files: Mapping[str, FileRecord]) -> None:
    """Writes the manifest, durably. All other files must be there."""
    content = {"format": FORMAT, "step": step, "files": {name: asdict(files[name]) for name in sorted(files)}}
    write_durably(folder / MANIFEST, json.dumps({**content, "sha256": _own_digest(content)}, indent=2) + "\n")


def has_manifest(folder: Path) -> bool:
    return (folder / MANIFEST).exists()


def read_manifest(folder: Path) -> Manifest:
    """Reads and checks the manifest. Raises DamagedCheckpoint if it is missing, damaged, or of another step's folder."""
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        given = content.pop("sha256")
        if given != _own_digest(content):
            raise DamagedCheckpoint(folder, [f"{MANIFEST} was changed since it was written"])
        files = {name: FileRecord(**record) for name, record in content["files"].items()}
        manifest = Manifest(folder, content["step"], files)
    except FileNotFoundError:
        raise DamagedCheckpoint(folder, [f"{MANIFEST} is missing"]) from None
    except OSError as error:
        raise DamagedCheckpoint(folder, [f"{MANIFEST} cannot be read: {error.strerror}"]) from None
    except (UnicodeDecodeError, json.JSONDecodeError, AttributeError, KeyError, TypeError):
        raise DamagedCheckpoint(folder, [f"{MANIFEST} is not what was written"]) from None
    named = re.fullmatch(r"step_(\d+)", folder.name)
    if named and int(named[1]) != manifest.step:
        raise DamagedCheckpoint(folder, [f"its files are of step {manifest.step}"])
    return manifest


def check_whole(folder: Path) -> Manifest:
    """Reads every byte of a checkpoint in this process, several files at a time.

    Raises DamagedCheckpoint that names every damaged file.
    """
    manifest = read_manifest(folder)
    wrong = manifest.wrong_files()
    with ThreadPoolExecutor() as readers:  # digests are computed without Python's lock
        found = readers.map(lambda name: manifest.wrong_contents([name]), sorted(manifest.files.keys() - wrong.keys()))
    problems = [*wrong.values(), *(problem for problems in found for problem in problems)]
    if problems:
        raise DamagedCheckpoint(folder, problems)
    return manifest


def write_durably(path: Path, text: str) -> FileRecord:
    """Writes a file so that it outlives a power cut (its folder must be synced too); returns its record."""
    data = text.encode()
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(len(data), hashlib.sha256(data).hexdigest())


def _own_digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _step_within(path: Path) -> int | None:
    """The step that a file says it is of, in the header of safetensors or as JSON; None if it says none."""
    try:
        with path.open("rb") as file:
            if path.suffix == ".json":
                return int(json.load(file)["step"])
            length = int.from_bytes(file.read(8), "little")
            if length > path.stat().st_size:
                return None
            return int(json.loads(file.read(length))["__metadata__"]["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def sampled_digest(folder: Path) -> str | None:
    """Returns a digest of the safetensors of ``folder``: name, dtype and shape of every tensor, and 4 KiB in the middle of 64.

    A copy has the same, also where its tensors are divided otherwise into files; a trained model has another. Reads the headers
    and a quarter of a MiB. None: the folder has no safetensors. Raises ValueError that names a damaged file.
    """
    tensors = {name: (path, start, entry) for path in _files(folder) for name, start, entry in _header(path)}
    if not tensors:
        return None
    digest = hashlib.sha256()
    for name, (_, _, entry) in sorted(tensors.items()):
        digest.update(f"{name} {entry['dtype']} {entry['shape']}\n".encode())
    # By their names' digests, since every so manieth of a list could be the same of each layer.
    for name in sorted(tensors, key=lambda name: hashlib.sha256(name.encode()).digest())[:_TENSORS]:
        path, start, entry = tensors[name]
        begin, end = entry["data_offsets"]
        with path.open("rb") as file:
            file.seek(start + max(begin, (begin + end - _BYTES) // 2))
            digest.update(file.read(min(_BYTES, end - begin)))
    return digest.hexdigest()[:16]


def _files(folder: Path) -> list[Path]:
    """The files that the index names, or all where there is none."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    return [folder / name for name in sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))]


def _header(path: Path) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yields each tensor's name, where the data of the file begin, and the tensor's dtype, shape and offsets in the data."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is damaged or cut short ({error}); copy or download it again") from error
    for name, entry in header.items():
        if name != "__metadata__":
            yield name, 8 + length, entry
