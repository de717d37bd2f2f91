"""Reads JSON, CSV, Parquet and Hugging Face ``datasets``, without binary columns."""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

from tepo_megatron.runtime.files import is_file_name
from tepo_megatron.runtime.text import parse_json

_Format = Literal["json", "list", "csv", "parquet", "arrow"]
_SHARD = re.compile(r"(?P<split>.+?)(-(?P<number>\d+)-of-(?P<of>\d+)(-[0-9a-f]{16})?)?")
_SUFFIXES: Mapping[str, _Format] = {".parquet": "parquet", ".jsonl": "json", ".csv": "csv", ".tsv": "csv"}
_NO_OBJECT = 'not a JSON object; write {"prompt": ..., "answer": ...}'


@dataclass(frozen=True)
class DataRow:
    """``name`` is the default id. If the file has JSON ``text``, numbers in ``written`` are text."""

    place: str
    name: str
    written: Mapping[str, Any]
    text: str | None = None
    file: str = ""  # of several text files, which number their rows apart

    def values(self) -> Mapping[str, Any]:
        return self.written if self.text is None else json.loads(self.text)


@dataclass(frozen=True)
class DataFiles:
    """``stem`` begins the default ids."""

    format: _Format
    paths: tuple[Path, ...]
    name: str
    stem: str

    @classmethod
    def find(cls, path: Path, split: str | None = None) -> DataFiles:
        """Takes a file, a folder of ``save_to_disk``, or one of ``data/SPLIT-00000-of-00002.parquet``. Raises ValueError."""
        splits = cls.splits(path)
        if split is None and len(splits) > 1:
            raise ValueError(
                f"the data set {path} has the splits {', '.join(splits)}; say which one: data.train=[{{path: {path}, split: "
                f"{splits[0]}}}]"
            )
        if split is not None and split not in splits:
            raise ValueError(f"the data set {path} has no split {split}; it has {', '.join(splits) or 'none: leave it out'}")
        chosen = split or "".join(splits)
        if path.is_file():
            return cls(_format_of(path), (path,), str(path), path.stem)
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            return _saved(path / chosen)
        form, by_split = _files_by_split(path)
        shards = [match for file in by_split[chosen] if (match := _SHARD.fullmatch(file.stem))]
        numbers, counts = {match["number"] for match in shards}, {int(match["of"] or 1) for match in shards}
        if counts != {len(shards)} or len(numbers) != len(shards):
            raise ValueError(
                f"the data set {path} is not whole, or has files of two: {len(shards)} of {chosen}, the last is "
                f"{by_split[chosen][-1].name}; download it again, or name a file"
            )
        return cls(form, tuple(by_split[chosen]), f"{path} ({chosen})", chosen)

    @staticmethod
    def splits(path: Path) -> list[str]:
        """Empty if the data are not split. Raises ValueError without data."""
        if (path / "dataset_dict.json").is_file():
            splits = _json(path / "dataset_dict.json").get("splits")
            if not isinstance(splits, list) or not splits or not all(map(is_file_name, splits)):
                raise ValueError(f"{path / 'dataset_dict.json'} names no split; save the data set again")
            return splits
        return [] if path.is_file() or (path / "state.json").is_file() else list(_files_by_split(path)[1])

    def rows(self) -> Iterator[DataRow]:
        """Raises ValueError, with file and line."""
        if self.format in ("parquet", "arrow"):
            yield from self._arrow_rows()
            return
        read = {"json": _json_rows, "list": _list_rows, "csv": _csv_rows}[self.format]
        for path in self.paths:
            rows = read(path)
            yield from rows if len(self.paths) == 1 else (replace(row, file=path.stem) for row in rows)

    def _arrow_rows(self) -> Iterator[DataRow]:
        import pyarrow.ipc
        import pyarrow.parquet

        binary = (pyarrow.types.is_binary, pyarrow.types.is_large_binary, pyarrow.types.is_fixed_size_binary)
        number = 0
        for path in self.paths:
            try:
                opened: Any = pyarrow.parquet.ParquetFile(path) if self.format == "parquet" else None
                batches = pyarrow.ipc.open_stream(path.open("rb")) if opened is None else opened.iter_batches()
                schema = batches.schema if opened is None else opened.schema_arrow
                columns = [field.name for field in schema if not any(is_raw(field.type) for is_raw in binary)]
                for batch in batches:
                    for entry in batch.select(columns).to_pylist():
                        number += 1
                        yield DataRow(f"{self.name}, row {number}", f"{self.stem}:{number}", _plain(entry))
            except UnicodeDecodeError as error:
                raise ValueError(f"{self.name}, after row {number}: text that is not UTF-8; save it as UTF-8") from error
            except (pyarrow.ArrowException, OSError) as error:
                why = str(error).splitlines()[0] if str(error) else type(error).__name__
                raise ValueError(f"{path} cannot be read as {self.format.capitalize()}: {why}") from error


def file_digest(path: Path) -> str:
    """SHA-256 in hexadecimal."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error


def _json_rows(path: Path) -> Iterator[DataRow]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                place = f"{path}:{number}"
                text, written = _decode(line, place, " of the line")
                if not isinstance(written, dict):
                    raise ValueError(f"{place}: {_NO_OBJECT}")
                yield DataRow(place, f"{path.stem}:{number}", written, text)


def _list_rows(path: Path) -> Iterator[DataRow]:
    text, written = _decode(path.read_bytes(), str(path), "")
    for number, (entry, value) in enumerate(zip(written, json.loads(text), strict=True), start=1):
        place = f"{path}, row {number}"
        if not isinstance(entry, dict):
            raise ValueError(f"{place}: {_NO_OBJECT}")
        yield DataRow(place, f"{path.stem}:{number}", entry, json.dumps(value))


def _csv_rows(path: Path) -> Iterator[DataRow]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            header = file.readline()
            file.seek(0)
            reader = csv.reader(file, delimiter=max(",;\t", key=header.count), strict=True)
            columns = next(reader, [])
            if not all(columns) or len(set(columns)) < len(columns):
                named = ", ".join(map(repr, columns))
                raise ValueError(f"{path}:1: the first line of a CSV file names each column once; this one has {named}")
            line = reader.line_num + 1
            for cells in reader:
                if len(cells) not in (0, len(columns)):
                    raise ValueError(
                        f"{path}:{line}: {len(cells)} columns, and the first line names {len(columns)} ({', '.join(columns)}); "
                        "put text with a comma, a semicolon or a line break in it between double quotes"
                    )
                if cells:  # not a blank line
                    yield DataRow(f"{path}:{line}", f"{path.stem}:{line}", dict(zip(columns, cells, strict=True)))
                line = reader.line_num + 1
        except UnicodeDecodeError:
            _text(path.read_bytes(), str(path), "")  # which counts from the beginning of the file
            raise
        except csv.Error as error:
            raise ValueError(f"{path}:{reader.line_num}: not CSV: {error}; JSON lines or Parquet take any text") from error


def _text(data: bytes, place: str, of: str) -> str:
    try:
        return data.decode().removeprefix("\ufeff")  # editors on Windows write a byte-order mark
    except UnicodeDecodeError as error:
        raise ValueError(f"{place}: not UTF-8 text (byte {error.start + 1}{of}); save the file as UTF-8") from error


def _decode(data: bytes, place: str, of: str) -> tuple[str, Any]:
    """Numbers stay text, because "1.50" must not become "1.5"."""
    text = _text(data, place, of)
    try:
        return text, json.loads(text, parse_int=str, parse_float=str)
    except json.JSONDecodeError as error:
        where = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"{place}: not JSON: {error.msg} at {where}") from error
    except RecursionError as error:
        raise ValueError(f"{place}: nested too deeply to be read") from error


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, Decimal | timedelta):
        return str(value)
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _saved(folder: Path) -> DataFiles:
    state = _json(folder / "state.json")
    listed = state.get("_data_files")
    if not isinstance(listed, list) or not all(
        isinstance(item, dict) and is_file_name(item.get("filename")) for item in listed
    ):
        raise ValueError(f"{folder / 'state.json'} names no data files; save the data set again")
    if state.get("_indices_data_files"):
        raise ValueError(f"the data set {folder} was saved with an index over its rows; save it again with flatten_indices()")
    paths = tuple(folder / item["filename"] for item in listed)
    missing = next((path for path in paths if not path.is_file()), None)
    if missing is not None or not paths:
        raise ValueError(f"the data set {folder} is not whole: {missing or 'a data file'} is missing; copy it again")
    return DataFiles("arrow", paths, str(folder), folder.name)


def _files_by_split(folder: Path) -> tuple[_Format, dict[str, list[Path]]]:
    for suffix, form in _SUFFIXES.items():
        by_split: dict[str, list[Path]] = {}
        for path in sorted([*folder.glob(f"*{suffix}"), *folder.glob(f"data/*{suffix}")]):
            matched = _SHARD.fullmatch(path.stem)
            assert matched is not None
            by_split.setdefault(matched["split"], []).append(path)
        if by_split:
            return form, by_split
    if inner := sorted({path.parent.name for suffix in _SUFFIXES for path in folder.glob(f"*/*{suffix}")}):
        raise ValueError(
            f"the data path {folder} has its files in the folders {', '.join(inner)}; add one to the path: …/{inner[0]}"
        )
    raise ValueError(
        f"the data path {folder} is a folder without a data set: neither dataset_dict.json nor state.json, as save_to_disk of "
        "datasets writes them, nor files such as train.parquet, train.jsonl or train.csv"
    )


def _format_of(path: Path) -> _Format:
    suffix = path.suffix.lower()
    with path.open("rb") as file:
        starts = file.read(64)
    if starts.startswith(b"PAR1"):
        return "parquet"
    if suffix == ".json" and starts.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        return "list"
    return "arrow" if suffix == ".arrow" else _SUFFIXES.get(suffix, "json")


def _json(path: Path) -> Mapping[str, Any]:
    try:
        return parse_json(path.read_bytes(), "it", dict)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}; save the data set again") from error
