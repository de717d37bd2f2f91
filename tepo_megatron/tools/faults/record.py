"""The outcomes on disk: a JSON line each, appended at once, so that a rerun with the same seed goes on where one ended."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tepo_megatron.tools.faults.outcome import Outcome


class Record:
    """``<folder>/outcomes.jsonl``. Raises ValueError where the folder holds the outcomes of another seed or another count."""

    def __init__(self, folder: Path, *, seed: int, quick: bool) -> None:
        self.path = folder / "outcomes.jsonl"
        self._head = {"seed": seed, "quick": quick}
        self._done: dict[tuple[str, int], dict[str, Any]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            self._read()
            self._end_line()
        else:
            self._append(self._head)

    def _read(self) -> None:
        lines = [line for line in self.path.read_text(encoding="utf-8").split("\n") if line]
        whole = [line for line in lines if line.endswith("}")]  # the last may have been cut off
        if not whole or json.loads(whole[0]) != self._head:
            raise ValueError(
                f"{self.path} holds the outcomes of {whole[0] if whole else 'nothing'}, and {json.dumps(self._head)} was asked "
                "for; give another --output, or remove the folder"
            )
        for line in whole[1:]:
            entry = json.loads(line)
            self._done[entry["class"], entry["number"]] = entry

    def _end_line(self) -> None:
        """What was cut off stays a line of its own, which is passed over."""
        if not self.path.read_bytes().endswith(b"\n"):
            with self.path.open("ab") as file:
                file.write(b"\n")

    def has(self, name: str, number: int) -> bool:
        return (name, number) in self._done

    def add(self, name: str, number: int, outcome: Outcome) -> None:
        entry = {"class": name, "number": number, **asdict(outcome)}
        self._append(entry)
        self._done[name, number] = entry

    def outcomes(self, name: str) -> Iterator[dict[str, Any]]:
        """The entries of a class, by number."""
        for (kind, _), entry in sorted(self._done.items()):
            if kind == name:
                yield entry

    def _append(self, entry: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, default=str) + "\n")
            file.flush()
            os.fsync(file.fileno())
