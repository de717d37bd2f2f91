"""Manifest of a checkpoint, and sampled digests of models. Imports no torch.

    step_000100/manifest.json    {"step": 100, "files": {"state.json": {"bytes": …, "sha256": …}, "shards/…": …}, "sha256": …}

It is written last, and reveals every changed, missing or additional file.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tepo_megatron.runtime.files import is_file_name, with_retries, write_atomically
from tepo_megatron.runtime.text import parse_json, read_json

MANIFEST, STATE = "manifest.json", "state.json"
FORMAT = 2  # format 1 has no manifest

_SAMPLED_TENSORS, _SAMPLED_BYTES = 64, 4096


class DamagedCheckpoint(ValueError):  # noqa: N818
    def __init__(self, folder: Path, problems: Sequence[str]) -> None:
        self.folder = folder
        self.problems = tuple(problems)
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        super().__init__(f"{folder.name} is damaged ({'; '.join(problems[:3])}{more})")


@dataclass(frozen=True)
class FileRecord:
    bytes: int
    sha256: str

    @property
    def is_whole(self) -> bool:
        return type(self.bytes) is int and isinstance(self.sha256, str)

    @classmethod
    def write(cls, path: Path, text: str) -> FileRecord:
        data = text.encode()
        write_atomically(path, data, sync=True)
        return cls(len(data), hashlib.sha256(data).hexdigest())


@dataclass(frozen=True)
class CheckpointManifest:
    folder: Path
    step: int
    files: Mapping[str, FileRecord]

    @staticmethod
    def write(folder: Path, step: int, files: Mapping[str, FileRecord]) -> None:
        """All other files must exist."""
        content = {"format": FORMAT, "step": step, "files": {name: asdict(files[name]) for name in sorted(files)}}
        FileRecord.write(folder / MANIFEST, json.dumps({**content, "sha256": _content_digest(content)}, indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> CheckpointManifest:
        """Raises DamagedCheckpoint."""
        try:
            content = parse_json(with_retries((folder / MANIFEST).read_bytes), MANIFEST, dict)
            digest = content.pop("sha256")
            if digest != _content_digest(content):
                raise DamagedCheckpoint(folder, [f"{MANIFEST} was changed since it was written"])
            files = {name: FileRecord(**record) for name, record in content["files"].items()}
            manifest = cls(folder, content["step"], files)
            if type(manifest.step) is not int or STATE not in files or not all(record.is_whole for record in files.values()):
                raise TypeError("values of another kind")
        except DamagedCheckpoint:
            raise
        except FileNotFoundError:
            raise DamagedCheckpoint(folder, [f"{MANIFEST} is missing"]) from None
        except OSError as error:
            raise DamagedCheckpoint(folder, [f"{MANIFEST} cannot be read: {error.strerror}"]) from None
        except (ValueError, AttributeError, KeyError, TypeError):
            raise DamagedCheckpoint(folder, [f"{MANIFEST} is not what was written"]) from None
        folder_step = re.fullmatch(r"step_(\d+)", folder.name)
        if folder_step and int(folder_step[1]) != manifest.step:
            raise DamagedCheckpoint(folder, [f"its files are of step {manifest.step}"])
        return manifest

    @classmethod
    def read_whole(cls, folder: Path) -> CheckpointManifest:
        """Reads every byte. Raises DamagedCheckpoint."""
        manifest = cls.read(folder)
        wrong = manifest.wrong_files()
        with ThreadPoolExecutor() as readers:  # digests are computed without Python's lock
            contents = readers.map(manifest.wrong_content, sorted(manifest.files.keys() - wrong.keys()))
        problems = [*wrong.values(), *filter(None, contents)]
        if problems:
            raise DamagedCheckpoint(folder, problems)
        return manifest

    @property
    def bytes(self) -> int:
        """Excludes the manifest."""
        return sum(record.bytes for record in self.files.values())

    def wrong_files(self) -> dict[str, str]:
        """Returns a sentence for each missing, additional or resized file."""
        shards = {str(path.relative_to(self.folder)) for path in self.folder.glob("*/*.safetensors")}
        problems = {name: f"{name} does not belong to it" for name in sorted(shards - self.files.keys())}
        for name, record in self.files.items():
            try:
                size = with_retries((self.folder / name).stat).st_size
            except (FileNotFoundError, NotADirectoryError, ValueError):  # no name of a file either
                problems[name] = f"{name} is missing"
                continue
            except OSError as error:
                problems[name] = f"{name} cannot be read: {error.strerror}"
                continue
            if size != record.bytes:
                problems[name] = f"{name} has {size:,} bytes instead of {record.bytes:,}"
        return problems

    def wrong_content(self, name: str) -> str | None:
        path = self.folder / name
        try:
            if with_retries(partial(_digest, path)) == self.files[name].sha256:
                return None
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        step = _step_within(path)
        return f"{name} is of step {step}" if step not in (None, self.step) else f"{name} was changed since it was written"

    def shares(self, parts: int) -> list[list[str]]:
        """Divides the files except ``state.json`` by length."""
        shares: list[list[str]] = [[] for _ in range(parts)]
        lengths = [0] * parts
        for name in sorted(self.files.keys() - {STATE}, key=lambda name: (-self.files[name].bytes, name)):
            least = lengths.index(min(lengths))
            shares[least].append(name)
            lengths[least] += self.files[name].bytes
        return shares


def _content_digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _step_within(path: Path) -> int | None:
    try:
        content = parse_json(path.read_bytes(), path) if path.suffix == ".json" else _read_header(path)[0]["__metadata__"]
        return int(content["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def sampled_digest(folder: Path) -> str | None:
    """Covers every tensor's name, dtype and shape, and 4 KiB of 64, whatever files they are in; None without safetensors."""
    tensors: dict[str, tuple[Path, int, dict[str, Any]]] = {}
    for path in (folder / name for name in model_files(folder)):
        header, start = _read_header(path)
        tensors |= {name: (path, start, entry) for name, entry in header.items() if name != "__metadata__"}
    if not tensors:
        return None
    digest = hashlib.sha256()
    for name, (_, _, entry) in sorted(tensors.items()):
        digest.update(f"{name} {entry['dtype']} {entry['shape']}\n".encode())
    # Chosen by digests of names, since every n-th of a list could be the same tensor of each layer.
    for name in sorted(tensors, key=lambda name: hashlib.sha256(name.encode()).digest())[:_SAMPLED_TENSORS]:
        path, start, entry = tensors[name]
        begin, end = entry["data_offsets"]
        with path.open("rb") as file:
            file.seek(start + max(begin, (begin + end - _SAMPLED_BYTES) // 2))
            digest.update(file.read(min(_SAMPLED_BYTES, end - begin)))
    return digest.hexdigest()[:16]


def model_files(folder: Path) -> dict[str, set[str] | None]:
    """Returns each file's tensors, or None for all without an index. Raises ValueError for a damaged index."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return dict.fromkeys(sorted(path.name for path in folder.glob("*.safetensors")))
    content = read_json(index.read_bytes(), str(index))
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not all(map(is_file_name, names.values())):
        raise ValueError(f"{index} names no files beside it as weight_map; export or download the model again")
    return {file: {name for name in names if names[name] == file} for file in sorted(set(names.values()))}


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Also returns where data start. Raises ValueError for a damaged file."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > path.stat().st_size:
                raise ValueError("it has no header")
            header = read_json(file.read(length), "its header")
            for name, entry in header.items():
                if name != "__metadata__":
                    begin, end = entry["data_offsets"]
                    if {type(begin), type(end)} != {int} or not 0 <= begin <= end or {"dtype", "shape"} - entry.keys():
                        raise ValueError(f"its header names {name!r} without a place")
            return header, 8 + length
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged (its header: {error!r}); copy or download it again") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is damaged or cut short ({error}); copy or download it again") from error
