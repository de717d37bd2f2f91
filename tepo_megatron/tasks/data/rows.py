"""Reads JSON, CSV, Parquet and folders of Hugging Face ``datasets``. Binary columns are left out."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class DataRow:
    """``name`` is the default id. If the file has JSON ``text``, numbers in ``written`` are text."""

    place: str
    name: str
    written: Mapping[str, Any]
    text: str | None = None

    def values(self) -> Mapping[str, Any]:
        return self.written if self.text is None else json.loads(self.text)


def read_rows(path: Path, split: str | None = None) -> Iterator[DataRow]:
    """Raises ValueError, with file and line."""
    files_found = _find_files(path, split)
    of_text = {"json": _json_rows, "list": _list_rows, "csv": _csv_rows}
    if files_found.format in of_text:
        for file in files_found.files:
            yield from of_text[files_found.format](file)
    else:
        yield from _arrow_rows(files_found)


def columns_of(path: Path, split: str | None = None) -> tuple[str, ...] | None:
    """None for JSON, since rows may differ."""
    files_found = _find_files(path, split)
    if files_found.format in ("json", "list"):
        return None
    if files_found.format == "csv":
        with _csv_lines(files_found.files[0]) as (columns, _):
            return tuple(columns)
    with _readable(files_found.files[0], files_found.format):
        return tuple(_open(files_found.files[0], files_found.format)[0])


def first_columns(path: Path, split: str | None = None) -> list[str]:
    """For JSON it reads the first row."""
    named = columns_of(path, split)
    if named is None:
        named = tuple(next((row.written for row in read_rows(path, split)), ()))
    return list(named)


def _json_rows(path: Path) -> Iterator[DataRow]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                place = f"{path}:{number}"
                text, written = _parse(line, place)
                yield DataRow(place, f"{path.stem}:{number}", written, text)


def _list_rows(path: Path) -> Iterator[DataRow]:
    text, written = _decode(path.read_bytes(), str(path), "")
    for number, (entry, value) in enumerate(zip(written, json.loads(text), strict=True), start=1):
        place = f"{path}, row {number}"
        if not isinstance(entry, dict):
            raise ValueError(f'{place}: not a JSON object; write {{"prompt": ..., "answer": ...}}')
        yield DataRow(place, f"{path.stem}:{number}", entry, json.dumps(value))


def _csv_rows(path: Path) -> Iterator[DataRow]:
    with _csv_lines(path) as (columns, lines):
        for line, cells in lines:
            if len(cells) != len(columns):
                raise ValueError(
                    f"{path}:{line}: {len(cells)} columns, and the first line names {len(columns)} ({', '.join(columns)}); put "
                    "text with a comma, a semicolon or a line break in it between double quotes"
                )
            yield DataRow(f"{path}:{line}", f"{path.stem}:{line}", dict(zip(columns, cells, strict=True)))


@contextmanager
def _csv_lines(path: Path) -> Iterator[tuple[list[str], Iterator[tuple[int, list[str]]]]]:
    """The delimiter is the most frequent of comma, semicolon and tab in the header."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            header = file.readline()
            file.seek(0)
            reader = csv.reader(file, delimiter=max(",;\t", key=header.count), strict=True)
            columns = next(reader, [])
            if not all(columns) or len(set(columns)) < len(columns):
                named = ", ".join(map(repr, columns))
                raise ValueError(f"{path}:1: the first line of a CSV file names each column once; this one has {named}")
            yield columns, _numbered(reader)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8 text (byte {error.start + 1}); save the file as UTF-8") from error
        except csv.Error as error:
            raise ValueError(f"{path}:{reader.line_num}: not CSV: {error}; JSON lines or Parquet take any text") from error


def _numbered(reader: Any) -> Iterator[tuple[int, list[str]]]:
    line = reader.line_num + 1
    for cells in reader:
        if cells:  # not a blank line
            yield line, cells
        line = reader.line_num + 1


def _parse(line: bytes, place: str) -> tuple[str, Mapping[str, Any]]:
    text, entry = _decode(line, place, " of the line")
    if not isinstance(entry, dict):
        raise ValueError(f'{place}: not a JSON object; write {{"prompt": ..., "answer": ...}}')
    return text, entry


def _decode(data: bytes, place: str, of: str) -> tuple[str, Any]:
    """Numbers stay text, because "1.50" must not become "1.5"."""
    try:
        # Editors on Windows write a byte-order mark.
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{place}: not UTF-8 text (byte {error.start + 1}{of}); save the file as UTF-8") from error
    try:
        return text, json.loads(text, parse_int=str, parse_float=str, parse_constant=str)
    except json.JSONDecodeError as error:
        where = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"{place}: not JSON: {error.msg} at {where}") from error
    except RecursionError as error:
        raise ValueError(f"{place}: nested too deeply to be read") from error


def _arrow_rows(data: _DataFiles) -> Iterator[DataRow]:
    number = 0
    for file in data.files:
        with _readable(file, data.format):
            columns, batches = _open(file, data.format)
            for batch in batches:
                try:
                    entries = batch.select(columns).to_pylist()
                except UnicodeDecodeError as error:
                    rows = f"rows {number + 1} to {number + batch.num_rows}"
                    raise ValueError(f"{data.name}, one of the {rows}: text that is not UTF-8; save it as UTF-8") from error
                for entry in entries:
                    number += 1
                    values = {name: _plain(value) for name, value in entry.items()}
                    yield DataRow(f"{data.name}, row {number}", f"{data.stem}:{number}", values)


def _open(path: Path, form: str) -> tuple[list[str], Iterable[Any]]:
    pyarrow = _pyarrow()
    if form == "parquet":
        import pyarrow.parquet as parquet

        opened = parquet.ParquetFile(path)
        schema, batches = opened.schema_arrow, opened.iter_batches()
    else:
        stream = pyarrow.ipc.open_stream(path.open("rb"))
        schema, batches = stream.schema, stream
    binary = (pyarrow.types.is_binary, pyarrow.types.is_large_binary, pyarrow.types.is_fixed_size_binary)
    return [field.name for field in schema if not any(is_raw(field.type) for is_raw in binary)], batches


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError as error:
        raise ValueError("Parquet and Arrow files are read by pyarrow, which is not installed; pip install pyarrow") from error
    return pyarrow


@contextmanager
def _readable(path: Path, form: str) -> Iterator[None]:
    pyarrow = _pyarrow()
    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path} cannot be read as {form.capitalize()}: {why}") from error


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


Format = Literal["json", "list", "csv", "parquet", "arrow"]

_SHARD = re.compile(r"(?P<split>.+?)(-\d+-of-\d+)?")
_SUFFIXES: Mapping[str, Format] = {".parquet": "parquet", ".jsonl": "json", ".csv": "csv", ".tsv": "csv"}


@dataclass(frozen=True)
class _DataFiles:
    """``stem`` begins the default ids."""

    format: Format
    files: tuple[Path, ...]
    name: str
    stem: str


def _find_files(path: Path, split: str | None) -> _DataFiles:
    """Takes a file, a folder of ``save_to_disk``, or files named by their split (``data/train-00000-of-00002.parquet``)."""
    if path.is_file():
        if split is not None:
            raise ValueError(f"the data file {path} is one file, and split = {split} is for a folder; leave it out")
        return _DataFiles(_format_of(path), (path,), str(path), path.stem)
    if not path.is_dir():
        raise ValueError(f"the data file {path} does not exist")
    if (path / "dataset_dict.json").is_file():
        splits = _json(path / "dataset_dict.json").get("splits")
        if not isinstance(splits, list) or not splits:
            raise ValueError(f"{path / 'dataset_dict.json'} names no split; save the data set again")
        chosen = _choose(path, [str(name) for name in splits], split)
        return _saved(path / chosen)
    if (path / "state.json").is_file():
        if split is not None:
            raise ValueError(f"the data set {path} has no splits; leave split = {split} out")
        return _saved(path)
    return _named_by_split(path, split)


def splits_of(path: Path) -> list[str]:
    if path.is_dir() and (path / "dataset_dict.json").is_file():
        return [str(name) for name in _json(path / "dataset_dict.json").get("splits") or []]
    if not path.is_dir() or (path / "state.json").is_file():
        _find_files(path, None)
        return []
    return list(_files_by_split(path)[1])


def _saved(folder: Path) -> _DataFiles:
    state = _json(folder / "state.json")
    listed = state.get("_data_files")
    if not isinstance(listed, list) or not all(isinstance(item, dict) and "filename" in item for item in listed):
        raise ValueError(f"{folder / 'state.json'} names no data files; save the data set again")
    if state.get("_indices_data_files"):
        raise ValueError(f"the data set {folder} was saved with an index over its rows; save it again with flatten_indices()")
    files = tuple(folder / str(item["filename"]) for item in listed)
    missing = next((file for file in files if not file.is_file()), None)
    if missing is not None or not files:
        raise ValueError(f"the data set {folder} is not whole: {missing or 'a data file'} is missing; copy it again")
    return _DataFiles("arrow", files, str(folder), folder.name)


def _named_by_split(folder: Path, split: str | None) -> _DataFiles:
    form, by_split = _files_by_split(folder)
    chosen = _choose(folder, list(by_split), split)
    return _DataFiles(form, tuple(by_split[chosen]), f"{folder} ({chosen})", chosen)


def _files_by_split(folder: Path) -> tuple[Format, dict[str, list[Path]]]:
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


def file_digest(path: Path) -> str:
    """SHA-256 in hexadecimal."""
    digest = sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()
