"""``tepo bench scores``: time and memory of log-prob and entropy over a sharded vocabulary, beside what else there is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from tepo_megatron.bench.report import markdown, print_table, write_report

_DEFAULTS = {
    "cpu": {"tp": 2, "tokens": "1024,4096", "vocab": "32000,128256", "dtype": "bf16,fp32"},
    "cuda": {"tp": 1, "tokens": "8192", "vocab": "16032,32064,64128,128256", "dtype": "bf16"},
}


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
    shard_bytes: int
    copy_gbps: float | None
    """10⁹ bytes a second that a large copy within the same GPU reads and writes, measured in the same run; None on a CPU."""

    @property
    def total_ms(self) -> float:
        return self.forward_ms + self.backward_ms

    @property
    def gbps(self) -> tuple[float, float]:
        """10⁹ bytes a second of those that must move: the shard is read once forward, read and written once backward."""
        return self.shard_bytes / self.forward_ms / 1e6, 2 * self.shard_bytes / self.backward_ms / 1e6


def scores(
    device: Annotated[str, typer.Option("--device", help="cpu (gloo) or cuda (NCCL, a GPU per rank).")] = "cpu",
    tp: Annotated[int | None, typer.Option("--tp", help="Ranks, each a process of this machine. Default: 2; cuda: 1.")] = None,
    tokens: Annotated[str, typer.Option("--tokens", help="T, with commas. Default: 1024,4096; cuda: 8192.")] = "",
    vocab: Annotated[
        str, typer.Option("--vocab", help="V, with commas. Default: 32000,128256; cuda: 16032,32064,64128,128256.")
    ] = "",
    dtype: Annotated[str, typer.Option("--dtype", help="bf16, fp32, with commas. Default: both; cuda: bf16.")] = "",
    repeats: Annotated[int, typer.Option("--repeats", help="The best counts.")] = 5,
    output: Annotated[Path, typer.Option("--output", help="Folder for the results.")] = Path("benchmarks/results"),
) -> None:
    """Time and peak memory of log-prob and entropy with backward, over logits that are sharded over the vocabulary.

    Beside the project's own: dense torch log_softmax, Megatron-Core's cross-entropy (log-prob only), and the floor of one read
    of the logits forward, one read and write backward. On a GPU with Triton's kernels, and with the bytes that must move over
    the bandwidth of a copy.

    [dim]tepo bench scores[/]

    [dim]tepo bench scores --device cuda[/]
    """
    if device not in _DEFAULTS:
        raise ValueError(f"--device {device} is unknown; give cpu or cuda")
    given = {"tp": tp, "tokens": tokens, "vocab": vocab, "dtype": dtype}
    grid: dict[str, Any] = {name: value or _DEFAULTS[device][name] for name, value in given.items()}
    sizes = [(int(t), int(v)) for v in grid["vocab"].split(",") for t in grid["tokens"].split(",")]
    results: list[Measurement] = []
    for shape in [(*size, name) for name in grid["dtype"].split(",") for size in sizes]:
        measured = run(tp=grid["tp"], device=device, shapes=[shape], repeats=repeats)
        print_table(_columns(device), [_cells(row, measured) for row in measured], title=_shape(measured[0]))
        results += measured
    paths = write_results(results, output, tp=grid["tp"], device=device, repeats=repeats)
    typer.echo(f"wrote {' and '.join(str(path) for path in paths)}")


def run(*, tp: int, device: str, shapes: Sequence[tuple[int, int, str]], repeats: int) -> list[Measurement]:
    """Measure all methods on shapes (tokens, vocabulary, ``bf16`` or ``fp32``) with ``tp`` processes of one thread each.

    Raises:
        ValueError: a dtype or a size is impossible, or GPUs or Triton are missing here.
    """
    import torch
    import torch.multiprocessing as mp
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torch.multiprocessing.spawn import start_processes

    from tepo_megatron.vocab_parallel.backend import get_backend

    if device == "cuda" and torch.cuda.device_count() < tp:
        raise ValueError(f"--device cuda --tp {tp} needs {tp} GPUs, torch sees {torch.cuda.device_count()}; lower --tp")
    if device == "cuda":
        get_backend("triton", torch.device("cuda"))
    for _, size, dtype in shapes:
        if dtype not in ("bf16", "fp32"):
            raise ValueError(f"--dtype {dtype} is unknown; give bf16, fp32 or both")
        if size % tp:
            raise ValueError(f"--vocab {size} cannot be split into {tp} equal shards; give a multiple of --tp")
    from tepo_megatron.bench.score_ranks import worker

    store = TCPStore("127.0.0.1", 0, tp + 1, is_master=True, wait_for_workers=False)
    inbox = mp.get_context("spawn").SimpleQueue()
    workers = start_processes(
        worker, args=(tp, store.port, device, list(shapes), repeats, inbox), nprocs=tp, join=False, start_method="spawn"
    )
    assert workers is not None
    while not workers.join():
        pass
    return [Measurement(**row) for row in json.loads(inbox.get())]


_COLUMNS = ("method", "forward ms", "backward ms", "total ms", "× Megatron", "peak extra", "collectives")
_GPU_COLUMNS = ("GB/s forward / backward", "of a copy's")


def _columns(device: str) -> tuple[str, ...]:
    return (*_COLUMNS, *_GPU_COLUMNS) if device == "cuda" else _COLUMNS


def _shape(row: Measurement) -> str:
    return f"T {row.tokens}, V {row.vocab}, {row.dtype}"


def _cells(row: Measurement, peers: Sequence[Measurement]) -> tuple[str, ...]:
    reference = next((peer.total_ms for peer in peers if peer.method.startswith("Megatron")), float("nan"))
    cells = (
        row.method,
        *(f"{ms:.1f}" if ms >= 10 else f"{ms:.3f}" for ms in (row.forward_ms, row.backward_ms, row.total_ms)),
        f"{row.total_ms / reference:.2f}",
        f"{row.peak_extra:.3f}",
        f"{row.forward_collectives} + {row.backward_collectives}",
    )
    if row.copy_gbps is None:
        return cells
    return (*cells, " / ".join(f"{x:.0f}" for x in row.gbps), " / ".join(f"{x / row.copy_gbps:.0%}" for x in row.gbps))


def write_results(results: Sequence[Measurement], folder: Path, **arguments: Any) -> tuple[Path, Path]:
    """``scores-<device>-tp<n>.json`` and ``.md`` with date, machine and versions."""
    rows = []
    for row in results:
        peers = [peer for peer in results if _shape(peer) == _shape(row)]
        rows.append((_shape(row) if row is peers[0] else "", *_cells(row, peers)))
    record = {"arguments": arguments, "results": [asdict(row) for row in results]}
    note, packages = f"best of {arguments['repeats']}", ["torch", "megatron-core", "tepo-megatron"]
    if arguments["device"] == "cuda":
        import torch

        record["gpu"] = torch.cuda.get_device_name()
        note = f"{record['gpu']} · {note}"
        packages.append("triton")
    stem = f"scores-{arguments['device']}-tp{arguments['tp']}"
    table = markdown(("shape", *_columns(arguments["device"])), rows)
    return write_report(folder, stem, record, table, note=note, packages=packages)
