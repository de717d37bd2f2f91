"""``tepo bench reshard``: weights from trainer ranks to server workers, shard to shard, beside what else there is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from tepo_megatron.bench.report import markdown, print_table, write_report


@dataclass(frozen=True)
class Measurement:
    """One way of moving the weights: the best of the repeats, each as long as its slowest rank."""

    method: str
    seconds: float
    wire_bytes: int
    """Received by all ranks together from other ranks."""
    largest_link: int
    """Received by the rank that receives most."""
    peak_source: int | None
    """The most that a trainer rank needed beyond its shards, in bytes; None where the system does not tell."""
    peak_destination: int | None
    digest_seconds: float
    """Processor time that the busiest rank spends on digests (the least of the repeats)."""


@dataclass(frozen=True)
class Setting:
    """Which split goes to which. The model is a Llama of ``layers`` layers, 1024 wide, with 32 000 tokens."""

    tp: int
    pp: int
    server_tp: int
    servers: int
    layers: int
    dtype: str

    @property
    def sources(self) -> int:
        return self.tp * self.pp

    @property
    def destinations(self) -> int:
        return self.server_tp * self.servers


def reshard(
    tp: Annotated[int, typer.Option("--tp", help="Tensor-parallel size of the trainer.")] = 2,
    pp: Annotated[int, typer.Option("--pp", help="Pipeline-parallel size of the trainer.")] = 2,
    server_tp: Annotated[int, typer.Option("--server-tp", help="Tensor-parallel size of each server.")] = 2,
    servers: Annotated[int, typer.Option("--servers", help="Servers, each with a whole model.")] = 2,
    layers: Annotated[int, typer.Option("--layers", help="12 make 206 M parameters.")] = 12,
    dtype: Annotated[str, typer.Option("--dtype", help="float32 or bfloat16.")] = "bfloat16",
    repeats: Annotated[int, typer.Option("--repeats", help="The best counts.")] = 5,
    output: Annotated[Path, typer.Option("--output", help="Folder for the results.")] = Path("benchmarks/results"),
) -> None:
    """Time, bytes and memory of a weight update between processes of this machine, over gloo; the servers are without vLLM.

    Beside the project's own way, with and without its digests: gathering full tensors and broadcasting them, and a raw
    point-to-point copy of as many bytes from and into plain buffers.

    [dim]tepo bench reshard --repeats 3[/]
    """
    setting = Setting(tp, pp, server_tp, servers, layers, dtype)
    results = run(setting, repeats)
    print_table(_COLUMNS, [_cells(row, results) for row in results])
    paths = write_results(results, output, setting, repeats)
    typer.echo(f"wrote {' and '.join(str(path) for path in paths)}")


def run(setting: Setting, repeats: int) -> list[Measurement]:
    """Measures all ways in turn, in processes of one thread each.

    Raises ValueError for a split that Megatron or vLLM could not make, RuntimeError if a way brings other weights than another.
    """
    import torch.multiprocessing as mp
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torch.multiprocessing.spawn import start_processes

    from tepo_megatron.bench.reshard_ranks import plan_of, worker

    if setting.dtype not in ("float32", "bfloat16"):
        raise ValueError(f"--dtype {setting.dtype} is unknown; give float32 or bfloat16")
    plan_of(setting)
    world = setting.sources + setting.destinations
    store = TCPStore("127.0.0.1", 0, world + 1, is_master=True, wait_for_workers=False)
    inbox = mp.get_context("spawn").SimpleQueue()
    processes = start_processes(
        worker, args=(setting, store.port, repeats, inbox), nprocs=world, join=False, start_method="spawn"
    )
    assert processes is not None
    while not processes.join():
        pass
    return [Measurement(**row) for row in json.loads(inbox.get())]


_COLUMNS = (
    *("method", "seconds", "× gather", "× raw", "MB on the wire", "MB into the busiest rank"),
    *("peak MB, trainer / server", "of it digests, s"),
)


def _cells(row: Measurement, rows: Sequence[Measurement]) -> tuple[str, ...]:
    by_name = {other.method: other.seconds for other in rows}
    peaks = ("–" if peak is None else f"{peak / 1e6:.0f}" for peak in (row.peak_source, row.peak_destination))
    return (
        row.method,
        f"{row.seconds:.3f}",
        f"{row.seconds / by_name['gather and broadcast']:.2f}",
        f"{row.seconds / by_name['raw point-to-point copy']:.2f}",
        f"{row.wire_bytes / 1e6:.1f}",
        f"{row.largest_link / 1e6:.1f}",
        " / ".join(peaks),
        f"{row.digest_seconds:.3f}" if row.digest_seconds else "–",
    )


def write_results(results: Sequence[Measurement], folder: Path, setting: Setting, repeats: int) -> tuple[Path, Path]:
    """``reshard-<split>.json`` and ``.md`` with date, machine and versions."""
    record = {"setting": asdict(setting), "repeats": repeats, "results": [asdict(row) for row in results]}
    stem = f"reshard-tp{setting.tp}pp{setting.pp}-to-{setting.servers}xtp{setting.server_tp}-{setting.dtype}"
    table = markdown(_COLUMNS, [_cells(row, results) for row in results])
    return write_report(folder, stem, record, table, note=f"best of {repeats}")
