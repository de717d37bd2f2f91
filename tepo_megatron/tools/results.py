"""What measurements share: processes, memory, and reports as JSON and Markdown."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any


def in_processes(worker: Callable[..., None], count: int, *arguments: Any) -> Any:
    """Runs ``worker(rank, *arguments, inbox)``; returns the JSON that rank 0 put into the inbox."""
    import torch.multiprocessing as mp
    from torch.multiprocessing.spawn import start_processes

    inbox = mp.get_context("spawn").SimpleQueue()
    processes = start_processes(worker, args=(*arguments, inbox), nprocs=count, join=False, start_method="spawn")
    assert processes is not None
    while not processes.join():
        pass
    return json.loads(inbox.get())


def resident_bytes(key: str = "VmRSS") -> int:
    """On Linux; ``VmHWM`` is the peak since :func:`reset_peak`."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def reset_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return resident_bytes()


def study_parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("docs/results/data"), help="folder for the results")
    return parser


def select_names(only: str, known: Sequence[str], what: str) -> list[str]:
    """Keeps the order of ``known``; empty: all. Raises ValueError for an unknown one."""
    names = [name.strip() for name in only.split(",") if name.strip()]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"--only {', '.join(unknown)}: no such {what}; known: {', '.join(known)}")
    return [name for name in known if not names or name in names]


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def write_report(
    folder: Path,
    stem: str,
    record: Mapping[str, Any],
    table: str,
    *,
    note: str,
    packages: Sequence[str] = ("torch", "tepo-megatron"),
) -> tuple[Path, Path]:
    """Writes ``<stem>.json`` and ``<stem>.md`` with date, machine and versions."""
    folder.mkdir(parents=True, exist_ok=True)
    head: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "versions": {name: version(name) for name in packages} | {"python": platform.python_version()},
    }
    paths = folder / f"{stem}.json", folder / f"{stem}.md"
    paths[0].write_text(json.dumps({**head, **record}, indent=1) + "\n")
    paths[1].write_text(" · ".join([head["date"], head["machine"], str(head["versions"]), note]) + "\n\n" + table)
    return paths


def describe_machine() -> str:
    cpu = platform.processor() or platform.machine()
    if (info := Path("/proc/cpuinfo")).is_file():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0] if names else cpu
    return f"{os.cpu_count()} × {cpu}, load average {os.getloadavg()[0]:.1f}"
