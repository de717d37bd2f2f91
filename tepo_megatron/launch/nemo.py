"""Submits and follows a job through NeMo-Run: one allocation, one ``srun`` per role. When a role ends, the job ends."""

from __future__ import annotations

import json
import shlex
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tepo_megatron.config import ClusterConfig, RunConfig
from tepo_megatron.config.load import dump_resolved
from tepo_megatron.launch.job import Role, batch_lines, mounts, ranks_per_node, roles, uses_gpus, warning_lead_s

if TYPE_CHECKING:
    from nemo_run import SlurmExecutor
    from nemo_run.core.tunnel.client import Tunnel

TITLE = "tepo"
ROLE_POLL_INTERVAL_S = 5


_QUIET: dict[str, Any] = {
    "log_level": "ERROR",
    "clean_mode": True,
    "enable_goodbye_message": False,
    "skip_status_at_exit": True,
    "serialize_metadata_for_scripts": False,
}


@dataclass(frozen=True)
class Scripts:
    """``sbatch`` is empty without Slurm. ``roles``: file name below OUT/launch → text."""

    sbatch: str
    roles: dict[str, str]


def require_nemo_run() -> None:
    try:
        import nemo_run  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"tepo launch needs NeMo-Run, and its import failed ({error}); bash scripts/setup_launch.sh makes .venv-launch, an "
            "environment that has it: .venv-launch/bin/tepo launch …"
        ) from error


def connect(cluster: ClusterConfig) -> Tunnel:
    return _tunnel(cluster, job_dir="")


def write_scripts(config: RunConfig) -> Scripts:
    """Leaves no file and does not call Slurm."""
    with tempfile.TemporaryDirectory(prefix="tepo-launch-") as folder, _experiment(config, Path(folder)) as experiment:
        experiment.dryrun(log=False, delete_exp_dir=False)
        (sbatch,) = Path(folder).rglob("*_sbatch.sh")
        return Scripts(sbatch.read_text(), {f"{role.name}.sh": role.script for role in roles(config)})


def submit(config: RunConfig) -> str:
    from invoke.exceptions import UnexpectedExit

    local = config.cluster.ssh is None
    folder = config.output / "launch" / "nemo" if local else Path(tempfile.mkdtemp(prefix="tepo-launch-"))
    try:
        with _experiment(config, folder) as experiment:
            experiment.run(detach=True)
            return str(experiment.jobs[0].handle).rpartition("/")[2]
    except UnexpectedExit as error:
        message = " ".join(error.result.stderr.split()) or f"exit code {error.result.exited}"
        raise RuntimeError(
            f"Slurm refused the job ({message}); see cluster.partition, cluster.account, cluster.time_limit and cluster.sbatch"
        ) from error
    finally:
        if not local:
            shutil.rmtree(folder)


def run_locally(config: RunConfig) -> int:
    import nemo_run
    from torchx.specs.api import AppState

    script = nemo_run.Script(path=str(config.output / "launch" / "train.sh"), args=["127.0.0.1"])
    folder = str(config.output / "launch" / "nemo")
    with nemo_run.Experiment(TITLE, executor=nemo_run.LocalExecutor(), base_dir=folder, **_QUIET) as experiment:
        experiment.add(script, name="train", tail_logs=True)
        experiment.run()
    return 0 if experiment.jobs[0].state == AppState.SUCCEEDED else 1


def _experiment(config: RunConfig, folder: Path) -> Any:
    """Tasks can be added only inside its context."""
    from contextlib import contextmanager

    import nemo_run

    @contextmanager
    def entered() -> Any:
        every = roles(config)
        with nemo_run.Experiment(TITLE, base_dir=str(folder), **_QUIET) as experiment:
            launch = config.output / "launch"
            experiment.add(
                [nemo_run.Script(path=str(launch / f"{role.name}.sh"), args=_arguments(role)) for role in every],
                executor=[_executor(config, role) for role in every],
                name="job",
            )
            yield experiment

    return entered()


def _arguments(role: Role) -> list[str]:
    return ["$head_node_ip"] if role.name == "train" else []


def _executor(config: RunConfig, role: Role) -> SlurmExecutor:
    """NeMo-Run takes the allocation from the first role."""
    import nemo_run

    from tepo_megatron.launch.slurm_logs import JobLogs

    cluster = config.cluster
    placed = [f"--relative={role.first_node}", f"--nodes={role.nodes}", f"--ntasks={role.nodes}", "--ntasks-per-node=1"]
    executor = nemo_run.SlurmExecutor(
        account=cluster.account,
        partition=cluster.partition,
        job_name_prefix=f"{TITLE}-",
        time=cluster.time_limit,
        nodes=cluster.train_nodes + cluster.rollout_nodes,
        ntasks_per_node=1,
        gpus_per_node=cluster.gpus_per_node if uses_gpus(config) else None,
        exclusive=True,
        mem="0",
        container_image=role.container,
        container_mounts=mounts(config) if role.container else [],
        srun_args=[*placed, *(["--no-container-mount-home"] if role.container else [])],
        # NeMo-Run itself asks for --requeue, and for logs that a job's next start continues (open-mode=append)
        additional_parameters={"signal": f"B:USR1@{warning_lead_s(config)}", **_sbatch_options(cluster)},
        job_details=JobLogs(job_name=_job_name(config), folder=str(config.output / "logs"), role=role.name),
        tunnel=_tunnel(cluster, job_dir=str(config.output / "launch" / "nemo" / "experiments")),
        packager=nemo_run.Packager(),
        setup_lines=f"{_head_address(config.rollout.server.interface)}\n{batch_lines(config)}",
        wait_time_for_group_job=0,
        monitor_group_job_wait_time=ROLE_POLL_INTERVAL_S,
        poll_estimated_start_time=False,
    )
    return executor


def _head_address(interface: str | None) -> str:
    if interface is None:
        return "head_node_ip=${head_node_ip%% *}"
    return f"head_node_ip=$(ip -4 -o addr show dev {interface} | awk '{{ split($4, part, \"/\"); print part[1]; exit }}')"


def _sbatch_options(cluster: ClusterConfig) -> dict[str, Any]:
    split = [option.partition("=") for option in cluster.sbatch]
    return {name.lstrip("-"): value if equals else True for name, equals, value in split}


def _job_name(config: RunConfig) -> str:
    """Slurm would refuse ``config.name``, which is free text."""
    return f"{TITLE}-{config.output.name}"


def _tunnel(cluster: ClusterConfig, job_dir: str) -> Tunnel:
    import nemo_run

    if cluster.ssh is None:
        return nemo_run.LocalTunnel(job_dir=job_dir)
    user, _, place = cluster.ssh.partition("@")
    host, _, port = place.partition(":")
    identity = str(cluster.ssh_identity) if cluster.ssh_identity else None
    return nemo_run.SSHTunnel(host=host, user=user, port=int(port) if port else None, identity=identity, job_dir=job_dir)


_QUERIES = (
    "squeue --noheader --jobs={job} --format=%T",
    "scontrol --oneliner show job {job} | grep -o 'JobState=[A-Z_]*' | cut -d= -f2",
    "sacct --noheader --allocations --parsable2 --jobs={job} --format=State",
)
"""squeue knows waiting and running jobs, scontrol recent ones, sacct (not everywhere) all."""


@dataclass(frozen=True)
class SubmittedJob:
    job: str
    ranks_per_node: int


def upload(config: RunConfig, tunnel: Tunnel, scripts: dict[str, str], submission: dict[str, Any]) -> None:
    texts = {f"launch/{name}": text for name, text in scripts.items()}
    texts["launch/run.yaml"] = texts["resolved.yaml"] = dump_resolved(config)
    texts["launch/submission.json"] = json.dumps(submission, indent=2) + "\n"
    launch, logs, servers = (shlex.quote(str(config.output / name)) for name in ("launch", "logs", "servers"))
    tunnel.run(f"mkdir -p {launch} {logs} && mkdir -p -m 700 {servers}", hide=True)  # the run's key is below servers
    for name, text in texts.items():
        _put(tunnel, config.output / name, text)


def save_job(config: RunConfig, tunnel: Tunnel, job: str) -> None:
    _put(tunnel, config.output / "launch" / "job.json", json.dumps(asdict(SubmittedJob(job, ranks_per_node(config)))) + "\n")


def load_job(config: RunConfig, tunnel: Tunnel) -> SubmittedJob:
    path = config.output / "launch" / "job.json"
    answer = tunnel.run(f"cat {shlex.quote(str(path))}", hide=True, warn=True)
    if not answer.ok:
        raise ValueError(f"no job was submitted for output {config.output} ({path} is not there); start one with 'tepo launch'")
    return SubmittedJob(**json.loads(answer.stdout))


def status(job: str, tunnel: Tunnel) -> str:
    """Returns Slurm's state, or UNKNOWN."""
    for query in _QUERIES:
        answer = tunnel.run(query.format(job=job), hide=True, warn=True)
        if answer.ok and answer.stdout.strip():
            return str(answer.stdout.split()[0])
    return "UNKNOWN"


def cancel(job: str, tunnel: Tunnel) -> None:
    answer = tunnel.run(f"scancel {shlex.quote(job)}", hide=True, warn=True)
    if not answer.ok:
        raise RuntimeError(f"Slurm did not cancel job {job}: {' '.join(answer.stderr.split())}")


def log_pattern(config: RunConfig, submitted: SubmittedJob, role: str, rank: int | None) -> str:
    """Returns a shell pattern."""
    logs, job = config.output / "logs", submitted.job
    if rank is not None:
        node, local = divmod(rank, submitted.ranks_per_node)
        return f"{logs}/ranks/{job}.*/node-{node}/*/attempt_*/{local}/std*.log"
    patterns = {"job": f"slurm-{job}.out", "train": f"train-{job}.*-node*.log", "serve": f"serve-{job}.*-node*.log"}
    return f"{logs}/{patterns.get(role, 'server-*.log')}"


def tail(tunnel: Tunnel, pattern: str, lines: int, *, follow: bool) -> None:
    files = tunnel.run(f"ls -d {pattern} 2>/dev/null", hide=True, warn=True).stdout.split()
    if not files:
        raise ValueError(f"there is no {pattern} yet; see 'tepo launch status'")
    tunnel.run(f"tail -v -n {lines} {'-F ' if follow else ''}{' '.join(map(shlex.quote, files))}", hide=False, warn=True)


def _put(tunnel: Tunnel, path: Path, text: str) -> None:
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", prefix="tepo-launch-") as file:
        file.write(text)
        file.flush()
        tunnel.put(file.name, str(path))
