"""NeMo-Run's executors besides Slurm's: what each is given, and what it needs on this machine.

``local`` and ``docker`` run a process or container per role in the foreground; the others one job, in which a node's number
decides its role.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from tepo_megatron.config import ClusterConfig, RunConfig
from tepo_megatron.launch.job import Job, Role
from tepo_megatron.runtime.preemption import not_ignored
from tepo_megatron.runtime.proc import Process, visible_gpus

TITLE = "tepo"
_SECRET = "DGXCLOUD_CLIENT_SECRET"  # noqa: S105 (a variable's name)
_PLACES = {
    "local": ("127.0.0.1", "$1"),
    "docker": ("127.0.0.1", "$1"),
    "skypilot": ('$(head -n1 <<<"$SKYPILOT_NODE_IPS")', "$SKYPILOT_NODE_RANK"),
    "dgxcloud": ("${MASTER_ADDR:-127.0.0.1}", "${RANK:-0}"),
    "lepton": ("${MASTER_ADDR:-127.0.0.1}", "${NODE_RANK:-0}"),
    "kubernetes": ("$PET_MASTER_ADDR", "$PET_NODE_RANK"),
}
"""The first node's address and this node's number, as shell words."""

QUIET: dict[str, Any] = {
    "log_level": "ERROR",
    "clean_mode": True,
    "enable_goodbye_message": False,
    "skip_status_at_exit": True,
    "serialize_metadata_for_scripts": False,
}


def write_scripts(config: RunConfig, job: str) -> dict[str, str]:
    """Returns the arguments of NeMo-Run's executor as YAML, and the script of all nodes."""
    head, node = _PLACES[config.cluster.executor]
    return {
        config.cluster.executor: yaml.safe_dump(_arguments(config, job), sort_keys=False),
        "job.sh": Job(config).node_script(job, head, node),
    }


def _arguments(config: RunConfig, job: str) -> dict[str, dict[str, Any]]:
    """Returns the arguments of NeMo-Run's executor, without secrets, by the role that it runs; "job" runs all."""
    if config.cluster.is_one_job:
        of_job = {"skypilot": _skypilot, "dgxcloud": _dgxcloud, "lepton": _lepton, "kubernetes": _kubernetes}
        return {"job": of_job[config.cluster.executor](config, job)}
    return {role.name: _of_role(config, role) for role in Job(config).roles}


def _of_role(config: RunConfig, role: Role) -> dict[str, Any]:
    on_gpus = config.engine.wants_gpus
    result: dict[str, Any] = {"env_vars": {}}
    if on_gpus and config.cluster.rollout_nodes:
        ranks, server = config.engine.parallel.world_size, config.rollout.server
        end = ranks + server.tp * server.count
        gpus = [*range(ranks), *range(end, end + config.teacher_workers)] if role.name == "train" else range(ranks, end)
        result["env_vars"] = {"CUDA_VISIBLE_DEVICES": visible_gpus(gpus, f"the role {role.name}")}
    elif on_gpus and config.cluster.executor == "docker" and (visible := os.environ.get("CUDA_VISIBLE_DEVICES")):
        result["env_vars"] = {"CUDA_VISIBLE_DEVICES": visible}  # a container inherits none
    if config.cluster.executor == "docker":
        volumes = [*Job(config).mounts, "/tmp:/tmp"]  # noqa: S108 (roles of one machine meet in files there)
        result |= {"container_image": role.container, "volumes": volumes, "network": "host", "ipc_mode": "host"}
        result |= {"num_gpus": -1, "ulimits": ["memlock:-1", "stack:67108864"]} if on_gpus else {}
    return result


def _nodes(config: RunConfig) -> int:
    return config.cluster.train_nodes + config.cluster.rollout_nodes


def _gpus(config: RunConfig) -> int:
    return config.cluster.gpus_per_node if config.engine.wants_gpus else 0


def _mounts(cluster: ClusterConfig) -> Iterator[tuple[str, str]]:
    for mount in cluster.mounts:
        source, colon, target = mount.rpartition(":")
        if not source or not colon or not target.startswith("/"):
            raise ValueError(f"cluster.mounts: {mount!r} is no source:target with an absolute target; write it so")
        yield source, target


def _skypilot(config: RunConfig, job: str) -> dict[str, Any]:
    cluster, gpus = config.cluster, _gpus(config)
    section, image = cluster.skypilot, str(cluster.container)
    assert section is not None
    return {
        "infra": section.infra,
        "num_nodes": _nodes(config),
        **({"gpus": section.gpus, "gpus_per_node": gpus} if gpus else {}),
        "container_image": image if image.startswith("docker:") else f"docker:{image}",
        "storage_mounts": {target: {"source": source, "mode": "MOUNT"} for source, target in _mounts(cluster)},
        "cluster_name": f"{TITLE}-{job}",
        "idle_minutes_to_autostop": section.idle_minutes,
        "autodown": True,
    }


def _dgxcloud(config: RunConfig, job: str) -> dict[str, Any]:
    cluster, section = config.cluster, config.cluster.dgxcloud
    assert section is not None
    return {
        "base_url": section.base_url,
        "kube_apiserver_url": section.kube_apiserver_url,
        "client_id": section.client_id,
        "project_name": section.project,
        "container_image": cluster.container,
        "nodes": _nodes(config),
        "gpus_per_node": _gpus(config),
        "pvcs": [
            {"name": source, "claimName": source, "path": target, "existingPvc": True} for source, target in _mounts(cluster)
        ],
        "pvc_nemo_run_dir": str(config.output / "launch" / "nemo"),
    }


def _lepton(config: RunConfig, job: str) -> dict[str, Any]:
    cluster, section = config.cluster, config.cluster.lepton
    assert section is not None
    return {
        "node_group": section.node_group,
        "resource_shape": section.resource_shape,
        "container_image": cluster.container,
        "image_pull_secrets": list(section.image_pull_secrets),
        "nodes": _nodes(config),
        "gpus_per_node": _gpus(config),
        "mounts": [{"path": source, "mount_path": target, "from": section.storage} for source, target in _mounts(cluster)],
        "nemo_run_dir": str(config.output / "launch" / "nemo"),
    }


def _kubernetes(config: RunConfig, job: str) -> dict[str, Any]:
    cluster, section = config.cluster, config.cluster.train_job
    claims = dict.fromkeys(source for source, _ in _mounts(cluster))
    volumes: list[dict[str, Any]] = [{"name": claim, "persistentVolumeClaim": {"claimName": claim}} for claim in claims]
    volumes.append({"name": "shared-memory", "emptyDir": {"medium": "Memory"}})  # a pod has 64 MiB
    mounts = [{"name": source, "mountPath": target} for source, target in _mounts(cluster)]
    scripts = _mount_of(config.output, cluster)
    return {
        "namespace": section.namespace,
        "runtime_ref": section.runtime,
        "image": cluster.container,
        "image_pull_secrets": list(section.image_pull_secrets),
        "labels": section.labels,
        "num_nodes": _nodes(config),
        "nprocs_per_node": 1,
        **({"gpus_per_node": gpus} if (gpus := _gpus(config)) else {}),
        "extra_resource_requests": dict(section.resources),
        "extra_resource_limits": dict(section.resources),
        "volumes": volumes,
        "volume_mounts": [*mounts, {"name": "shared-memory", "mountPath": "/dev/shm"}],  # noqa: S108
        "workdir_pvc": scripts[0],
        "workdir_pvc_path": scripts[1],
        "train_job_basename": f"{TITLE}-{job}",
    }


def _mount_of(path: Path | PurePosixPath, cluster: ClusterConfig) -> tuple[str, str]:
    """Returns the mount that holds the path. Raises ValueError if none does."""
    for source, target in _mounts(cluster):
        if PurePosixPath(path).is_relative_to(target):
            return source, target
    raise ValueError(f"{path} is on no disk that the nodes have with cluster.executor = {cluster.executor}; add cluster.mounts")


def check_paths(config: RunConfig) -> None:
    """Raises ValueError if a path of the run is in no mount. Whether it is there only the nodes can see."""
    cluster = config.cluster.model_copy(update={"mounts": ()})
    for folder in Job(config.model_copy(update={"cluster": cluster})).mounts:
        _mount_of(PurePosixPath(folder.partition(":")[0]), config.cluster)


def check_machine(config: RunConfig) -> None:
    """Raises ValueError for a package, program, login or daemon that the executor lacks here."""
    name = config.cluster.executor
    package, extra = {"skypilot": ("sky", "skypilot"), "kubernetes": ("kubernetes", "kubeflow")}.get(name, ("nemo_run", ""))
    needs = f"cluster.executor = {name} needs"
    if find_spec(package) is None:
        raise ValueError(f"{needs} the package {package}; run .venv-launch/bin/pip install 'nemo-run[{extra}]'")
    programs = {"skypilot": "git", "kubernetes": "kubectl"}
    if (program := programs.get(name)) is not None and shutil.which(program) is None:
        raise ValueError(f"{needs} {program} on this machine; install it")
    if name == "dgxcloud" and not os.environ.get(_SECRET):
        raise ValueError(f"{needs} the application's secret in the environment; export {_SECRET}")
    if name == "skypilot" and subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, check=False).returncode:
        raise ValueError(f"{needs} to start in a git repository, which NeMo-Run sends along; change to one")
    if name in _LOGINS:
        what, remedy, attempt = _LOGINS[name]
        try:
            attempt()
        except Exception as error:  # of libraries that have no common class
            raise ValueError(f"{needs} {what} ({' '.join(str(error).split())}); {remedy}") from error


def _ping_docker() -> None:
    import docker

    docker.from_env().ping()


def _find_lepton() -> None:
    from leptonai.api.v2.client import APIClient

    APIClient()


def _find_kubernetes() -> None:
    import nemo_run

    nemo_run.KubeflowExecutor()


_LOGINS: dict[str, tuple[str, str, Callable[[], None]]] = {
    "docker": ("a Docker daemon that answers", "start it, or set DOCKER_HOST", _ping_docker),
    "lepton": ("a login", "run .venv-launch/bin/lep login", _find_lepton),
    "kubernetes": ("a kubeconfig", "set KUBECONFIG", _find_kubernetes),
}


def run_here(config: RunConfig, job: str) -> int:
    """Runs the job in the foreground, and returns the trainer's exit code; 1 if it has left none. Signals let it save."""
    import nemo_run

    for number in not_ignored((signal.SIGINT, signal.SIGTERM, signal.SIGHUP)):
        signal.signal(number, lambda *_: _stop(config, job))  # NeMo-Run would wait on, or end and leave them running

    roles, script = Job(config).roles, str(config.output / "launch" / "job.sh")
    arguments, executor = _arguments(config, job), _executor_class(config)
    with _refusals(config), nemo_run.Experiment(TITLE, id=f"{TITLE}_{job}", **QUIET) as experiment:
        experiment.add(
            [nemo_run.Script(path=script, args=[str(role.first_node)]) for role in roles],
            executor=[executor(packager=nemo_run.Packager(), **arguments[role.name]) for role in roles],
            name=f"{TITLE}-{job}",
            tail_logs=True,
        )
        experiment.run()
    code = config.output / "servers" / f"{job}.0" / "closed"
    return int(code.read_text()) if code.exists() else 1


def _stop(config: RunConfig, job: str) -> None:
    """SIGTERM goes to all processes of the job, as with Slurm."""
    if config.cluster.executor == "local":
        for child in Process.children(os.getpid()):
            os.killpg(child.pid, signal.SIGTERM)
        return
    import docker

    for container in docker.from_env().containers.list(filters={"label": f"nemo-run/experiment-id={TITLE}_{job}"}):
        container.exec_run(["bash", "-c", "kill -TERM -1"])


def submit(config: RunConfig, job: str) -> None:
    import nemo_run

    with _refusals(config), nemo_run.Experiment(TITLE, id=f"{TITLE}_{job}", **QUIET) as experiment:
        (arguments,) = _arguments(config, job).values()
        if config.cluster.executor == "dgxcloud":
            arguments["client_secret"] = os.environ[_SECRET]
        if config.cluster.executor != "skypilot":  # its executor takes no other packager than git's
            arguments["packager"] = nemo_run.Packager()
        script = nemo_run.Script(inline=write_scripts(config, job)["job.sh"])
        experiment.add(script, executor=_executor_class(config)(**arguments), name=f"{TITLE}-{job}")
        experiment.run(detach=True)
        experiment.detach = True  # which NeMo-Run does not offer for Kubernetes, though no job needs this process


@contextmanager
def _refusals(config: RunConfig) -> Iterator[None]:
    name = config.cluster.executor
    try:
        yield
    except Exception as error:  # of libraries that have no common class
        message = " ".join(str(error).split()) or type(error).__name__
        raise RuntimeError(f"{name} refused the job ({message}); see the other fields of cluster") from error


def _executor_class(config: RunConfig) -> Any:
    import nemo_run

    names = {"skypilot": "Skypilot", "dgxcloud": "DGXCloud", "kubernetes": "Kubeflow"}
    return getattr(nemo_run, f"{names.get(config.cluster.executor, config.cluster.executor.capitalize())}Executor")
