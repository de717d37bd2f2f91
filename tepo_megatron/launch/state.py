"""A submitted job."""

from __future__ import annotations

import json
import shlex
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tepo_megatron.config import RunConfig
from tepo_megatron.config.loading.load import dump_resolved
from tepo_megatron.launch.job import ranks_per_node

if TYPE_CHECKING:
    from nemo_run.core.tunnel.client import Tunnel

_QUERIES = (
    "squeue --noheader --jobs={job} --format=%T",
    "scontrol --oneliner show job {job} | grep -o 'JobState=[A-Z_]*' | cut -d= -f2",
    "sacct --noheader --allocations --parsable2 --jobs={job} --format=State",
)
"""Tried in turn: squeue knows waiting and running jobs, scontrol recent ones, sacct (not everywhere) all."""


@dataclass(frozen=True)
class SubmittedJob:
    job: str
    ranks_per_node: int


def upload(config: RunConfig, tunnel: Tunnel, scripts: dict[str, str], submission: dict[str, Any]) -> None:
    """Writes scripts, ``launch/run.yaml``, ``launch/submission.json`` and ``resolved.yaml``."""
    texts = {f"launch/{name}": text for name, text in scripts.items()}
    texts["launch/run.yaml"] = texts["resolved.yaml"] = dump_resolved(config)
    texts["launch/submission.json"] = json.dumps(submission, indent=2) + "\n"
    launch, logs, servers = (shlex.quote(str(config.output / name)) for name in ("launch", "logs", "servers"))
    tunnel.run(f"mkdir -p {launch} {logs} && mkdir -p -m 700 {servers}", hide=True)  # the run's key lies below servers
    for name, text in texts.items():
        _put(tunnel, config.output / name, text)


def save_job(config: RunConfig, tunnel: Tunnel, job: str) -> None:
    _put(tunnel, config.output / "launch" / "job.json", json.dumps(asdict(SubmittedJob(job, ranks_per_node(config)))) + "\n")


def load_job(config: RunConfig, tunnel: Tunnel) -> SubmittedJob:
    """Raises ValueError if no job was submitted."""
    path = config.output / "launch" / "job.json"
    answer = tunnel.run(f"cat {shlex.quote(str(path))}", hide=True, warn=True)
    if not answer.ok:
        raise ValueError(f"no job was submitted for output {config.output} ({path} is not there); start one with 'tepo launch'")
    return SubmittedJob(**json.loads(answer.stdout))


def status(job: str, tunnel: Tunnel) -> str:
    """Returns Slurm's state, such as RUNNING, or UNKNOWN."""
    for query in _QUERIES:
        answer = tunnel.run(query.format(job=job), hide=True, warn=True)
        if answer.ok and answer.stdout.strip():
            return str(answer.stdout.split()[0])
    return "UNKNOWN"


def cancel(job: str, tunnel: Tunnel) -> None:
    """Raises RuntimeError with Slurm's message if it refuses."""
    answer = tunnel.run(f"scancel {shlex.quote(job)}", hide=True, warn=True)
    if not answer.ok:
        raise RuntimeError(f"Slurm did not cancel job {job}: {' '.join(answer.stderr.split())}")


def log_pattern(config: RunConfig, submitted: SubmittedJob, role: str, rank: int | None) -> str:
    """Returns a shell pattern for a role, or one rank of the trainer."""
    logs, job = config.output / "logs", submitted.job
    if rank is not None:
        node, local = divmod(rank, submitted.ranks_per_node)
        return f"{logs}/ranks/{job}.*/node-{node}/*/attempt_*/{local}/std*.log"
    patterns = {"job": f"slurm-{job}.out", "train": f"train-{job}.*-node*.log", "serve": f"serve-{job}.*-node*.log"}
    return f"{logs}/{patterns.get(role, 'server-*.log')}"


def tail(tunnel: Tunnel, pattern: str, lines: int, *, follow: bool) -> None:
    """Follows until interrupted. Raises ValueError if there are no files yet."""
    files = tunnel.run(f"ls -d {pattern} 2>/dev/null", hide=True, warn=True).stdout.split()
    if not files:
        raise ValueError(f"there is no {pattern} yet; see 'tepo launch status'")
    tunnel.run(f"tail -v -n {lines} {'-F ' if follow else ''}{' '.join(map(shlex.quote, files))}", hide=False, warn=True)


def _put(tunnel: Tunnel, path: Path, text: str) -> None:
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", prefix="tepo-launch-") as file:
        file.write(text)
        file.flush()
        tunnel.put(file.name, str(path))
