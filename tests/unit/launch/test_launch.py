"""What a job is made of: scripts that do what they say, the configuration that nodes read, and what is refused before."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tepo_megatron.cli.launch import _launch
from tepo_megatron.config import RunConfig
from tepo_megatron.config.load import load_run
from tepo_megatron.config.paths import paths_in
from tepo_megatron.launch.cluster import ClusterRun
from tepo_megatron.launch.job import Job, on_nodes
from tepo_megatron.launch.record import submission
from tests.support.cli import invoke
from tests.support.processes import eventually
from tests.support.programs import TIMEOUT_S, run_python
from tests.support.shell import bash, write_script

ROOT = Path(__file__).parents[3]
CLUSTER = ["engine.platform=cpu", "engine.parallel.tp=2", "cluster.gpus_per_node=2", "cluster.rollout_nodes=1"]


def job(*overrides: str) -> RunConfig:
    return on_nodes(load_run(None, [*CLUSTER, *overrides]))


def script_of(role: str, config: RunConfig) -> str:
    (script,) = (each.script for each in Job(config).roles if each.name == role)
    return script


class Shell:
    """A tunnel to this machine, without NeMo-Run."""

    def run(self, command: str, *, hide: bool = True, **options: Any) -> Any:
        done = subprocess.run(command, shell=True, capture_output=True, text=True)
        if not hide:
            options.get("out_stream", sys.stdout).write(done.stdout)
        return SimpleNamespace(ok=done.returncode == 0, stdout=done.stdout, stderr=done.stderr)

    def put(self, source: str, target: str) -> None:
        Path(target).write_bytes(Path(source).read_bytes())


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
    train, serve = Job(job(*settings)).roles
    assert (train.first_node, train.nodes, serve.first_node, serve.nodes) == (0, 3, 3, 1)


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


def test_nodes_do_not_wait_for_each_other_at_a_loopback_address(tmp_path: Path) -> None:
    config = job(f"output={tmp_path}", "cluster.train_nodes=2", "engine.parallel.dp=2", "cluster.python=/bin/true")
    done = bash(script_of("train", config), "127.0.1.1")
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


@pytest.mark.parametrize("role", ["train", "serve"])
def test_setup_may_read_a_variable_that_is_not_set(role: str) -> None:
    assert bash(script_of(role, job("output=/o", "cluster.setup=['exit 3$LD_LIBRARY_PATH']"))).returncode == 3


def test_the_nodes_read_absolute_paths_and_external_servers() -> None:
    config = job("output=out/x", "data.train=d/train.jsonl", "model.path=builtin:tiny")
    assert config.output == Path.cwd() / "out" / "x"
    assert config.data.train == str(Path.cwd() / "d" / "train.jsonl")
    assert config.model.path == "builtin:tiny"
    assert config.rollout.server.placement == "external"
    assert config.rollout.server.registry == config.output / "servers"
    assert job("cluster.rollout_nodes=0").rollout.server.placement == "local"
    assert Job(config).mounts == [f"{Path.cwd()}/d:{Path.cwd()}/d", f"{config.output}:{config.output}"]


OTHER_PATHS = {
    "model": "{path: /m/model, shards: /m/shards, lora: {path: /m/lora}}",
    "teachers.a.path": "/t/teacher",
    "objective.preset": "on_policy_distill",
    "train.resume": "true",
    "train.resume_from": "/e/checkpoints/step_000007",
    "environment": "{name: guess_number, key_file: /k/key}",
    "cluster.ssh_identity": "/home/me/.ssh/key",
}


def test_every_path_of_the_run_is_mounted() -> None:
    config = job("output=/o", "cluster.rollout_nodes=0", *(f"{field}={value}" for field, value in OTHER_PATHS.items()))
    folders = ("/e/checkpoints/step_000007", "/k", "/m/lora", "/m/model", "/m/shards", "/o", "/t/teacher")
    assert Job(config).mounts == [f"{folder}:{folder}" for folder in folders]


OWN_CODE = {
    "reward.verifier": "r/score.py:f",
    "data.filter": "[unique,c/choose.py:f]",
    "data.order": "c/choose.py:g",
    "data.train": "[{path: /d/a.jsonl, name: a, verifier: 's/score.py:f', filter: ['c/own.py:f']}, {path: b.jsonl}]",
    "evaluate.sets": "{aime: {path: /d/aime.jsonl, verifier: 'e/score.py:f'}}",
    "rollout.filter_groups.filters": "['g/groups.py:keep']",
    "train.callbacks": "['k/call.py:Early', {callback: 'k/back.py:Late', kwargs: {at: 'k/stays.py:f'}}]",
}
OWN_FILES = "r/score c/choose s/score c/own e/score g/groups k/call k/back"


def test_own_code_is_named_absolutely_mounted_and_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = job("output=/o", "cluster.rollout_nodes=0", *(f"{field}={value}" for field, value in OWN_CODE.items()))
    paths = {path for path in paths_in(config).values() if not path.startswith("builtin:")}
    files = ["b.jsonl", *(f"{file}.py" for file in OWN_FILES.split())]
    assert paths == {"/o", "/d/a.jsonl", "/d/aime.jsonl", *(f"{tmp_path}/{file}" for file in files)}
    assert config.train.callbacks[1].kwargs == {"at": "k/stays.py:f"}  # type: ignore[union-attr]
    assert {f"{tmp_path}/{each}:{tmp_path}/{each}" for each in "rcsegk"} <= set(Job(config).mounts)
    with pytest.raises(ValueError, match=r"reward.verifier: .*/r/score.py does not exist on this machine; put the file there"):
        ClusterRun(job(f"output={tmp_path}/new", "reward.verifier=r/score.py:f"), Shell()).check()


DISTILLED = "objective.preset=on_policy_distill"
DRAFTED = "rollout.server.speculative={draft_model: /nowhere}"
FOLDERS = ("model.lora.path", "model.shards", "rollout.replay")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["cluster.ssh=me@login", "output=out/x"], "output = 'out/x' is relative, but with cluster.ssh"),
        (["cluster.ssh=me@login", "output=/o", "data.order=c/choose.py:g"], "data.order = 'c/choose.py' is relative, but with"),
        *(([f"output=/shared/a{char}b"], f"output = .* has {re.escape(repr(char))}, which NeMo-Run's") for char in " (&$;'%"),
        (["cluster.executor=docker", "cluster.container=c", "output=/shared/a&b"], "output = .* has '&', which NeMo-Run's"),
        (["output=/o", "teachers.a.path=hub:a/b", DISTILLED], r"teachers.a.path = hub:a/b: .* 'hf download a/b --local-dir"),
        (["output=/o", "data.train=hub:a/b"], "run 'hf download a/b --repo-type dataset"),
        *((["output=/o", f"model.path=/a{char}b"], f"/a{char}b has '{char}', which divides the mounts") for char in ",:"),
    ],
)
def test_paths_that_nodes_could_not_use_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Job(job(*overrides)).mounts  # noqa: B018


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.path=/nowhere"], "model.path = /nowhere has no config.json on this machine"),
        (["teachers.a.path=/nowhere", DISTILLED, "model.path={used}"], "teachers.a.path = /nowhere has no config.json on this"),
        ([DRAFTED], "rollout.server.speculative.draft_model = /nowhere has no config.json on this machine"),
        (["data.train=/nowhere.jsonl"], "data.train = /nowhere.jsonl does not exist"),
        *(([f"{field}=/nowhere"], f"{field} = /nowhere does not exist .* a folder there") for field in FOLDERS),
        (["cluster.container=/images/none.sqsh"], "the container image /images/none.sqsh does not exist"),
        (["train.resume=true"], "has no finished checkpoint"),
        (["train.resume=true", "train.resume_from=step_000004"], "/checkpoints/step_000004 is no checkpoint on this machine"),
        (["train.resume=true", "train.resume_from=a/step_000004"], "/a/step_000004 is no checkpoint on this machine"),
        (["output={used}"], "already holds a run"),
    ],
)
def test_what_the_cluster_lacks_is_one_sentence(overrides: list[str], message: str, tmp_path: Path) -> None:
    used = tmp_path / "used"
    used.mkdir()
    (used / "metrics.jsonl").write_text('{"step": 0, "lr": 1}\n{"step": 1}\n')
    (used / "config.json").touch()
    config = job(f"output={tmp_path}/new", *(override.replace("{used}", str(used)) for override in overrides))
    with pytest.raises(ValueError, match=message) as caught:
        ClusterRun(config, Shell()).check()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("status", ["PENDING", "COMPLETING", "COMPLETED", ""])
def test_a_second_submission_replaces_no_file_of_a_job_that_waits_or_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    """``status``: Slurm's, which answers with an error where it is empty."""
    for name in ("squeue", "scontrol", "sacct"):
        write_script(tmp_path / name, f"echo {status}" if status and name == "squeue" else "exit 1")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    run = ClusterRun(job(f"output={tmp_path}/out"), Shell())
    run.upload({"train.sh": "sleep 1\n"}, {})
    run.save_job("4711")
    if status not in ("PENDING", "COMPLETING"):
        run.check()
        return
    with pytest.raises(ValueError, match=rf"job 4711 of output .* is {status}, .* cancel it \(tepo launch cancel /.*/resolved"):
        run.check()


def test_files_are_replaced_at_once_and_the_jobs_number_is_shown_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bash that runs a script reads it as it goes, and a job without a number could not be cancelled."""
    run = ClusterRun(job(f"output={tmp_path}/out"), Shell())
    run.upload({"train.sh": "first\n"}, {})
    with (tmp_path / "out/launch/train.sh").open() as read_by_bash:
        run.upload({"train.sh": "second\n"}, {})
        assert read_by_bash.read() == "first\n"
    assert (tmp_path / "out/launch/train.sh").read_text() == "second\n"
    monkeypatch.setattr("tepo_megatron.launch.nemo.connect", lambda _: run)
    monkeypatch.setattr("tepo_megatron.launch.nemo.submit", lambda _: "4711")
    monkeypatch.setattr(ClusterRun, "save_job", Mock(side_effect=OSError("no disk")))
    with pytest.raises(OSError, match="no disk"):
        _launch(run.config, {}, "")
    assert capsys.readouterr().out.startswith("submitted job 4711; see: tepo launch status")


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


def ended_node(output: Path, *overrides: str, before: str = "", code: int = 1) -> tuple[int, str]:
    """What the batch does if its second training node ends so, and the first is then stopped as a preempted one is."""
    config = job(f"output={output}", "cluster.train_nodes=2", f"cluster.python={output}/python", *overrides)
    output.mkdir(exist_ok=True)
    write_script(output / "python", f"{before}\nexit {code}")
    script = script_of("train", config)
    assert bash(script, "10.0.0.1", SLURM_JOB_ID="7", SLURM_NODEID="1").returncode == code
    return batch(output, config, "exit 75")


def test_a_job_whose_node_fails_by_itself_does_not_go_back(tmp_path: Path) -> None:
    """srun stops the others, and the first node ends as if it were preempted."""
    said = (
        "error: node 1 of the trainer ended with exit code 1, so that job 7 does not go back into the queue; its log says why\n"
    )
    assert ended_node(tmp_path / "fails") == (1, said)
    back = (75, BACK.format(1).replace("most 2", "most 50"))
    assert ended_node(tmp_path / "stops", code=75) == back
    assert ended_node(tmp_path / "stopped", before="kill -TERM $PPID") == back
    assert ended_node(tmp_path / "restarts", "train.max_restarts=2") == back  # the agents decide
    (tmp_path / "late/servers/7.0").mkdir(parents=True)
    (tmp_path / "late/servers/7.0/trainer-ended").touch()
    assert ended_node(tmp_path / "late") == back


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
    python = write_script(tmp_path / "python", f"touch {told}\nexec sleep 1000")
    script = script_of("serve", job(f"output={tmp_path}", "train.grace_s=1000", f"cluster.rollout_python={python}"))
    environment = {"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    process = subprocess.Popen(["bash", "-c", script], env=environment, start_new_session=True)
    try:
        assert eventually(told.exists)
        os.killpg(process.pid, signal.SIGUSR1)  # for the trainer
        os.killpg(process.pid, signal.SIGTERM)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        assert eventually(lambda: "python" not in children.read_text())
        assert process.poll() is None
        (tmp_path / "servers" / "7.0").mkdir(parents=True)
        (tmp_path / "servers" / "7.0" / "trainer-ended").touch()
        assert process.wait(TIMEOUT_S) == 128 + signal.SIGTERM
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_an_image_without_transformer_engine_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_script(tmp_path / "unsquashfs", "cat $2")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    image = tmp_path / "trainer.sqsh"
    config = job("engine.platform=cuda", f"cluster.container={image}", f"output={tmp_path}/out")
    image.write_text("squashfs-root/lib/torch/__init__.py\n")
    with pytest.raises(ValueError, match=r"has no Transformer Engine"):
        ClusterRun(config, Shell()).check()
    assert " transformer-engine" in script_of("train", config)
    without = job("engine.platform=cuda", "engine.layers=local", f"cluster.container={image}", f"output={tmp_path}/out")
    ClusterRun(without, Shell()).check()
    assert " transformer-engine" not in script_of("train", without)
    image.write_text("squashfs-root/lib/transformer_engine/__init__.py\n")
    ClusterRun(config, Shell()).check()


def test_links_that_lead_out_of_a_containers_mounts_are_refused(tmp_path: Path) -> None:
    """Such as Hugging Face's cache. A folder that is itself a link is mounted by its name."""
    for folder in ("blobs", "model", "data"):
        (tmp_path / folder).mkdir()
    (tmp_path / "blobs/a").touch()
    (tmp_path / "model/config.json").touch()
    (tmp_path / "linked").symlink_to("model")
    fields = [f"output={tmp_path}/out", "cluster.container=registry/image:1", f"model.path={tmp_path}/linked"]
    ClusterRun(job(*fields), Shell()).check()
    (tmp_path / "data/a.jsonl").symlink_to("../blobs/a")
    (tmp_path / "model/model.safetensors").symlink_to("../blobs/a")
    data = f"data.train={tmp_path}/data/a.jsonl"
    for field, settings in (("model.path", fields), ("data.train", [*fields[:2], data])):
        with pytest.raises(ValueError, match=rf"{field} = .* a link to {tmp_path}/blobs/a, which the container"):
            ClusterRun(job(*settings), Shell()).check()
    ClusterRun(job(*fields, data, f"cluster.mounts=['{tmp_path}/blobs:{tmp_path}/blobs']"), Shell()).check()
    ClusterRun(job(fields[0], fields[2], data), Shell()).check()  # without a container


def test_delivered_files_and_the_jobs_number_are_found_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = job("cluster.executor=local", f"output={tmp_path}/lr(1)&b", "name='a: b, # c'")
    output = config.output
    run = ClusterRun(config, Shell())
    with pytest.raises(ValueError, match="no job was submitted"):
        run.newest_job  # noqa: B018
    run.upload({"train.sh": "true\n"}, {"git": {}})
    run.save_job("42")
    assert run.newest_job == "42"
    assert (output / "launch" / "train.sh").read_text() == "true\n"
    assert load_run(output / "launch" / "run.yaml") == load_run(output / "resolved.yaml") == config
    with pytest.raises(ValueError, match=r"there is no .*/train-42\.\*-node\*\.log yet"):
        run.show_logs("train", None, 20, follow=False)
    before, after = (output / "logs" / f"train-42.0-node{node}.log" for node in (1, 2))
    before.write_text("\0[rank 1] nought\n[rank 1] one\n[rank 8] old\n")
    after.write_text("[rank 8] a\n[rank 8] [rank 1] b\n[rank 8] \x1b[2Jc\n[rank 18] d\n")  # rank 8 has started again there
    (output / "logs" / "train-41.0-node1.log").write_text("[rank 8] of another job\n")
    run.show_logs("train", 8, 2, follow=False)
    shown = [f"==> {before} <==", "[rank 8] old", f"==> {after} <==", "[rank 8] [rank 1] b", r"[rank 8] \u001b[2Jc"]
    assert capsys.readouterr().out.split("\n") == [*shown, ""]
    run.show_logs("train", None, 1, follow=False)
    assert [line for line in capsys.readouterr().out.split("\n") if line.startswith("[")] == ["[rank 8] old", "[rank 18] d"]
    with pytest.raises(ValueError, match=r"rank 9 has no line in .*/train-42\.\*-node\*\.log yet"):
        run.show_logs("train", 9, 2, follow=False)
    with pytest.raises(ValueError, match="a rank is the trainer's, and --role serve has none"):
        run.show_logs("serve", 8, 2, follow=False)


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


SET = {
    **{"MODEL": "model.path", "TRAIN_DATA": "data.train", "HELDOUT_DATA": "data.heldout", "ACCOUNT": "cluster.account"},
    **{"PARTITION": "cluster.partition", "CONTAINER": "cluster.container", "NODE_PYTHON": "cluster.python"},
}
"""Variables of the 70B script, and what they set."""


@pytest.mark.parametrize("unset", ["", "Not set yet; set it:\n  - c: d\n"])
def test_the_70b_script_submits_what_is_set_and_ends_with_what_is_not(tmp_path: Path, unset: str) -> None:
    """With a ``tepo`` that prints what it would submit; what a plan says: tests/unit/plan/test_run_plan.py."""
    for folder in ("scripts", ".venv-launch/bin"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "scripts/run_tepo_70b.sh").write_bytes((ROOT / "scripts/run_tepo_70b.sh").read_bytes())
    write_script(tmp_path / "scripts/setup_launch.sh", "true")
    tepo = 'case $1 in plan) printf "Assumed:\n  - a: b\n$UNSET" ;; launch) echo "$@" && exit 3 ;; esac'
    write_script(tmp_path / ".venv-launch/bin/tepo", tepo)
    words = ["--dry-run", "--executor", "slurm", "--executor=kubernetes", "train.steps=5"]
    environment = {"PATH": os.environ["PATH"], "CDPATH": str(tmp_path), "UNSET": unset, "RUN": "r.yaml"}
    command, env = ["bash", "scripts/run_tepo_70b.sh", *words], environment | dict.fromkeys(SET, "a b")
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 3, "launch's own exit code"
    submitted = ["r.yaml", *(f"{field}=a b" for field in SET.values()), "cluster.executor=slurm", "cluster.executor=kubernetes"]
    head = " ".join(["launch", *submitted, "train.steps=5", "--dry-run\n"])
    sentence = f"{', '.join(SET).replace(', NODE', ' and NODE')} at the head of scripts/run_tepo_70b.sh set these.\n"
    assert done.stdout == head + (unset and unset + sentence)
