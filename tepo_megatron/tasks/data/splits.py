"""Which files a data path stands for: one file, or the files of a split in a folder."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Format = Literal["json", "list", "csv", "parquet", "arrow"]
"""``json``: JSON lines; ``list``: one JSON list of objects; ``csv``: also with semicolons or tabs."""

_SHARD = re.compile(r"(?P<split>.+?)(-\d+-of-\d+)?")
_SUFFIXES: Mapping[str, Format] = {".parquet": "parquet", ".jsonl": "json", ".csv": "csv", ".tsv": "csv"}


@dataclass(frozen=True)
class DataFiles:
    """Files of one format. ``name`` is how messages name them together, ``stem`` begins the ids of problems without one."""

    format: Format
    files: tuple[Path, ...]
    name: str
    stem: str


def find_files(path: Path, split: str | None) -> DataFiles:
    """The files of a path: a file, a data set that ``datasets`` has saved (``save_to_disk``), or a folder of Parquet,
    JSON-lines or CSV files that are named by their split (``train.parquet``, ``data/train-00000-of-00002.parquet``), as on the
    Hub.

    Raises:
        ValueError: nothing that can be read is there, or no such split, or several and none is named.
    """
    if path.is_file():
        if split is not None:
            raise ValueError(f"the data file {path} is one file, and split = {split} is for a folder; leave it out")
        return DataFiles(_format_of(path), (path,), str(path), path.stem)
    if not path.is_dir():
        raise ValueError(f"the data file {path} does not exist")
    if (path / "dataset_dict.json").is_file():
        splits = _json(path / "dataset_dict.json").get("splits")
        if not isinstance(splits, list) or not splits:
            raise ValueError(f"{path / 'dataset_dict.json'} names no split; save the data set again")
        chosen = _choose(path, [str(each) for each in splits], split)
        return _saved(path / chosen)
    if (path / "state.json").is_file():
        if split is not None:
            raise ValueError(f"the data set {path} has no splits; leave split = {split} out")
        return _saved(path)
    return _named_by_split(path, split)


def splits_of(path: Path) -> list[str]:
    """The names of a folder's splits; empty for a file, and for a folder that has none.

    Raises:
        ValueError: as :func:`find_files`, where nothing that can be read is there.
    """
    if path.is_dir() and (path / "dataset_dict.json").is_file():
        return [str(each) for each in _json(path / "dataset_dict.json").get("splits") or []]
    if not path.is_dir() or (path / "state.json").is_file():
        find_files(path, None)
        return []
    return list(_files_by_split(path)[1])


def _saved(folder: Path) -> DataFiles:
    """What ``Dataset.save_to_disk`` wrote: ``state.json`` names Arrow files beside it."""
    state = _json(folder / "state.json")
    listed = state.get("_data_files")
    if not isinstance(listed, list) or not all(isinstance(each, dict) and "filename" in each for each in listed):
        raise ValueError(f"{folder / 'state.json'} names no data files; save the data set again")
    if state.get("_indices_data_files"):
        raise ValueError(f"the data set {folder} was saved with an index over its rows; save it again with flatten_indices()")
    files = tuple(folder / str(each["filename"]) for each in listed)
    missing = next((file for file in files if not file.is_file()), None)
    if missing is not None or not files:
        raise ValueError(f"the data set {folder} is not whole: {missing or 'a data file'} is missing; copy it again")
    return DataFiles("arrow", files, str(folder), folder.name)


def _named_by_split(folder: Path, split: str | None) -> DataFiles:
    form, by_split = _files_by_split(folder)
    chosen = _choose(folder, list(by_split), split)
    return DataFiles(form, tuple(by_split[chosen]), f"{folder} ({chosen})", chosen)


def _files_by_split(folder: Path) -> tuple[Format, dict[str, list[Path]]]:
    """The files of each split, all of one format: the first of which there are any."""
    for suffix, form in _SUFFIXES.items():
        by_split: dict[str, list[Path]] = {}
        for file in sorted([*folder.glob(f"*{suffix}"), *folder.glob(f"data/*{suffix}")]):
            matched = _SHARD.fullmatch(file.stem)
            assert matched is not None
            by_split.setdefault(matched["split"], []).append(file)
        if by_split:
            return form, by_split
    raise ValueError(
        f"the data path {folder} is a folder without a data set: neither dataset_dict.json nor state.json, as save_to_disk of "
        "datasets writes them, nor files such as train.parquet, train.jsonl or train.csv"
    )


def _choose(folder: Path, splits: list[str], split: str | None) -> str:
    if split is None and len(splits) == 1:
        return splits[0]
    if split is None:
        raise ValueError(
            f"the data set {folder} has the splits {', '.join(splits)}; say which one: data.train=[{{path: {folder}, split: "
            f"{splits[0]}}}]"
        )
    if split not in splits:
        raise ValueError(f"the data set {folder} has no split {split}; it has {', '.join(splits)}")
    return split


def _format_of(path: Path) -> Format:
    suffix = path.suffix.lower()
    with path.open("rb") as file:
        starts = file.read(64)
    if suffix == ".parquet" or starts.startswith(b"PAR1"):
        return "parquet"
    if suffix == ".json" and starts.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        return "list"
    by_suffix: dict[str, Format] = {".arrow": "arrow", ".csv": "csv", ".tsv": "csv"}
    return by_suffix.get(suffix, "json")


def _json(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} is no JSON object; save the data set again")
    return value
