"""A run's activity or end, read from its folder on any machine."""

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tepo_megatron.config.base import read_yaml
from tepo_megatron.run.display.figures import duration, evaluation_line, fault_lines, figures_line, set_lines
from tepo_megatron.run.metrics import read_metrics
from tepo_megatron.runtime.heartbeat import RankRecord
from tepo_megatron.runtime.preemption import CONTINUE
from tepo_megatron.runtime.proc import STOPPED, Process

_SILENT_S = 60.0  # silence after which a rank on another machine may be gone
_GONE, _SILENT = ": GONE", ": SILENT"


def run_status(
    output: Path, *, now: float | None = None, rows: Sequence[Mapping[str, Any]] | None = None
) -> tuple[list[str], bool]:
    """Returns lines, and whether the run continues. ``rows``: its metrics, where they are read already. Raises ValueError if
    the folder holds no run.
    """
    return _status(output, *_read(output, rows), time.time() if now is None else now)


def _status(
    output: Path, config: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], records: Sequence[RankRecord], now: float
) -> tuple[list[str], bool]:
    root = next((record for record in records if record.rank == 0), None)
    is_running = root is not None and not root.ended and not _trouble(root, now).startswith((_GONE, _SILENT))
    lines = [f"{config['name']}: {_head(root, rows, config, now, is_running)}"]
    if is_running and root is not None:
        lines += _roles(root, records, now)
    lines += _figures(rows)
    lines += [f"  fault    {line}" for line in fault_lines(rows)]
    lines += [f"  report   {path}" for path in _reports(output)]
    return lines, is_running


def status_record(output: Path) -> dict[str, Any]:
    config, rows, records = _read(output)
    lines, is_running = _status(output, config, rows, records, time.time())
    evaluated = [row for row in rows if evaluation_line(row) or set_lines(row)]
    return {
        "name": config["name"],
        "runs": is_running,
        "said": lines[0],
        "step": rows[-1]["step"] if rows else 0,
        "steps": config["train"]["steps"],
        "ranks": [asdict(record) for record in records],
        "last_row": rows[-1] if rows else None,
        "last_evaluation": evaluated[-1] if evaluated else None,
        "faults": fault_lines(rows),
        "reports": [str(path) for path in _reports(output)],
    }


def _read(
    output: Path, rows: Sequence[Mapping[str, Any]] | None = None
) -> tuple[dict[str, Any], Sequence[Mapping[str, Any]], list[RankRecord]]:
    resolved, metrics = output / "resolved.yaml", output / "metrics.jsonl"
    if not resolved.is_file():
        raise ValueError(f"{output} holds no run: it has no resolved.yaml; give the output folder of tepo train")
    records = sorted(RankRecord.read_all(output / "status"), key=lambda record: record.rank)
    config = read_yaml(resolved)
    match config:
        case {"name": str(), "output": str(), "train": {"steps": int()}}:
            if rows is None:
                rows = read_metrics(metrics) if metrics.is_file() else []
            return config, rows, records
    raise ValueError(f"{resolved} lacks name, output or train.steps of a run, or is damaged; restore it")


def _reports(output: Path) -> list[Path]:
    return sorted((output / "logs").glob("hang-*.txt"))


def _head(
    root: RankRecord | None, rows: Sequence[Mapping[str, Any]], config: Mapping[str, Any], now: float, is_running: bool
) -> str:
    steps = config["train"]["steps"]
    done = rows[-1]["step"] if rows else 0
    count = f"step {done} of {steps}"
    if root is None:
        return f"ended at {count}, or of a version that says no more; nothing in {config['output']}/status"
    if root.ended == "interrupted" and not done:
        return f"interrupted before the first step, {_ago(now - root.time)}"
    if root.ended:
        return f"ended at {count} {_ago(now - root.time)}: {root.ended}"
    if not is_running:
        doing = f"in phase {root.phase}, {_ago(now - root.time)}"
        return f"ended at {count} without a last word (killed?), {doing}; {CONTINUE}"
    seconds = [row["time/step"] for row in rows if row["step"] and row.get("time/step") is not None][-10:]
    left = f", about {duration(sum(seconds) / len(seconds) * (steps - done))} left" if seconds else ""
    return f"runs, {count} done{left}"


def _roles(root: RankRecord, records: Sequence[RankRecord], now: float) -> list[str]:
    done = f", {root.done} of {root.total} done" if root.total else ""
    lines = [f"  phase    {root.phase} for {duration(now - root.since)}{done}"]
    for record in records:
        waits = f", waits for {record.waits_for}" if record.waits_for else ""
        lines.append(
            f"  rank {record.rank:<4}{record.phase}{waits}; last move {_ago(now - record.moved_at)}"
            f" on {record.host}, process {record.pid}{_trouble(record, now)}"
        )
    servers = root.facts.get("servers", [])
    lines += [f"  server   {server}" for server in servers]
    if workers := root.facts.get("reward_workers"):
        lines.append(f"  rewards  {workers} workers, {'at work' if root.phase == 'reward' else 'waiting for responses'}")
    return lines


def _figures(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    trained = [row for row in rows if figures_line(row)]
    evaluated = [row for row in rows if evaluation_line(row)]
    lines = [f"  step {trained[-1]['step']:<4}{figures_line(trained[-1])}"] if trained else []
    if evaluated:
        lines.append(f"  step {evaluated[-1]['step']:<4}{evaluation_line(evaluated[-1])}")
    newest = {name: f"  step {row['step']:<4}{line}" for row in rows for name, line in set_lines(row).items()}
    return [*lines, *newest.values()]


def _trouble(record: RankRecord, now: float) -> str:
    if record.host == socket.gethostname():
        state = Process.read(record.pid)
        if state is None or not state.alive or state.started != record.started:
            return _GONE
        return ": STOPPED (state T)" if state.state == STOPPED else ""
    silent = now - record.time
    return f"{_SILENT} for {duration(silent)}" if silent > _SILENT_S else ""


def _ago(seconds: float) -> str:
    return f"{duration(max(0.0, seconds))} ago"
