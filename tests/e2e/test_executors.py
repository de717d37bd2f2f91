"""`cluster.executor`: what NeMo-Run would send to each service, and runs on this machine."""

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tepo_megatron.runtime.preemption import PREEMPTED
from tepo_megatron.tools.faults.workshop import make_rollouts
from tests.support.launcher import launcher
from tests.support.processes import eventually, family
from tests.support.programs import FEW_BLOCKS, TIMEOUT_S, last_step, rows
from tests.support.programs import RUN as EXAMPLE
from tests.support.shell import bash, write_script
from tests.support.submissions import JOB

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "submissions"
RUN = [
    *("engine.platform=cuda", "engine.parallel.tp=2", "output=/shared/out", "rollout.server.count=2"),
    *("cluster.rollout_nodes=1", "cluster.container=registry/tepo:1"),
]
SETTINGS = {
    "docker": ["cluster.mounts=['/data:/data:ro']"],
    "skypilot": ["cluster.mounts=['s3://bucket/rl:/shared']", "cluster.skypilot={infra: aws/us-east-1, gpus: H100}"],
    "dgxcloud": [
        "cluster.mounts=['claim:/shared']",
        "cluster.dgxcloud={base_url: https://a.run.ai/api/v1, kube_apiserver_url: https://k, client_id: app, project: rl}",
    ],
    "lepton": [
        "cluster.mounts=['/rl:/shared']",
        "cluster.lepton={node_group: h100, resource_shape: gpu.8xh100-80gb, storage: 'node-nfs:lepton-shared-fs'}",
    ],
    "kubernetes": [
        "cluster.mounts=['claim:/shared']",
        "cluster.kubernetes={labels: {kueue.x-k8s.io/queue-name: rl}, resources: {rdma/ib: '8'}}",
    ],
}
TINY = [
    *("rollout.prompts_per_step=4", "rollout.samples_per_prompt=4", "train.minibatches=2", "evaluate.every=0", "train.steps=2"),
    *("engine.platform=cpu", "engine.parallel.tp=1", "engine.parallel.sequence_parallel=false", "cluster.rollout_nodes=1"),
    *("rollout.server.max_num_seqs=16", "rollout.server.start_timeout_s=1000", "rollout.server.transfer_timeout_s=1000"),
    *("rollout.server.transfer=gather", "train.grace_s=1000"),
    *(f"cluster.python={sys.executable}", f"cluster.setup=['export PYTHONPATH={ROOT}']"),
    *("log.curves=false", "log.tensorboard=false", f"rollout.server.extra_args=[{FEW_BLOCKS}]"),
]


@pytest.fixture(scope="module")
def python() -> str:
    return str(launcher() / "python")


@pytest.fixture(scope="module")
def tepo() -> str:
    return str(launcher() / "tepo")


@pytest.fixture(scope="module")
def submissions(python: str) -> dict[str, Any]:
    command = [python, "-m", "tests.support.submissions"]
    asked = json.dumps({name: [*RUN, *settings] for name, settings in SETTINGS.items()})
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DGXCLOUD_CLIENT_SECRET": "a secret"}
    done = subprocess.run(command, cwd=ROOT, env=environment, input=asked, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", SETTINGS)
def test_each_service_gets_what_the_golden_file_says(submissions: dict[str, Any], name: str) -> None:
    """To renew one, remove it and run the test twice."""
    result, golden = submissions[name], GOLDEN / f"{name}.json"
    job = result["scripts"].pop(f"tepo-{JOB}.sh", "")
    assert ("place train.sh" in job) == (name != "docker")
    if not golden.exists():
        golden.write_text(json.dumps(result, indent=2) + "\n")
        pytest.fail(f"wrote {golden}; look at it")
    assert result == json.loads(golden.read_text())


SCRIPT = """
import sys
from tepo_megatron.config.load import load_run
from tepo_megatron.launch.job import on_nodes
from tepo_megatron.launch.nemo import write_scripts
print(write_scripts(on_nodes(load_run(None, sys.argv[1:])))["sbatch"])
"""


@pytest.mark.parametrize("spares", [0, 1])
def test_slurms_script_gives_srun_the_values_as_they_are(python: str, tmp_path: Path, spares: int) -> None:
    """Also those of a spare node, with which the job goes on when one of the others is gone. Each trainer has time to close."""
    evil, login = tmp_path / "evil", "$oauthtoken@nvcr.io#acme/tepo:1"
    settings = ["model.path=/a model", f"cluster.container={login}", f"rollout.server.interface=ib0; touch {evil}"]
    settings = [*RUN, *settings, "cluster.mounts=['/my data:/data:ro']", "cluster.train_nodes=2", "engine.parallel.dp=2"]
    settings += [f"cluster.spare_nodes={spares}", f"train.max_restarts={spares}"]
    done = bash('"$@"', python, "-c", SCRIPT, *settings, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    outlives = {"--no-kill", "--kill-on-bad-exit=0"}
    lines = set(done.stdout.splitlines())
    assert (f"#SBATCH --nodes={3 + spares}" in lines, "#SBATCH --no-kill" in lines) == (True, spares == 1)
    for name, text in (("srun", 'printf "%s\\n" "$@"'), ("scontrol", "echo n1"), ("ip", ""), ("ps", "exit 1"), ("sleep", "")):
        write_script(tmp_path / name, text)
    shown = bash(done.stdout, folder=str(tmp_path), SLURM_JOB_ID="7").stdout.splitlines()
    mounts = "/a model:/a model,/shared/out:/shared/out,/my data:/data:ro,"
    assert shown.count("--container-image") == 2
    assert {f"--nodes={2 + spares}", "--wait=0"} <= set(shown)
    assert outlives & set(shown) == (outlives if spares else set())
    for option, value in pairwise(shown):
        assert option != "--container-image" or value == login
        assert option != "--container-mounts" or value.startswith(mounts)
    assert not evil.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_signal_lets_a_job_of_this_machine_save(tepo: str, number: signal.Signals, tmp_path: Path) -> None:
    """A trainer alone, on recorded rollouts. Servers wait until it has saved: tests/unit/launch/test_launch.py."""
    out, rollouts = tmp_path / "out", make_rollouts(tmp_path / "rollouts", 200)
    settings = (*TINY, "cluster.rollout_nodes=0", f"rollout.replay={rollouts}", "train.steps=200")
    environment = {**os.environ, "NEMORUN_HOME": str(tmp_path / "nemo")}
    words = (tepo, "launch", "--executor", "local", str(EXAMPLE), f"output={out}", *settings)
    process = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL)
    try:
        assert eventually(lambda: process.poll() is not None or last_step(out) > 1)
        process.send_signal(number)
        assert process.wait(TIMEOUT_S) == PREEMPTED
    finally:
        for member in family(process.pid) if process.poll() is None else ():
            member.kill()
    assert list(out.glob("checkpoints/step_*/state.json"))


def this_machine_as_image() -> list[str]:
    """An empty image, in which this machine's programs are mounted."""
    empty = io.BytesIO()
    tarfile.open(fileobj=empty, mode="w").close()
    command = ["docker", "import", "-", "tepo-test:empty"]
    try:
        done = subprocess.run(command, input=empty.getvalue(), capture_output=True, timeout=TIMEOUT_S, check=False)
    except FileNotFoundError:
        pytest.skip("no docker here")
    if done.returncode:
        pytest.skip(f"docker: {done.stderr.decode().strip()}")
    folders = {"/usr", "/bin", "/lib", "/lib64", "/etc", sys.prefix, sys.base_prefix, str(ROOT)}
    mounts = [f"{folder}:{folder}:ro" for folder in sorted(folders) if Path(folder).exists()]
    return ["cluster.container=tepo-test:empty", f"cluster.mounts={mounts}"]


@pytest.mark.parametrize("name", ["local", "docker"])
def test_a_trainer_and_its_servers_run_on_this_machine(tepo: str, name: str, tmp_path: Path) -> None:
    """Weights travel as full tensors; on a cluster (tests/slurm) from shard to shard."""
    out, image = tmp_path / "out", this_machine_as_image() if name == "docker" else []

    def run(*words: str) -> str:
        environment = {**os.environ, "NEMORUN_HOME": str(tmp_path / "nemo")}
        done = subprocess.run([tepo, "launch", *words], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    assert "step 2/2" in run("--executor", name, str(EXAMPLE), f"output={out}", *TINY, *image)
    trained = rows(out)[1:]
    assert [row["weights_version/max"] for row in trained] == [0, 1]
    assert max(abs(row["mismatch/kl"]) for row in trained) < 1e-6
    job = json.loads((out / "launch" / "job.json").read_text())["job"]
    for role in ("train", "serve"):
        assert (out / "logs" / f"{role}-{job}.0-node0.log").exists()
    assert run("status", str(out / "resolved.yaml")) == f"job {job}: SUCCEEDED\n"
    assert "step 2/2" in run("logs", str(out / "resolved.yaml"), "--lines", "100")
