"""Models and data by their name on the hub: a server on this machine answers as the hub does."""

import json
from collections.abc import Iterator
from hashlib import sha1
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from tepo_megatron.config.data import SourceConfig
from tepo_megatron.config.load import load_run
from tepo_megatron.run.api import prepare_run
from tepo_megatron.runtime.hub import download_advice, hub_folder
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.tasks.data.problems import load_problems
from tepo_megatron.tools.faults.workshop import make_rollouts
from tests.support.cli import invoke
from tests.support.data_files import write_jsonl
from tests.support.http_server import Answer, http_server
from tests.support.programs import run_python

COMMIT = "a" * 40
UNUSED = ("consolidated.safetensors", "onnx/model.safetensors", "training_args.bin")
EXAMPLES = Path(__file__).parents[3] / "examples"


def blob(data: bytes) -> str:
    return sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def answering(repositories: dict[str, Path], asked: list[str]) -> Answer:
    """``repositories``: such as ``models/me/mine`` → its folder."""

    def answer(path: str, _headers: Any, _body: bytes) -> tuple[int, bytes, dict[str, str]]:
        asked.append(path)
        for name, folder in repositories.items():
            files = {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
            if path.startswith(f"/api/{name}/revision/main"):
                siblings = [{"rfilename": file} for file in files]
                return 200, json.dumps({"id": name.partition("/")[2], "sha": COMMIT, "siblings": siblings}).encode(), {}
            if path.startswith(f"/api/{name}/tree/{COMMIT}"):
                entries = [{"type": "file", "path": file, "size": len(data), "oid": blob(data)} for file, data in files.items()]
                more = [{"type": "file", "path": path, "size": 9, "oid": blob(b"")} for path in UNUSED if "models" in name]
                return 200, json.dumps([*entries, *more]).encode(), {}
            place = f"/{name.removeprefix('models/')}/resolve/{COMMIT}/"
            if path.startswith(place) and path.removeprefix(place) in files:
                data = files[path.removeprefix(place)]
                return 200, data, {"X-Repo-Commit": COMMIT, "ETag": f'"{blob(data)}"'}
        return 401, b"{}", {}  # as the hub answers about what it does not have

    return answer


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What was asked of it. It has the model me/tiny and the data me/sums."""
    (tmp_path / "sums/main").mkdir(parents=True)
    rows = [{"prompt": f"{number}+1=", "answer": number + 1} for number in range(9)]
    write_jsonl(tmp_path / "sums" / "train.jsonl", rows)
    (tmp_path / "sums/main/train-00000-of-00001.tsv").write_text("prompt\tanswer\n0+1=\t1\n1+1=\t2\n")
    asked: list[str] = []
    repositories = {"models/me/tiny": resolve_model_path("builtin:tiny"), "datasets/me/sums": tmp_path / "sums"}
    with http_server(answering(repositories, asked)) as address:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
        yield asked


def test_a_model_and_its_problems_are_downloaded_once(hub: list[str]) -> None:
    folder = resolve_model_path("hub:me/tiny")
    local = resolve_model_path("builtin:tiny")
    used = {file.name for file in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.model"} <= used <= {file.name for file in local.iterdir()}
    assert all((folder / name).read_bytes() == (local / name).read_bytes() for name in used)
    assert [problem.answer for problem in load_problems("hub:me/sums/main")] == ["1", "2"]
    assert not [path for path in hub if path.endswith("/train.jsonl")]
    assert [problem.answer for problem in load_problems(SourceConfig(path="hub:me/sums"))] == [str(n + 1) for n in range(9)]
    hub.clear()
    assert resolve_model_path("hub:me/tiny") == folder
    assert not [path for path in hub if "/resolve/" in path]


def test_a_rank_takes_what_was_downloaded_and_asks_for_nothing(hub: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = hub_folder("hub:me/tiny", "model")
    hub.clear()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert hub_folder("hub:me/tiny", "model") == folder
    with pytest.raises(
        ValueError, match=r"hub:me/sums is not in this machine's cache.* 'hf download me/sums --repo-type dataset"
    ):
        hub_folder("hub:me/sums", "dataset")
    assert hub == []


def test_a_plan_downloads_the_shape_alone(hub: list[str]) -> None:
    invoke("plan", EXAMPLES / "tiny/run.yaml", "model.path=hub:me/tiny")
    assert {path.rpartition("/")[2] for path in hub if "/resolve/" in path} == {"config.json"}
    hub.clear()
    done = invoke("plan", EXAMPLES / "qwen2.5-7b/run.yaml", "model.path=hub:Qwen/Qwen2.5-7B")
    assert "shapes are those published for Qwen2.5-7B" in " ".join(done.stdout.split())
    assert hub == []


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("hub:nobody/nothing", "hub:nobody/nothing cannot be downloaded from the Hugging Face hub: "),
        ("hub:me/tiny/onnx", "names nothing on the Hugging Face hub; write hub:ORGANISATION/NAME"),
        ("hub:../../etc", "names nothing on the Hugging Face hub; write hub:ORGANISATION/NAME"),
    ],
)
def test_what_the_hub_lacks_is_said_in_a_sentence(path: str, message: str, hub: list[str]) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_model_path(path)


def test_a_job_of_several_nodes_is_refused_and_says_what_to_run() -> None:
    done = invoke("launch", "--dry-run", EXAMPLES / "llama3.3-70b/run.yaml", "model.path=hub:a/b@c", code=1)
    command = "hf download a/b --repo-type dataset --revision c --local-dir FOLDER"
    assert download_advice("hub:a/b/main/x@c", "dataset", "here") == f"run '{command}' here, and name FOLDER/main/x"
    advice = "run 'hf download a/b --revision c --local-dir FOLDER' on a disk that all of them see, and name FOLDER"
    assert f"the nodes of a job download nothing; {advice}\n" in " ".join(done.stderr.split()) + "\n"


def test_the_models_of_a_run_are_downloaded_before_ranks_start(hub: list[str], tmp_path: Path) -> None:
    teacher = ["teachers.old.path=hub:me/tiny", "objective.distill.coefficient=0.5"]
    prepare_run(load_run(None, [f"output={tmp_path}/out", *teacher]))
    assert any(path.startswith("/me/tiny/resolve/") for path in hub)


@pytest.mark.usefixtures("hub")
def test_without_the_hub_nothing_is_written_or_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    rows = tmp_path / "out/metrics.jsonl"
    rows.parent.mkdir()
    rows.write_text('{"step": 1}\n')
    with pytest.raises(ValueError, match="hub:me/tiny is not in this machine's cache, and the hub cannot be reached from here"):
        prepare_run(
            load_run(None, [f"output={tmp_path}/out", "model.path=hub:me/tiny", "data.train=builtin:addition"]), overwrite=True
        )
    assert list(rows.parent.iterdir()) == [rows]


@pytest.mark.slow
@pytest.mark.usefixtures("hub")
def test_a_run_trains_a_model_of_the_hub(tmp_path: Path) -> None:
    rollouts = make_rollouts(tmp_path / "rollouts", 1)
    settings = ["model.path=hub:me/tiny", "evaluate.every=0", "train.steps=1", f"output={tmp_path}/out"]
    settings += ["rollout.prompts_per_step=4", "rollout.samples_per_prompt=4", "rollout.sampling.max_new_tokens=24"]
    settings += [f"rollout.replay={rollouts}", "log.tensorboard=false", "log.curves=false"]
    environment = {"HF_HUB_CACHE": f"{tmp_path}/empty", "HF_ENDPOINT": constants.ENDPOINT}
    run_python("-m", "tepo_megatron", "train", *settings, environment=environment)
    assert (tmp_path / "out/model/model.safetensors").exists()
