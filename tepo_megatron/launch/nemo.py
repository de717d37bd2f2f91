"""Submits a job to Slurm through NeMo-Run: one allocation, one ``srun`` per role; it ends with its first role."""

from __future__ import annotations

import shlex
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tepo_megatron.config import ClusterConfig, RunConfig
from tepo_megatron.launch.cluster import ClusterRun
from tepo_megatron.launch.executors import QUIET, TITLE
from tepo_megatron.launch.job import Job, Role

if TYPE_CHECKING:
    from nemo_run import SlurmExecutor
    from nemo_run.core.tunnel.client import Tunnel

_ROLE_POLL_INTERVAL_S = 5
_OUTLIVES_NODES = ("--no-kill", "--kill-on-bad-exit=0")
"""The step continues without a node that is gone, for ``train.max_restarts``."""


def _require_nemo_run() -> None:
    try:
        import nemo_run  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"tepo launch needs NeMo-Run, and its import failed ({error}); bash scripts/setup_launch.sh makes .venv-launch, an "
            "environment that has it: .venv-launch/bin/tepo launch …"
        ) from error


def connect(config: RunConfig) -> ClusterRun:
    _require_nemo_run()
    return ClusterRun(config, _tunnel(config.cluster, job_dir=""))


def write_scripts(config: RunConfig) -> dict[str, str]:
    """Returns the texts of ``sbatch`` and of each role's file in OUT/launch. Leaves no file and does not call Slurm."""
    _require_nemo_run()
    with tempfile.TemporaryDirectory(prefix="tepo-launch-") as folder, _experiment(config, Path(folder)) as experiment:
        experiment.dryrun(log=False, delete_exp_dir=False)
        (sbatch,) = Path(folder).rglob("*_sbatch.sh")
        return {"sbatch": sbatch.read_text(), **{f"{role.name}.sh": role.script for role in Job(config).roles}}


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


@contextmanager
def _experiment(config: RunConfig, folder: Path) -> Iterator[Any]:
    import nemo_run

    every, launch = Job(config).roles, config.output / "launch"
    with nemo_run.Experiment(TITLE, base_dir=str(folder), **QUIET) as experiment:
        experiment.add(
            [nemo_run.Script(path=str(launch / f"{role.name}.sh"), args=["$head_node_ip"]) for role in every],
            executor=[_executor(config, role) for role in every],
            name="job",
        )
        yield experiment


def _executor(config: RunConfig, role: Role) -> SlurmExecutor:
    """NeMo-Run takes the allocation from the first role."""
    import nemo_run

    from tepo_megatron.launch.slurm_logs import JobLogs

    cluster = config.cluster
    head_address = "head_node_ip=${head_node_ip%% *}"
    if (interface := config.rollout.server.interface) is not None:
        shown = f"ip -4 -o addr show dev {shlex.quote(interface)}"
        head_address = f"head_node_ip=$({shown} | awk '{{ split($4, part, \"/\"); print part[1]; exit }}')"
    split = [option.partition("=") for option in cluster.sbatch]
    options = {name.lstrip("-"): value if equals else True for name, equals, value in split}
    survives = role.name == "train" and config.train.max_restarts > 0
    placed = [f"--relative={role.first_node}", f"--nodes={role.nodes}", f"--ntasks={role.nodes}", "--ntasks-per-node=1"]
    placed += ["--wait=0"] if role.name == "train" else []  # rank 0 saves and exports after the others have ended
    return nemo_run.SlurmExecutor(
        account=cluster.account,
        partition=cluster.partition,
        job_name_prefix=f"{TITLE}-",
        time=cluster.time_limit,
        nodes=cluster.train_nodes + cluster.spare_nodes + cluster.rollout_nodes,
        ntasks_per_node=1,
        gpus_per_node=cluster.gpus_per_node if config.engine.wants_gpus else None,
        exclusive=True,
        mem="0",
        container_image=role.container and shlex.quote(role.container),
        container_mounts=[*map(shlex.quote, Job(config).mounts)] if role.container else [],
        srun_args=[*placed, *(_OUTLIVES_NODES if survives else ()), *(["--no-container-mount-home"] if role.container else [])],
        # NeMo-Run itself asks for --requeue, and for logs that a job's next start continues (open-mode=append)
        additional_parameters={
            "signal": f"B:USR1@{Job(config).warning_lead_s}",
            **({"no-kill": True} if cluster.spare_nodes else {}),
            **options,
        },
        job_details=JobLogs(job_name=f"{TITLE}-{config.output.name}", folder=str(config.output / "logs"), role=role.name),
        tunnel=_tunnel(cluster, job_dir=str(config.output / "launch" / "nemo" / "experiments")),
        packager=nemo_run.Packager(),
        setup_lines=f"{head_address}\n{Job(config).batch_lines}",
        wait_time_for_group_job=0,
        monitor_group_job_wait_time=_ROLE_POLL_INTERVAL_S,
        poll_estimated_start_time=False,
    )


def _tunnel(cluster: ClusterConfig, job_dir: str) -> Tunnel:
    import nemo_run

    if cluster.ssh is None:
        return nemo_run.LocalTunnel(job_dir=job_dir)
    user, _, place = cluster.ssh.partition("@")
    host, _, port = place.partition(":")
    identity = str(cluster.ssh_identity) if cluster.ssh_identity else None
    return nemo_run.SSHTunnel(host=host, user=user, port=int(port) if port else None, identity=identity, job_dir=job_dir)
