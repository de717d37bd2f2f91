"""Data files and folders for tests, as users have them: JSON lines, Parquet, and what ``datasets`` saves to disk."""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Rows = Sequence[Mapping[str, Any]]


def write_jsonl(path: Path, rows: Rows) -> str:
    """One object a line; returns the path as text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_csv(path: Path, rows: Rows, delimiter: str = ",") -> str:
    """With a header; with semicolons as a spreadsheet saves it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8-sig" if delimiter == ";" else "utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def write_parquet(path: Path, rows: Rows, row_group: int | None = None) -> str:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=row_group)
    return str(path)


def save_to_disk(folder: Path, splits: Mapping[str, Rows] | Rows, shards: int = 1) -> str:
    """What ``Dataset.save_to_disk`` of ``datasets`` 4.0 writes, or that of a ``DatasetDict`` for several splits."""
    if isinstance(splits, Mapping):
        folder.mkdir(parents=True)
        (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))
        for name, rows in splits.items():
            save_to_disk(folder / name, rows, shards)
        return str(folder)
    import pyarrow as pa

    folder.mkdir(parents=True)
    names = [f"data-{at:05d}-of-{shards:05d}.arrow" for at in range(shards)]
    size = -(-len(splits) // shards)
    for at, name in enumerate(names):
        table = pa.Table.from_pylist(list(splits[at * size : (at + 1) * size]))
        with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
    state = {"_data_files": [{"filename": name} for name in names], "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}}))
    return str(folder)
