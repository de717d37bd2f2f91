"""What a cluster is asked before a job: paths, images, other jobs; and the files that it gets."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tepo_megatron.cli.launch import _launch
from tepo_megatron.config import RunConfig
from tepo_megatron.config.load import load_run, override
from tepo_megatron.config.paths import paths_in
from tepo_megatron.launch.cluster import ClusterRun
from tepo_megatron.launch.job import Job
from tests.support.shell import write_script
from tests.unit.launch.test_launch import job, script_of


class Shell:
    """A tunnel to this machine, without NeMo-Run."""

    def run(self, command: str, *, hide: bool = True, **options: Any) -> Any:
        done = subprocess.run(command, shell=True, capture_output=True, text=True)
        if not hide:
            options.get("out_stream", sys.stdout).write(done.stdout)
        return SimpleNamespace(ok=done.returncode == 0, stdout=done.stdout, stderr=done.stderr)

    def put(self, source: str, target: str) -> None:
        Path(target).write_bytes(Path(source).read_bytes())


def test_the_nodes_read_absolute_paths_and_external_servers() -> None:
    config = job("output=out/x", "data.train=d/train.jsonl", "model.path=builtin:tiny")
    assert config.output == Path.cwd() / "out" / "x"
    assert config.data.train == str(Path.cwd() / "d" / "train.jsonl")
    assert config.model.path == "builtin:tiny"
    assert config.rollout.server.placement == "external"
    assert config.rollout.server.registry == config.output / "servers"
    assert job("cluster.rollout_nodes=0").rollout.server.placement == "local"
    assert Job(config).mounts == [f"{Path.cwd()}/d:{Path.cwd()}/d", f"{config.output}:{config.output}"]


def test_a_replay_takes_no_nodes_of_servers() -> None:
    config = job("rollout.replay=/recorded", "cluster.rollout_container=image", "cluster.rollout_python=python3")
    assert [role.name for role in Job(config).roles] == ["train"]
    assert RunConfig.model_validate(config.model_dump(exclude_unset=True)).rollout.server.placement == "local"


OTHER_PATHS = {
    "model": "{path: /m/model, shards: /m/shards, lora: {path: /m/lora}}",
    "teachers.a.path": "/t/teacher",
    "objective.preset": "on_policy_distill",
    "train.resume": "true",
    "train.resume_from": "/e/checkpoints/step_000007",
    "environment": "{name: guess_number, key_file: /k/key}",
    "data.train": "/p",
    "data.order": "/choose.py:g",
    "cluster.ssh_identity": "/home/me/.ssh/key",
}


def test_every_path_of_the_run_is_mounted() -> None:
    config = job("output=/o", "cluster.rollout_nodes=0", *(f"{field}={value}" for field, value in OTHER_PATHS.items()))
    paths = ("/choose.py", "/e/checkpoints/step_000007", "/k", "/m/lora", "/m/model", "/m/shards", "/o", "/p", "/t/teacher")
    assert Job(config).mounts == [f"{path}:{path}" for path in paths]


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
    config = job("cluster.executor=local", "train.resume=auto", f"output={tmp_path}/lr(1)&b", "name='a: b, # c'")
    output = config.output
    run = ClusterRun(config, Shell())
    with pytest.raises(ValueError, match="no job was submitted"):
        run.newest_job  # noqa: B018
    run.upload({"train.sh": "true\n"}, {"git": {}})
    run.save_job("42")
    assert run.newest_job == "42"
    assert (output / "launch" / "train.sh").read_text() == "true\n"
    assert load_run(output / "launch" / "run.yaml") == config
    assert load_run(output / "resolved.yaml") == override(config, ["train.resume=false"])
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
