"""`cluster.executor`: every executor's nodes do what Slurm's do, and what one lacks is a sentence before anything starts."""

import sys
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import Mock

import pytest

from tepo_megatron.config import RunConfig
from tepo_megatron.config.load import load_run
from tepo_megatron.launch import executors
from tepo_megatron.launch.cluster import ClusterRun
from tepo_megatron.launch.executors import _arguments, check_machine, check_paths, write_scripts
from tepo_megatron.launch.job import Job, on_nodes
from tests.support.shell import bash, write_script

JOB = "0123456789"
IMAGE = "cluster.container=registry/tepo:1"
SETTINGS = {
    "local": [],
    "docker": [IMAGE],
    "skypilot": [IMAGE, "cluster.skypilot={infra: k8s/a}"],
    "dgxcloud": [IMAGE, "cluster.dgxcloud={base_url: b, kube_apiserver_url: k, client_id: c, project: p}"],
    "lepton": [IMAGE, "cluster.lepton={node_group: g, resource_shape: r, storage: s}"],
    "kubernetes": [IMAGE, "cluster.mounts=['claim:/']"],
}
PLACES = {
    "local": {},
    "docker": {},
    "skypilot": {"SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8", "SKYPILOT_NODE_RANK": "{}"},
    "dgxcloud": {"MASTER_ADDR": "10.0.0.7", "RANK": "{}", "WORLD_SIZE": "3"},
    "lepton": {"MASTER_ADDR": "10.0.0.7", "NODE_RANK": "{}"},
    "kubernetes": {"PET_MASTER_ADDR": "10.0.0.7", "PET_NODE_RANK": "{}", "PET_NNODES": "3"},
}


def config_of(name: str, *overrides: str) -> RunConfig:
    platform = [] if any("platform" in one for one in overrides) else ["engine.platform=cpu"]
    settings = SETTINGS.get(name, [])
    return on_nodes(load_run(None, [f"cluster.executor={name}", "cluster.rollout_nodes=1", *platform, *settings, *overrides]))


def started(script: str, *arguments: str, **environment: str) -> list[str]:
    """What a python that only prints is started with: its arguments, and what of the environment concerns ranks."""
    done = bash(script, *arguments, **environment)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if not line.startswith(("PATH=", "SLURM_"))]


ONE_MACHINE = ("local", "docker")
NODES = [("skypilot", 0), *((name, node) for name in SETTINGS for node in ((0, 1) if name in ONE_MACHINE else (1, 2)))]


@pytest.mark.parametrize(("name", "node"), NODES)
def test_a_node_starts_what_slurms_does(tmp_path: Path, name: str, node: int) -> None:
    one_machine = name in ONE_MACHINE
    nodes = 1 if one_machine else 2
    shown = 'printf "%s\\n" "$@"; env | grep -E "^(RANK|WORLD|NODE_|PET|MASTER|GLOO|NCCL|OMP|PYTORCH)" | sort'
    python = write_script(tmp_path / "python", f"case $2 in *.record) ;; *) {shown} ;; esac")
    settings = [f"output={tmp_path}", f"cluster.python={python}", f"cluster.train_nodes={nodes}", f"engine.parallel.dp={nodes}"]
    settings += ["rollout.server.interface=lo"] if one_machine else []
    environment = {key: value.format(node) for key, value in PLACES[name].items()}
    script = write_scripts(config_of(name, *settings), JOB)["job.sh"]
    result = started(script, *([str(node)] if one_machine else []), **environment)

    slurm = on_nodes(load_run(None, ["engine.platform=cpu", "cluster.rollout_nodes=1", *settings]))
    role = Job(slurm).roles[node >= nodes]
    head = "127.0.0.1" if one_machine else "10.0.0.7"
    expected = started(role.script, head, SLURM_JOB_ID="20000", SLURM_NODEID=str(node - role.first_node))
    assert [line.replace(JOB, "20000") for line in result] == expected
    assert expected
    log = tmp_path / "logs" / f"{role.name}-{JOB}.0-node{node - role.first_node}.log"
    assert log.read_text().splitlines() == result


def test_all_nodes_of_a_job_end_with_the_trainers_exit_code(tmp_path: Path) -> None:
    python = write_script(tmp_path / "python", "case $2 in *.torchrun) exit 75 ;; esac")
    script = write_scripts(config_of("local", f"output={tmp_path}", f"cluster.python={python}"), JOB)["job.sh"]
    for node in ("0", "1"):
        assert bash(script, node).returncode == 75
    assert (tmp_path / "servers" / f"{JOB}.0" / "closed").read_text() == "75\n"


def test_roles_of_one_machine_have_gpus_of_their_own_among_those_that_this_process_sees(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    settings = ["engine.platform=cuda", "engine.parallel.tp=4", "rollout.server.tp=2", "rollout.server.count=2"]
    for name in ("local", "docker"):
        arguments = _arguments(config_of(name, *settings), JOB)
        assert [arguments[role]["env_vars"]["CUDA_VISIBLE_DEVICES"] for role in ("train", "serve")] == ["0,1,2,3", "4,5,6,7"]
    teacher = ["teachers.a={path: m, place: server, server: {tp: 2}}", "objective.preset=on_policy_distill"]
    with pytest.raises(ValueError, match="gpus_per_node = 8, but ranks and workers of servers need 10"):
        config_of("local", *settings, *teacher)
    arguments = _arguments(config_of("local", *settings, *teacher, "rollout.server.count=1"), JOB)
    assert arguments["train"]["env_vars"]["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,6,7"  # the teacher's after its own
    alone = ["engine.platform=cuda", "engine.parallel.tp=4", "cluster.rollout_nodes=0"]
    assert _arguments(config_of("local", *alone), JOB) == {"train": {"env_vars": {}}}

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "8,MIG-a,1,2,3,4")
    arguments = _arguments(config_of("local", *settings, "rollout.server.count=1"), JOB)
    assert [arguments[role]["env_vars"]["CUDA_VISIBLE_DEVICES"] for role in ("train", "serve")] == ["8,MIG-a,1,2", "3,4"]
    assert _arguments(config_of("docker", *alone), JOB)["train"]["env_vars"]["CUDA_VISIBLE_DEVICES"] == "8,MIG-a,1,2,3,4"
    with pytest.raises(ValueError, match=r"the role serve should run on GPU 7, but CUDA_VISIBLE_DEVICES = \S+ shows 6"):
        _arguments(config_of("local", *settings), JOB)


@pytest.mark.parametrize(
    ("mounts", "message"),
    [
        ([], "is on no disk that the nodes have with cluster.executor = kubernetes; add cluster.mounts"),
        (["claim:/shared"], "/data is on no disk that the nodes have"),
        (["/shared"], "'/shared' is no source:target with an absolute target"),
        (["claim:/shared", "data:/data"], ""),
    ],
)
def test_paths_that_are_in_no_mount_are_refused(mounts: list[str], message: str) -> None:
    config = config_of("kubernetes", "output=/shared/out", "data.train=/data/train.jsonl", f"cluster.mounts={mounts}")
    if not message:
        check_paths(config)
        return
    with pytest.raises(ValueError, match=message):
        check_paths(config)


@pytest.mark.parametrize(
    ("name", "has", "message"),
    [
        ("skypilot", (), r"needs the package sky; run .venv-launch/bin/pip install 'nemo-run\[skypilot\]'"),
        ("skypilot", ("sky",), "needs git on this machine; install it"),
        ("skypilot", ("sky", "git"), "needs to start in a git repository"),
        ("kubernetes", (), r"needs the package kubernetes; run .*'nemo-run\[kubeflow\]'"),
        ("kubernetes", ("kubernetes",), "needs kubectl on this machine"),
        ("kubernetes", ("kubernetes", "kubectl"), r"needs a kubeconfig \(nothing there\); set KUBECONFIG"),
        ("dgxcloud", ("nemo_run",), "needs the application's secret in the environment; export DGXCLOUD_CLIENT_SECRET"),
        ("lepton", ("nemo_run",), r"needs a login \(nothing there\); run .venv-launch/bin/lep login"),
        ("docker", ("nemo_run",), r"needs a Docker daemon that answers \(nothing there\); start it, or set DOCKER_HOST"),
    ],
)
def test_what_an_executor_lacks_is_one_sentence(
    name: str, has: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DGXCLOUD_CLIENT_SECRET", raising=False)
    monkeypatch.setattr(executors, "find_spec", lambda package: find_spec("sys") if package in has else None)
    monkeypatch.setattr("shutil.which", lambda program: program if program in has else None)
    fails = Mock(side_effect=OSError("nothing\nthere"))
    logins = {login: (what, remedy, fails) for login, (what, remedy, _) in executors._LOGINS.items()}
    monkeypatch.setattr(executors, "_LOGINS", logins)
    with pytest.raises(ValueError, match=f"^cluster.executor = {name} {message}") as caught:
        check_machine(config_of(name))
    assert "\n" not in str(caught.value)


def test_a_job_of_another_machine_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = Mock(side_effect=AssertionError("Experiment not found"))
    monkeypatch.setitem(sys.modules, "nemo_run", Mock(Experiment=Mock(from_id=unknown)))
    cluster = ClusterRun(config_of("skypilot"), Mock())
    for ask in (cluster.status, cluster.cancel):
        with pytest.raises(ValueError, match=f"job {JOB} was submitted by another user or machine; ask there"):
            ask(JOB)
