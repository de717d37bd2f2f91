"""Measures time and memory of log-prob and entropy over a sharded vocabulary, against alternatives."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tepo_megatron.tools.bench.settings import AREAL, FLOOR, MEGATRON, SLOPE, VERL, ScoreMeasurement
from tepo_megatron.tools.results import markdown, write_report

DEFAULTS = {
    "cpu": {"tp": 2, "tokens": "1024,4096", "vocab": "32000,128256", "dtype": "bf16,fp32"},
    "cuda": {"tp": 1, "tokens": "8192", "vocab": "16032,32064,64128,128256", "dtype": "bf16"},
}


def run(*, tp: int, device: str, shapes: Sequence[tuple[int, int, str]], repeats: int) -> list[ScoreMeasurement]:
    """Measure all methods on shapes (tokens, vocabulary, ``bf16`` or ``fp32``) with ``tp`` single-threaded processes.

    Raises ValueError for an impossible dtype or size, or without needed GPUs or Triton.
    """
    import torch
    import torch.multiprocessing as mp
    from torch.multiprocessing.spawn import start_processes

    from tepo_megatron.core.scores.backend import get_backend

    if device == "cuda" and torch.cuda.device_count() < tp:
        raise ValueError(f"--device cuda --tp {tp} needs {tp} GPUs, torch sees {torch.cuda.device_count()}; lower --tp")
    if device == "cuda":
        get_backend("triton", torch.device("cuda"))
    for _, size, dtype in shapes:
        if dtype not in ("bf16", "fp32"):
            raise ValueError(f"--dtype {dtype} is unknown; give bf16, fp32 or both")
        if size % tp:
            raise ValueError(f"--vocab {size} cannot be split into {tp} equal shards; give a multiple of --tp")
    from tepo_megatron.tools.bench.scores.score_ranks import HOST, worker
    from tepo_megatron.weights.transfer.transport import listen

    _, place = listen(HOST)
    inbox = mp.get_context("spawn").SimpleQueue()
    workers = start_processes(
        worker, args=(tp, place, device, list(shapes), repeats, inbox), nprocs=tp, join=False, start_method="spawn"
    )
    assert workers is not None
    while not workers.join():
        pass
    return [ScoreMeasurement(**row) for row in json.loads(inbox.get())]


COLUMNS = (
    *(
        "method",
        "forward ms",
        "backward ms",
        "total ms",
        "× Megatron",
        "× best peer",
        "× floor",
        "× without slope",
        "peak extra",
        "collectives",
    ),
    *("GB/s forward / backward", "of a copy's"),
)


def shape_name(row: ScoreMeasurement) -> str:
    return f"T {row.tokens}, V {row.vocab}, {row.dtype}"


def cells(row: ScoreMeasurement, peers: Sequence[ScoreMeasurement]) -> tuple[str, ...]:
    def times(*methods: str) -> str:
        reference = min((peer.total_ms for peer in peers if peer.method in methods), default=None)
        return "–" if reference is None else f"{row.total_ms / reference:.2f}"

    return (
        row.method,
        *(f"{ms:.1f}" if ms >= 10 else f"{ms:.3f}" for ms in (row.forward_ms, row.backward_ms, row.total_ms)),
        times(MEGATRON),
        times(AREAL, VERL),
        times(FLOOR),
        times(row.method.removesuffix(SLOPE)) if row.method.endswith(SLOPE) else "",
        f"{row.peak_extra:.3f}",
        f"{row.forward_collectives} + {row.backward_collectives}",
        " / ".join(f"{x:.0f}" if x >= 10 else f"{x:.1f}" for x in row.gbps),
        " / ".join(f"{x / row.copy_gbps:.0%}" for x in row.gbps),
    )


def write_results(results: Sequence[ScoreMeasurement], folder: Path, **arguments: Any) -> tuple[Path, Path]:
    """Write ``scores-<device>-tp<n>.json`` and ``.md``."""
    rows = []
    for row in results:
        peers = [peer for peer in results if shape_name(peer) == shape_name(row)]
        rows.append((shape_name(row) if row is peers[0] else "", *cells(row, peers)))
    record = {"arguments": arguments, "results": [asdict(row) for row in results]}
    note, packages = f"best of {arguments['repeats']}", ["torch", "megatron-core", "tepo-megatron"]
    if arguments["device"] == "cuda":
        import torch

        record["gpu"] = torch.cuda.get_device_name()
        note = f"{record['gpu']} · {note}"
        packages.append("triton")
    stem = f"scores-{arguments['device']}-tp{arguments['tp']}"
    table = markdown(("shape", *COLUMNS), rows)
    return write_report(folder, stem, record, table, note=note, packages=packages)
