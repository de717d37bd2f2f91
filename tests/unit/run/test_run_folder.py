"""An output folder that a run may not begin in is a sentence before any rank starts; one that holds no run is no obstacle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tepo_megatron.cli.main import app
from tepo_megatron.config import RunConfig
from tepo_megatron.run.output.resume import find_checkpoint, prepare_folder
from tepo_megatron.runtime.run_lock import RunLock

ROW = '{"step": 1}\n'
FIRST_ROW = '{"step": 0, "accuracy/greedy": 0.5}\n'
RUN = Path(__file__).parents[3] / "examples" / "tiny" / "run.yaml"


def config(folder: Path, **sections: Any) -> RunConfig:
    return RunConfig.model_validate({"output": str(folder), **sections})


def content(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


@pytest.mark.parametrize("output", ["{tmp}/file", "{tmp}/file/out", "{tmp}/" + "long" * 100])
def test_what_is_no_folder_to_write_in_is_a_sentence(output: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    output = output.format(tmp=tmp_path)
    done = CliRunner().invoke(app, ["train", str(RUN), f"output={output}"])
    assert done.exit_code == 1
    assert done.stderr.startswith(f"error: output {output} cannot be written: ")
    assert "give another folder (output=…)" in done.stderr
    assert content(tmp_path) == ["file"]


@pytest.mark.parametrize(
    "left",
    [{}, {"metrics.jsonl": ""}, {"metrics.jsonl": '{"step": 0'}, {"metrics.jsonl": FIRST_ROW}, {"resolved.yaml": "name: a"}],
)
def test_a_failed_start_is_no_run(left: dict[str, str], tmp_path: Path) -> None:
    write(tmp_path, left)
    prepare_folder(config(tmp_path))
    assert content(tmp_path) == sorted(left)
    prepare_folder(config(tmp_path / "new" / "out"))
    assert not (tmp_path / "new" / "out").exists()


@pytest.mark.parametrize("left", [{"metrics.jsonl": ROW + '{"st'}, {"checkpoints/step_000003/state.json": "{}"}])
def test_a_run_is_not_written_over_unless_that_is_asked_for(left: dict[str, str], tmp_path: Path) -> None:
    write(tmp_path, left)
    with pytest.raises(ValueError, match=r"already holds a run; give another folder .*--resume.*--overwrite"):
        prepare_folder(config(tmp_path))
    prepare_folder(config(tmp_path, train={"resume": True}))
    assert content(tmp_path) == sorted(left)
    prepare_folder(config(tmp_path), overwrite=True)
    assert content(tmp_path) == []
    with pytest.raises(ValueError, match=r"starts again and train.resume = True continues"):
        prepare_folder(config(tmp_path, train={"resume": True}), overwrite=True)


def test_what_cannot_be_continued_is_not_said_to_be(tmp_path: Path) -> None:
    """Rows, and no checkpoint: neither message sends its reader to the other."""
    write(tmp_path, {"metrics.jsonl": FIRST_ROW + ROW})
    with pytest.raises(ValueError, match=r"--resume cannot continue, as it left no checkpoint, or remove .*--overwrite"):
        prepare_folder(config(tmp_path))
    with pytest.raises(ValueError, match=r"no finished checkpoint; start without --resume and with --overwrite"):
        find_checkpoint(config(tmp_path, train={"resume": True}), tmp_path)
    write(tmp_path, {"metrics.jsonl": FIRST_ROW})
    with pytest.raises(ValueError, match=r"no finished checkpoint; start without --resume$"):
        find_checkpoint(config(tmp_path, train={"resume": True}), tmp_path)


NAMES = (
    *("resolved.yaml", "samples.jsonl", "curves.png", "model/a/b", "tensorboard/events.out.tfevents.1.h"),
    *("checkpoints/step_000001/state.json", "checkpoints/step_000002.partial/shards/a", "logs/server-0.log"),
    *("rollouts/step_0000000.jsonl", "journal/step_0000001.jsonl", "journal/step_0000002.jsonl.partial"),
)
MADE = {**dict.fromkeys(NAMES, "x"), "metrics.jsonl": ROW}
OTHERS = {"launch/run.yaml": "x", "servers/17.0/key": "x", "logs/ranks/17.0/0": "x", "notes.txt": "x", "model.txt": "x"}


def test_overwriting_removes_what_a_run_made_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path, MADE | OTHERS)
    prepare_folder(config(tmp_path), overwrite=True)
    assert content(tmp_path) == sorted(OTHERS)
    assert {path.name for path in tmp_path.iterdir()} == {"launch", "servers", "logs", "notes.txt", "model.txt"}


def test_without_a_run_nothing_is_removed(tmp_path: Path) -> None:
    """A home folder that was given by mistake."""
    left = {"model/mine": "x", "logs/server-9": "x"}
    write(tmp_path, left)
    prepare_folder(config(tmp_path), overwrite=True)
    assert content(tmp_path) == sorted(left)


def test_what_the_new_run_reads_is_not_overwritten(tmp_path: Path) -> None:
    write(tmp_path, MADE)
    for section in ({"rollout": {"replay": str(tmp_path / "rollouts")}}, {"model": {"path": str(tmp_path / "model")}}):
        with pytest.raises(ValueError, match=r"--overwrite would remove what (rollout.replay|model.path) = "):
            prepare_folder(config(tmp_path, **section), overwrite=True)
    assert content(tmp_path) == sorted(MADE)


@pytest.mark.parametrize("flag", ["--overwrite", "--resume"])
def test_a_run_in_use_is_neither_overwritten_nor_resumed(flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before ranks are started."""
    monkeypatch.setattr("tepo_megatron.cli.train.start_ranks", lambda *_: pytest.fail("ranks were started"))
    write(tmp_path, MADE)
    lock = RunLock(tmp_path)
    lock.take()
    done = CliRunner().invoke(app, ["train", str(RUN), f"output={tmp_path}", flag])
    lock.release()
    assert (done.exit_code, done.stderr.count("error:")) == (1, 1)
    assert "is in use by process" in done.stderr
    assert content(tmp_path) == sorted(MADE)


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
