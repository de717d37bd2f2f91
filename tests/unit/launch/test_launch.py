"""What a job is made of: scripts that do what they say, the configuration that nodes read, and what is refused before."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tepo_megatron.config import RunConfig
from tepo_megatron.config.load import load_run
from tepo_megatron.launch.job import Job, on_nodes
from tepo_megatron.launch.record import submission
from tests.support.cli import invoke
from tests.support.processes import eventually, gone
from tests.support.programs import TIMEOUT_S, run_python
from tests.support.shell import bash, write_script

ROOT = Path(__file__).parents[3]
CLUSTER = ["engine.platform=cpu", "engine.parallel.tp=2", "cluster.gpus_per_node=2", "cluster.rollout_nodes=1"]


def job(*overrides: str) -> RunConfig:
    return on_nodes(load_run(None, [*CLUSTER, *overrides]))


def script_of(role: str, config: RunConfig) -> str:
    (script,) = (each.script for each in Job(config).roles if each.name == role)
    return script


def run_train_script(folder: Path, *overrides: str, **environment: str) -> list[str]:
    """PyTorch's setting of its allocator, the job, and the arguments of torchrun, which a python that only writes them gets."""
    shown = '"segments=$PYTORCH_CUDA_ALLOC_CONF" "job=$TEPO_LAUNCHED_JOB" "$@"'
    text = f'if [[ $2 == tepo_megatron.runtime.torchrun ]]; then printf "%s\\n" {shown}; fi'
    python = write_script(folder / "python", text)
    script = script_of("train", job(f"output={folder}", *overrides, f"cluster.python={python}"))
    done = bash(script, "10.0.0.7", **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def option(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


def test_torchrun_gets_the_nodes_place_and_the_first_nodes_address(tmp_path: Path) -> None:
    """Also in a job that was started again, which has its old name; what it resumes from: tests/unit/run/test_folder.py."""
    job_variables = {"SLURM_JOB_ID": "20123", "SLURM_NODEID": "1", "SLURM_RESTART_COUNT": "7"}
    got = run_train_script(tmp_path, "cluster.train_nodes=2", "engine.parallel.dp=2", **job_variables)
    assert got[:2] == ["segments=expandable_segments:True", "job=20123"]
    assert got[2:6] == ["-m", "tepo_megatron.runtime.torchrun", "--status", f"{tmp_path}/status"]
    assert (option(got, "--nnodes"), option(got, "--nproc-per-node"), option(got, "--node-rank")) == ("2", "2", "1")
    assert (option(got, "--master-addr"), option(got, "--master-port")) == ("10.0.0.7", "20123")
    assert got[got.index("train") + 1 :] == [
        f"{tmp_path}/launch/run.yaml",
        f"rollout.server.registry={tmp_path}/servers/20123.7",
    ]
    assert Path(option(got, "--log-dir")).is_dir()


def test_a_spare_node_waits_with_the_trainers_and_the_job_outlives_a_node(tmp_path: Path) -> None:
    settings = ("cluster.train_nodes=2", "engine.parallel.dp=2", "cluster.spare_nodes=1", "train.max_restarts=3")
    got = run_train_script(tmp_path, *settings, SLURM_JOB_ID="20123", SLURM_NODEID="2")
    assert [option(got, name) for name in ("--spares", "--max-restarts", "--nnodes", "--node-rank")] == ["1", "3", "2", "2"]
    assert f"rollout.server.registry={tmp_path}/servers/20123.0" in got
    train, serve = Job(job(*settings, "cluster.container=a", "cluster.rollout_container=b")).roles
    assert (train.first_node, train.nodes, serve.first_node, serve.nodes) == (0, 3, 3, 1)
    assert (train.container, serve.container) == ("a", "b")


def test_servers_on_the_trainers_node_inherit_no_growing_memory_segments_and_no_registry(tmp_path: Path) -> None:
    """vLLM's all-reduce shares memory by CUDA IPC."""
    got = run_train_script(tmp_path, "cluster.rollout_nodes=0")
    assert got[0] == "segments="
    assert not any("registry" in argument for argument in got)


def test_ranks_and_servers_do_not_share_one_processor(tmp_path: Path) -> None:
    """Slurm may bind a task to one processor where --cpus-per-task is not stated."""
    for name, count in (("nproc", 1), ("getconf", 64)):
        write_script(tmp_path / name, f"echo {count}")
    run = job(f"output={tmp_path}/out", f"cluster.python={sys.executable}", "rollout.server.count=2")
    for role, work in (("train", "2 ranks"), ("serve", "its servers' 2 workers")):
        result = bash(script_of(role, run), "10.0.0.7", folder=str(tmp_path))
        assert result.returncode == 1
        assert f"this task may use 1 of the node's 64 processors, for {work}" in result.stderr
        assert "'cluster.sbatch=[cpus-per-task=64]'" in result.stderr


@pytest.mark.parametrize("address", ["127.0.1.1", "::1", "fe80::1%eth0"])
def test_nodes_do_not_wait_for_each_other_at_a_loopback_address(address: str, tmp_path: Path) -> None:
    config = job(f"output={tmp_path}", "cluster.train_nodes=2", "engine.parallel.dp=2", "cluster.python=/bin/true")
    done = bash(script_of("train", config), address)
    assert done.returncode == 1
    assert "set rollout.server.interface" in done.stderr


@pytest.mark.parametrize(
    ("interface", "why"), [("ib7", "the interface ib7 (rollout.server.interface) has no"), ("", "its name")]
)
def test_a_first_node_without_an_address_is_one_sentence(tmp_path: Path, interface: str, why: str) -> None:
    """The batch script then passes no argument, or an empty one."""
    chosen = [f"rollout.server.interface={interface}"] if interface else []
    script = script_of("train", job(f"output={tmp_path}", "cluster.python=/bin/true", *chosen))
    for arguments in ([], [""]):
        done = bash(script, *arguments)
        assert done.returncode == 1
        assert done.stderr.startswith(f"error: the first node has no address: {why}")
        assert "'ip -4 addr'" in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_values_reach_the_shell_as_they_are(tmp_path: Path) -> None:
    settings = (f"rollout.server.interface=ib0; touch {tmp_path}/evil", "cluster.setup=['export SET_UP=yes']")
    run_train_script(tmp_path, *settings)
    assert not (tmp_path / "evil").exists()
    assert "export SET_UP=yes\n" in script_of("train", job(*settings))


@pytest.mark.parametrize(
    ("executor", "setting", "platform"), [("slurm", "auto", "cuda"), ("slurm", "cpu", "cpu"), ("local", "auto", "auto")]
)
def test_nodes_do_not_choose_a_platform_each_for_itself(executor: str, setting: str, platform: str) -> None:
    overrides = f"cluster.executor={executor}", f"engine.platform={setting}", "cluster.rollout_nodes=0"
    assert job(*overrides).engine.platform == platform


@pytest.mark.parametrize("role", ["train", "serve"])
def test_setup_may_read_a_variable_that_is_not_set(role: str, tmp_path: Path) -> None:
    assert bash(script_of(role, job(f"output={tmp_path}", "cluster.setup=['exit 3$LD_LIBRARY_PATH']"))).returncode == 3


def test_a_job_that_would_be_warned_at_once_is_refused() -> None:
    Job(job("cluster.time_limit=00:05:31", "train.warning_s=300")).check_time_limit()
    for limit, warning in (("00:05:30", 300), ("1-00:00:00", 86371)):
        message = rf"cluster.time_limit = {limit} is over before .* Slurm warns it {warning + 30} s"
        with pytest.raises(ValueError, match=message):
            Job(job(f"cluster.time_limit={limit}", f"train.warning_s={warning}")).check_time_limit()


def batch(folder: Path, config: RunConfig, then: str, **environment: str) -> tuple[int, str]:
    """What the batch script's own lines do, before something else that the script does; scontrol writes what it is told."""
    write_script(folder / "scontrol", 'echo "scontrol $*"')
    done = bash(f"{Job(config).batch_lines}\n{then}", folder=str(folder), SLURM_JOB_ID="7", **environment)
    assert done.stderr == ""
    return done.returncode, done.stdout


BACK = "preempted: job 7 goes back into the queue and resumes by itself, restart {} of at most 2\nscontrol requeue 7\n"


@pytest.mark.parametrize(
    ("code", "restarts", "said"),
    [
        (0, None, ""),
        (1, None, ""),
        (75, None, BACK.format(1)),
        (75, "1", BACK.format(2)),
        (75, "2", "error: job 7 was preempted after 2 restarts, and cluster.max_requeues = 2; go on with --resume\n"),
    ],
)
def test_a_job_that_has_saved_goes_back_so_many_times(tmp_path: Path, code: int, restarts: str | None, said: str) -> None:
    given = {} if restarts is None else {"SLURM_RESTART_COUNT": restarts}
    assert batch(tmp_path, job("cluster.max_requeues=2"), f"exit {code}", **given) == (code, said)


def ended_node(output: Path, *overrides: str, before: str = "", code: int = 1, node: int = 1) -> tuple[int, str]:
    """What the batch does if a training node ends so, and the other is then stopped as a preempted one is.

    A node that is stopped waits for the first one, where rank 0 may still close the run: srun ends it for the code of another.
    """
    config = job(f"output={output}", "cluster.train_nodes=2", f"cluster.python={output}/python", *overrides)
    output.mkdir(exist_ok=True)
    write_script(output / "python", f"{before}\nexit {code}")
    script, first = script_of("train", config), output / "servers/7.0/trainer-ended"
    if waits := bool(node) and code in (75, 130):
        script = f"(sleep 0.5; mkdir -p {first.parent}; touch {first}) &\n{script}"
    assert bash(script, "10.0.0.1", SLURM_JOB_ID="7", SLURM_NODEID=str(node)).returncode == code
    assert first.exists() or not waits
    return batch(output, config, "exit 75")


def test_a_job_whose_node_fails_by_itself_does_not_go_back(tmp_path: Path) -> None:
    """srun stops the others, which end as if they were preempted."""
    said = "ended with exit code 1, so that job 7 does not go back into the queue; its log says why\n"
    for node in (0, 1):
        for when, overrides in (("late", []), ("in-setup", ["cluster.setup=['false']"])):
            result = ended_node(tmp_path / f"fails-{when}-{node}", *overrides, node=node)
            assert result == (1, f"error: node {node} of the trainer {said}"), when
    (tmp_path / "second/servers/7.0").mkdir(parents=True)
    (tmp_path / "second/servers/7.0/trainer-failed").write_text("node 1 of the trainer ended with exit code 1\n")
    assert ended_node(tmp_path / "second", node=0) == (1, f"error: node 1 of the trainer {said}"), "the first is the cause"
    back = (75, BACK.format(1).replace("most 2", "most 50"))
    assert ended_node(tmp_path / "stops", code=75) == back
    assert ended_node(tmp_path / "interrupted", code=130) == back
    assert ended_node(tmp_path / "stopped", before="kill -TERM $PPID") == back
    assert ended_node(tmp_path / "restarts", "train.max_restarts=2") == back  # the agents decide
    (tmp_path / "late/servers/7.0").mkdir(parents=True)
    (tmp_path / "late/servers/7.0/trainer-ended").touch()
    assert ended_node(tmp_path / "late") == back
    assert ended_node(tmp_path / "first-stops", code=75, node=0) == back


def test_the_roles_get_the_processors_that_the_job_asked_for(tmp_path: Path) -> None:
    shown = 'echo "${SRUN_CPUS_PER_TASK-all}"'
    assert batch(tmp_path, job(), shown)[1] == "all\n"
    assert batch(tmp_path, job(), shown, SLURM_CPUS_PER_TASK="64")[1] == "64\n"


def test_the_warning_reaches_the_trainer_alone(tmp_path: Path) -> None:
    """And a job that has started nothing yet just goes back."""
    ready = tmp_path / "ready"
    trainer = f"(trap 'exit 75' USR1; touch {ready}; while :; do sleep 0.01; done) & pids[0]=$!; sleep 1000 & pids[1]=$!"
    warned = f"until test -e {ready}; do sleep 0.01; done; kill -USR1 $$; wait ${{pids[0]}}; code=$?"
    code, said = batch(tmp_path, job(), f"{trainer}; {warned}; kill ${{pids[1]}} && echo servers live; exit $code")
    assert (code, said.splitlines()[0]) == (75, "servers live")
    assert batch(tmp_path, job(), "kill -USR1 $$; sleep 10")[0] == 75


def test_servers_wait_for_the_trainer_that_saves(tmp_path: Path) -> None:
    """SIGTERM comes to all processes of a job; a role that ended before the trainer would end the job."""
    told = tmp_path / "told"
    python = write_script(tmp_path / "python", f"echo $$ > {told}.new\nmv {told}.new {told}\nexec sleep 1000")
    script = script_of("serve", job(f"output={tmp_path}", "train.grace_s=1000", f"cluster.rollout_python={python}"))
    environment = {"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    process = subprocess.Popen(["bash", "-c", script], env=environment, start_new_session=True)
    try:
        assert eventually(told.exists)
        os.killpg(process.pid, signal.SIGUSR1)  # for the trainer
        os.killpg(process.pid, signal.SIGTERM)
        assert gone(int(told.read_text()))
        assert process.poll() is None
        (tmp_path / "servers" / "7.0").mkdir(parents=True)
        (tmp_path / "servers" / "7.0" / "trainer-ended").touch()
        assert process.wait(TIMEOUT_S) == 128 + signal.SIGTERM
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_the_git_state_names_commit_and_changes(tmp_path: Path) -> None:
    assert submission([], tmp_path)["git"] == {}
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    git += ["-c", "commit.gpgsign=false", "-c", f"core.hooksPath={os.devnull}"]
    (tmp_path / "file").write_text("one\n")
    for arguments in (["init", "-q"], ["add", "file"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *arguments], check=True)
    (tmp_path / "file").write_bytes(b"two \xe9\n")
    found = submission([], tmp_path)["git"]
    assert len(found["commit"]) == 40
    assert found["status"] == [" M file"]
    assert "+two \\xe9" in found["diff"]


@pytest.mark.parametrize("imported", ["importlib.metadata", "importlib_metadata"])
def test_the_record_leaves_out_interrupted_installations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, imported: str
) -> None:
    pytest.importorskip(imported)  # the second one finds distributions for the first one, too
    (tmp_path / "broken-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert "pytest" in submission([], tmp_path)["launcher"]["packages"]


def test_a_gpu_job_without_transformer_engine_ends_with_one_sentence(tmp_path: Path) -> None:
    done = run_python("-m", "tepo_megatron.launch.record", tmp_path / "job.json", "torch", "no-such-distribution", code=1)
    assert "torch" in json.loads((tmp_path / "job.json").read_text())["packages"]
    assert done.stderr.startswith("error: no-such-distribution is not installed in ")


@pytest.mark.parametrize("node", [0, 1])
def test_each_node_ends_at_once_if_it_lacks_a_package_and_the_first_writes_the_record(tmp_path: Path, node: int) -> None:
    """With restarts Slurm would end no other node, and they would wait for each other."""
    text = f'echo "$2 $3" >>{tmp_path}/told\n[[ $2 == tepo_megatron.launch.record ]] && exit 3'
    python = write_script(tmp_path / "python", text)
    config = job(f"output={tmp_path}", "cluster.train_nodes=2", "train.max_restarts=2", f"cluster.python={python}")
    assert bash(script_of("train", config), "10.0.0.7", SLURM_JOB_ID="7", SLURM_NODEID=str(node)).returncode == 3
    file = "/dev/null" if node else f"{tmp_path}/launch/7.0.json"
    assert (tmp_path / "told").read_text() == f"tepo_megatron.launch.record {file}\n"


def test_launching_without_nemo_run_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nemo_run", None)  # its import fails
    done = invoke("launch", ROOT / "examples" / "tiny" / "run.yaml", "--dry-run", *CLUSTER, code=1)
    assert done.stderr.startswith("error: tepo launch needs NeMo-Run")
    assert len(done.stderr.splitlines()) == 1


def test_json_without_a_dry_run_submits_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that reads JSON would get none, and the job would run."""
    monkeypatch.setattr("tepo_megatron.cli.launch._launch", lambda *_: pytest.fail("submitted"))
    words = ["launch", ROOT / "examples" / "tiny" / "run.yaml", "--executor", "local", "output=/shared/out"]
    done = invoke(*words, "--json", code=1)
    assert done.stderr.startswith("error: --json shows what --dry-run does;")
    assert json.loads(invoke(*words, "--json", "--dry-run").stdout).keys() == {"plan", "scripts"}


def test_what_does_not_fit_is_planned_and_launched_with_a_warning_if_memory_is_not_checked() -> None:
    words = [ROOT / "examples" / "llama3.3-70b" / "run.yaml", "cluster.gpu_memory_gib=40", "cluster.executor=kubernetes"]
    words += ["cluster.container=image", "cluster.mounts=['claim:/shared']", "output=/shared/out"]
    for command in (["plan"], ["launch", "--dry-run"]):
        refused = invoke(*command, *words, code=1)
        assert refused.stderr.endswith("; engine.check_memory = false tries it all the same ('tepo plan' shows each term)\n")
        done = invoke(*command, *words, "engine.check_memory=false")
        (warning,) = re.findall("^warning: the run does not fit: a training rank needs .*", done.stderr, re.MULTILINE)
        assert warning.removeprefix("warning") == refused.stderr.rpartition(";")[0].removeprefix("error")


SET = {
    **{"MODEL": "model.path", "TRAIN_DATA": "data.train", "HELDOUT_DATA": "data.heldout", "ACCOUNT": "cluster.account"},
    **{"PARTITION": "cluster.partition", "CONTAINER": "cluster.container", "NODE_PYTHON": "cluster.python"},
}
"""Variables of the 70B script, and what they set."""


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize("unset", ["", "Not set yet; set it:\n  - c: d\n"])
def test_the_70b_script_submits_what_is_set_and_ends_with_what_is_not(tmp_path: Path, unset: str, dry_run: bool) -> None:
    """With a ``tepo`` that prints what it would submit; what a plan says: tests/unit/plan/test_run_plan.py. It plans once."""
    for folder in ("scripts", ".venv-launch/bin"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "scripts/run_tepo_70b.sh").write_bytes((ROOT / "scripts/run_tepo_70b.sh").read_bytes())
    write_script(tmp_path / "scripts/setup_launch.sh", "true")
    tepo = 'echo "$1" >>calls; [[ $1 == doctor ]] || echo "$@"; [[ $1 != plan && $* != *--dry-run ]] || printf "$UNSET"'
    write_script(tmp_path / ".venv-launch/bin/tepo", tepo + '; [[ $1 != launch ]] || { printf "\n===== a script\n"; exit 3; }')
    words = [*(["--dry-run"] if dry_run else []), "--executor", "slurm", "--executor=kubernetes", "train.steps=5"]
    environment = {"PATH": os.environ["PATH"], "CDPATH": str(tmp_path), "UNSET": unset, "RUN": "r.yaml"}
    command, env = ["bash", "scripts/run_tepo_70b.sh", *words], environment | dict.fromkeys(SET, "a b")
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 3, "launch's own exit code"
    assert (tmp_path / "calls").read_text().split() == ["doctor", *([] if dry_run else ["plan"]), "launch"]
    submitted = ["r.yaml", *(f"{field}=a b" for field in SET.values()), "cluster.executor=slurm", "cluster.executor=kubernetes"]
    run = " ".join([*submitted, "train.steps=5"])
    plan = f"launch {run} --dry-run\n{unset}" if dry_run else f"plan {run}\n{unset}launch {run}\n"
    sentence = f"{', '.join(SET).replace(', NODE', ' and NODE')} at the head of scripts/run_tepo_70b.sh set these.\n"
    assert done.stdout == f"{plan}\n===== a script\n" + (unset and unset + sentence)
