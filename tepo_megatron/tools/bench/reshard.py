"""Compares the weight sync from shard to shard with alternatives."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tepo_megatron.tools.bench.settings import ReshardMeasurement, ReshardSetting
from tepo_megatron.tools.results import markdown, write_report


def run(setting: ReshardSetting, repeats: int) -> list[ReshardMeasurement]:
    """Measure all methods in turn, in single-threaded processes.

    Raises ValueError for a split that Megatron or vLLM cannot make, RuntimeError if two methods leave different weights.
    """
    import torch.multiprocessing as mp
    from torch.multiprocessing.spawn import start_processes

    from tepo_megatron.tools.bench.reshard_ranks import HOST, plan_of, worker
    from tepo_megatron.weights.transfer.transport import listen

    if setting.dtype not in ("float32", "bfloat16"):
        raise ValueError(f"--dtype {setting.dtype} is unknown; give float32 or bfloat16")
    plan_of(setting)
    world = setting.sources + setting.destinations
    _, place = listen(HOST)
    inbox = mp.get_context("spawn").SimpleQueue()
    processes = start_processes(worker, args=(setting, place, repeats, inbox), nprocs=world, join=False, start_method="spawn")
    assert processes is not None
    while not processes.join():
        pass
    return [ReshardMeasurement(**row) for row in json.loads(inbox.get())]


COLUMNS = (
    *("method", "seconds", "× gather", "× raw", "MB on the wire", "MB into the busiest rank"),
    *("peak MB, trainer / server", "of it digests, s"),
)


def cells(row: ReshardMeasurement, rows: Sequence[ReshardMeasurement]) -> tuple[str, ...]:
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


def write_results(
    results: Sequence[ReshardMeasurement], folder: Path, setting: ReshardSetting, repeats: int
) -> tuple[Path, Path]:
    """Write ``reshard-<split>.json`` and ``.md``."""
    record = {"setting": asdict(setting), "repeats": repeats, "results": [asdict(row) for row in results]}
    stem = f"reshard-tp{setting.tp}pp{setting.pp}-to-{setting.servers}xtp{setting.server_tp}-{setting.dtype}"
    table = markdown(COLUMNS, [cells(row, results) for row in results])
    return write_report(folder, stem, record, table, note=f"best of {repeats}")
