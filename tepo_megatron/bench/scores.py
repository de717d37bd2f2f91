"""``tepo bench scores``: time and memory of log-prob and entropy over a sharded vocabulary, beside what else there is."""

from __future__ import annotations

import datetime
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from tepo_megatron.bench.machine import describe_machine


@dataclass(frozen=True)
class Measurement:
    """One method on one shape; times are the best of the repeats, each the slowest rank's."""

    tokens: int
    vocab: int
    dtype: str
    method: str
    forward_ms: float
    backward_ms: float
    peak_extra: float
    """Peak memory beyond the logits, forward and backward, as a multiple of one logits shard."""
    forward_collectives: int
    backward_collectives: int

    @property
    def total_ms(self) -> float:
        return self.forward_ms + self.backward_ms


def scores(
    tp: Annotated[int, typer.Option("--tp", help="Tensor-parallel ranks, each a process of this machine.")] = 2,
    device: Annotated[str, typer.Option("--device", help="cpu (gloo) or cuda (NCCL, a GPU per rank).")] = "cpu",
    tokens: Annotated[str, typer.Option("--tokens", help="T, separated by commas.")] = "1024,4096",
    vocab: Annotated[str, typer.Option("--vocab", help="V, separated by commas.")] = "32000,128256",
    dtype: Annotated[str, typer.Option("--dtype", help="bf16, fp32, separated by commas.")] = "bf16,fp32",
    repeats: Annotated[int, typer.Option("--repeats", help="The best counts.")] = 5,
    output: Annotated[Path, typer.Option("--output", help="Folder for the results.")] = Path("benchmarks/results"),
) -> None:
    """Time and peak memory of log-prob and entropy with backward, over logits that are sharded over the vocabulary.

    Beside the project's own: dense torch log_softmax, Megatron-Core's cross-entropy (log-prob only), and the floor of one read
    of the logits forward, one read and write backward.

    [dim]tepo bench scores --tp 2[/]

    [dim]tepo bench scores --tp 2 --device cuda --dtype bf16[/]
    """
    shapes = [(int(t), int(v), d) for d in dtype.split(",") for v in vocab.split(",") for t in tokens.split(",")]
    results: list[Measurement] = []
    for shape in shapes:
        measured = run(tp=tp, device=device, shapes=[shape], repeats=repeats)
        print_table(measured)
        results += measured
    paths = write_results(results, output, tp=tp, device=device, repeats=repeats)
    typer.echo(f"wrote {' and '.join(str(path) for path in paths)}")


def run(*, tp: int, device: str, shapes: Sequence[tuple[int, int, str]], repeats: int) -> list[Measurement]:
    """Measure all methods on shapes (tokens, vocabulary, ``bf16`` or ``fp32``) with ``tp`` processes of one thread each.

    Raises:
        ValueError: the device, a dtype or a size is impossible here.
    """
    import torch
    import torch.multiprocessing as mp
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torch.multiprocessing.spawn import start_processes

    if device not in ("cpu", "cuda"):
        raise ValueError(f"--device {device} is unknown; give cpu or cuda")
    if device == "cuda" and torch.cuda.device_count() < tp:
        raise ValueError(f"--device cuda --tp {tp} needs {tp} GPUs, torch sees {torch.cuda.device_count()}; lower --tp")
    for _, size, dtype in shapes:
        if dtype not in ("bf16", "fp32"):
            raise ValueError(f"--dtype {dtype} is unknown; give bf16, fp32 or both")
        if size % tp:
            raise ValueError(f"--vocab {size} cannot be split into {tp} equal shards; give a multiple of --tp")
    from tepo_megatron.bench.score_methods import worker

    store = TCPStore("127.0.0.1", 0, tp + 1, is_master=True, wait_for_workers=False)
    inbox = mp.get_context("spawn").SimpleQueue()
    workers = start_processes(
        worker, args=(tp, store.port, device, list(shapes), repeats, inbox), nprocs=tp, join=False, start_method="spawn"
    )
    assert workers is not None
    while not workers.join():
        pass
    return [Measurement(**row) for row in json.loads(inbox.get())]


def print_table(results: Sequence[Measurement]) -> None:
    """The measurements of one shape, for a terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    first = results[0]
    table = Table(
        box=SIMPLE_HEAD, pad_edge=False, title=f"T {first.tokens}, V {first.vocab}, {first.dtype}", title_justify="left"
    )
    for number, name in enumerate(_COLUMNS):
        table.add_column(name, justify="right" if number else "left")
    for row in results:
        table.add_row(*_cells(row, results))
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else 120).print(table)


_COLUMNS = ("method", "forward ms", "backward ms", "total ms", "× Megatron", "peak extra", "collectives")


def _cells(row: Measurement, peers: Sequence[Measurement]) -> tuple[str, ...]:
    reference = next((peer.total_ms for peer in peers if peer.method.startswith("Megatron")), float("nan"))
    return (
        row.method,
        f"{row.forward_ms:.1f}",
        f"{row.backward_ms:.1f}",
        f"{row.total_ms:.1f}",
        f"{row.total_ms / reference:.2f}",
        f"{row.peak_extra:.3f}",
        f"{row.forward_collectives} + {row.backward_collectives}",
    )


def markdown(results: Sequence[Measurement]) -> str:
    """All measurements as one Markdown table."""
    lines = ["| shape | " + " | ".join(_COLUMNS) + " |", "|" + "---|" * (len(_COLUMNS) + 1)]
    for row in results:
        peers = [peer for peer in results if (peer.tokens, peer.vocab, peer.dtype) == (row.tokens, row.vocab, row.dtype)]
        shape = f"T {row.tokens}, V {row.vocab}, {row.dtype}" if row is peers[0] else ""
        lines.append(f"| {shape} | " + " | ".join(_cells(row, peers)) + " |")
    return "\n".join(lines) + "\n"


def write_results(results: Sequence[Measurement], folder: Path, **arguments: Any) -> tuple[Path, Path]:
    """``scores-<device>-tp<n>.json`` and ``.md`` with date, machine and versions."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": _machine(str(arguments["device"])),
        "versions": {name: version(name) for name in ("torch", "megatron-core", "tepo-megatron")}
        | {"python": platform.python_version()},
        "arguments": arguments,
        "results": [asdict(row) for row in results],
    }
    stem = folder / f"scores-{arguments['device']}-tp{arguments['tp']}"
    paths = stem.with_suffix(".json"), stem.with_suffix(".md")
    paths[0].write_text(json.dumps(record, indent=1) + "\n")
    head = f"{record['date']} · {record['machine']} · {record['versions']}\n\n"
    paths[1].write_text(head + markdown(results))
    return paths


def _machine(device: str) -> str:
    machine = describe_machine()
    if device == "cuda":
        import torch

        machine += f", {torch.cuda.get_device_name()}"
    return machine
