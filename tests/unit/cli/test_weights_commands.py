"""``tepo checkpoint``, ``tepo import`` and ``tepo export``, as a user meets them."""

import json
import os
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tepo_megatron.config import RunConfig
from tepo_megatron.config.load import dump_resolved, load_run
from tepo_megatron.run.checks import check_model
from tepo_megatron.runtime.run_lock import RunLock
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.trainer.run_compatibility import describe_run
from tests.support.checkpoints import DAMAGES, flip_bit, make_whole, shards
from tests.support.cli import invoke

MODEL = resolve_model_path("builtin:tiny")


def tepo(*arguments: object, code: int = 0) -> str:
    """Everything that was printed, as one line: tables break theirs where they are full."""
    done = invoke(*arguments, code=code)
    return " ".join(f"{done.stdout} {done.stderr}".split())


run = partial(tepo, "checkpoint")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A run with three checkpoints and one that was cut off an hour ago."""
    identity = describe_run(load_run(None, ["engine.parallel.dp=3"]), MODEL)
    for step in (2, 4, 6):
        make_whole(tmp_path / "checkpoints", step, identity=identity)
    cut_off = tmp_path / "checkpoints" / "step_000008.partial"
    cut_off.mkdir()
    (cut_off / "shard").write_bytes(bytes(1_500_000))
    for path in (cut_off / "shard", cut_off):
        os.utime(path, (time.time() - 3600,) * 2)
    return tmp_path


def names(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").iterdir())


WHOLE = ["step_000002", "step_000004", "step_000006"]


def test_list_shows_every_checkpoint_and_what_is_wrong_with_it(out: Path) -> None:
    shards(out / "checkpoints" / "step_000004")[0].unlink()
    shown = run("list", out)
    for words in ("step_000002", "8", "1 × 1 × 3", "files are there", "damaged: shards/rank00000-00001.safetensors is missing"):
        assert words in shown
    assert "step_000008.partial" in shown
    assert "1.5 MB" in shown
    assert run("list", out / "checkpoints") == shown


@pytest.mark.parametrize(
    ("options", "settings", "kept"),
    [
        ([], None, ["step_000004", "step_000006"]),
        (["--keep", "1"], [], ["step_000006"]),
        (["--keep", "1", "--every", "2"], [], WHOLE),
        (["--keep", "9"], None, WHOLE),
        (["--keep", "1"], ["train.keep_every=2"], WHOLE),
        (["--keep", "1", "--every", "4"], ["train.keep_every=2"], ["step_000004", "step_000006"]),
        (["--keep", "1"], ["train.keep_best.metric=reward/mean"], ["step_000002", "step_000006"]),
    ],
)
def test_prune_keeps_what_it_and_the_run_are_told_to(
    options: list[str], settings: list[str] | None, kept: list[str], out: Path
) -> None:
    if settings is not None:
        written = dump_resolved(load_run(None, ["output=elsewhere", *settings]))
        (out / "resolved.yaml").write_text(f"{written}\nof_another_version: 1\n")
    rows = [json.dumps({"step": step, "reward/mean": -step}) + "\n" for step in (2, 4, 6)]
    (out / "metrics.jsonl").write_text("".join(rows))
    before = names(out)
    said = run("prune", out, *options, "--dry-run")
    assert names(out) == before
    assert said.count("would delete") == len(before) - len(kept)
    said = run("prune", out, *options)
    assert names(out) == kept
    assert said.count("deleted") == len(before) - len(kept)
    assert f"{len(kept)} checkpoints kept" in said
    if any("keep_best" in setting for setting in settings or ()):
        (out / "metrics.jsonl").unlink()
        assert "metrics.jsonl is missing" in run("prune", out, code=1)


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("no state", "state.json is missing"),
        ("a zeroed block", "shards/rank00000-00001.safetensors was changed since it was written"),
    ],
)
def test_verify_names_damage_and_prune_counts_no_damaged_one_nor_what_a_run_may_be_writing(
    kind: str, problem: str, out: Path
) -> None:
    folder = out / "checkpoints" / "step_000006"
    run("verify", out)
    damage, words = DAMAGES[kind]
    damage(folder, out / "checkpoints" / "step_000004")
    shown = run("verify", out, code=1)
    assert (words in shown, shown.count("whole: ")) == (True, 2)
    run("verify", folder, code=1)
    run("verify", out / "checkpoints" / "step_000002")
    (out / "step_penalty").symlink_to(out, target_is_directory=True)  # a run's name may begin like a checkpoint's
    assert run("verify", out / "step_penalty", code=1) == shown
    (out / "checkpoints" / "step_000010.partial").mkdir()
    (out / "checkpoints" / "step_000001.abandoned").mkdir()
    said = run("prune", out, "--keep", "1")
    assert names(out) == ["step_000004", "step_000006", "step_000010.partial"]
    assert f"left: step_000006 is damaged ({problem})" in said
    assert "a run may be writing it" in said
    os.utime(out / "checkpoints" / "step_000010.partial", (1, 1))
    lock = RunLock(out)
    lock.take()  # one that rests until the next step has ended
    run("prune", out, "--keep", "1")
    lock.release()
    assert "step_000010.partial" in names(out)
    run("prune", out, "--keep", "1")
    assert "step_000010.partial" not in names(out)


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_prune_follows_no_link(options: list[str], out: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    whole, parent = make_whole(elsewhere, 1), out / "checkpoints"
    (parent / whole.name).symlink_to(whole)
    (parent / "step_000003.partial").symlink_to(elsewhere / "nowhere")
    (parent / "step_000008.partial" / "link").symlink_to(elsewhere / "nowhere")
    os.utime(parent / "step_000003.partial", (1, 1), follow_symlinks=False)
    said = run("prune", out, "--keep", "3", *options, code=1)
    for name in (whole.name, "step_000003.partial"):
        assert f"{name} is a link to {(parent / name).readlink()} and stays; remove it by hand" in said
    assert {"manifest.json", "state.json", "shards"} <= {path.name for path in whole.iterdir()}
    parent.rename(elsewhere / "checkpoints")
    parent.symlink_to(elsewhere / "checkpoints")
    before = names(out)
    said = run("prune", out, "--keep", "1", *options, code=1)
    assert said == f"error: {parent} is a link; give {elsewhere}/checkpoints itself if its checkpoints may be deleted"
    assert names(out) == before


@pytest.mark.parametrize("command", ["list", "verify", "prune"])
def test_a_wrong_folder_is_a_sentence(command: str, tmp_path: Path) -> None:
    said = run(command, tmp_path / "nowhere", code=1)
    assert said == f"error: {tmp_path}/nowhere is no folder; give a run's output folder"
    if command != "prune":
        assert run(command, tmp_path, code=1) == f"error: {tmp_path} has no checkpoint"


def test_import_and_export_there_and_back_again(tmp_path: Path) -> None:
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    assert tepo("import", MODEL, cut, "--tp", 2, "--pp", 2) == f"wrote {cut}"
    assert len(list((cut / "shards").iterdir())) == 4
    assert tepo("export", cut, whole, "--dtype", "bfloat16") == f"wrote {whole}"
    found, expected = load_file(whole / "model.safetensors"), load_file(MODEL / "model.safetensors")
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor.bfloat16()), name
    assert (whole / "tokenizer.model").read_bytes() == (MODEL / "tokenizer.model").read_bytes()
    config = RunConfig.model_validate({"model": {"shards": str(cut)}})
    assert check_model(config) == MODEL
    path = min((cut / "shards").iterdir())
    save_file({key: tensor + 1 if "q_proj" in key else tensor for key, tensor in load_file(path).items()}, path)
    with pytest.raises(ValueError, match=r"was not imported from model\.path = .*: 2 of \d+ tensors differ"):
        check_model(config)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["import", "nowhere", "new"], "nowhere has no config.json"),
        (["import", MODEL, "new", "--tp", "3"], "tp = 3 does not divide the model's 4 attention heads"),
        (["export", MODEL, MODEL], "exists already; remove it, or give another folder"),
        (["export", "checkpoints/step_000006", "new", "--model", MODEL], "step_000006 is damaged (shards/rank00000-00001.safe"),
        (["export", "checkpoints/step_000004", "new", "--model", MODEL], "step_000004 is damaged (manifest.json is missing)"),
    ],
)
def test_a_mistake_is_a_sentence_and_leaves_nothing(
    arguments: list[object], said: str, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(out)
    flip_bit(shards(out / "checkpoints" / "step_000006")[0], 5000)
    (out / "checkpoints" / "step_000004" / "manifest.json").unlink()
    assert said in tepo(*arguments, code=1)
    assert [path.name for path in out.iterdir()] == ["checkpoints"]
