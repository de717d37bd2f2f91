"""Import and export when something goes wrong: all that is wrong is said at once, and what is finished is kept."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tepo_megatron.weights.architecture import read_model_spec
from tepo_megatron.weights.layouts import MegatronParallel, megatron_layout
from tepo_megatron.weights.storage.convert import check_imported, export_model, import_model
from tepo_megatron.weights.storage.stored import open_weights
from tests.support.convert_models import assert_same, make_checkpoint, make_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


@pytest.fixture
def checkpoint(model: Path, tmp_path: Path) -> Path:
    return make_checkpoint(model, tmp_path / "step_000001", tp=2, pp=2)


class Interrupt(BaseException):
    """As Ctrl-C: no handler for errors sees it."""


def interrupted(at: float) -> Any:
    def report(done: int, total: int) -> None:
        if done >= at * total:
            raise Interrupt

    return report


def identities(folder: Path) -> dict[str, tuple[int, int]]:
    files = (path for path in folder.rglob("*.safetensors"))
    return {str(path.relative_to(folder)): (path.stat().st_ino, path.stat().st_mtime_ns) for path in files}


@pytest.mark.parametrize("command", ["import", "export"])
def test_an_interrupted_conversion_keeps_what_is_finished(model: Path, checkpoint: Path, tmp_path: Path, command: str) -> None:
    out, partial = tmp_path / "out", tmp_path / "out.partial"

    def run(**more: Any) -> None:
        if command == "import":
            import_model(model, out, tp=2, pp=1, shard_bytes=2000, **more)
        else:
            export_model(checkpoint, out, shard_bytes=2000, **more)

    with pytest.raises(Interrupt):
        run(report=interrupted(0.6))
    assert not out.exists()
    before = identities(partial)
    assert len(before) >= 3
    damaged, cut = sorted(before)[:2]
    (partial / damaged).write_bytes(b"\0" * (partial / damaged).stat().st_size)
    (partial / cut).write_bytes((partial / cut).read_bytes()[:-1])
    seen: list[tuple[int, int]] = []
    run(report=lambda done, total: seen.append((done, total)))
    after, kept = identities(out), set(before) - {damaged, cut}
    assert {name for name in before if after[name] == before[name]} == kept
    assert 0 < seen[0][0] - sum((out / name).stat().st_size for name in kept) < 2000
    assert seen[-1][0] == seen[-1][1]
    assert not partial.exists()
    assert not [path for path in out.rglob("*") if path.suffix in (".sha256", ".unfinished")]
    if command == "import":
        export_model(out, tmp_path / "whole")
        out = tmp_path / "whole"
    assert_same(out, model)


def test_what_another_conversion_left_is_not_mixed_in(model: Path, checkpoint: Path, tmp_path: Path) -> None:
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    with pytest.raises(Interrupt):
        export_model(checkpoint, out, shard_bytes=2000, report=interrupted(0.6))
    left = identities(partial)
    other = make_model(tmp_path / "other", seed=1)
    shutil.rmtree(checkpoint)
    make_checkpoint(other, checkpoint, tp=2, pp=2)  # the same shapes, sizes and names; other weights
    export_model(checkpoint, out, shard_bytes=2000)
    assert not set(left.items()) & set(identities(out).items())
    assert_same(out, other)


def test_a_folder_in_the_way_is_left_alone(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "mine.txt").write_text("precious")
    with pytest.raises(ValueError, match=r"out\.partial is in the way"):
        export_model(checkpoint, out)
    assert (partial / "mine.txt").read_text() == "precious"
    out.mkdir()
    with pytest.raises(ValueError, match="out exists already; remove it, or give another folder"):
        export_model(checkpoint, out)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cannot be written \(Not a directory\); give another folder"):
        export_model(checkpoint, tmp_path / "file" / "out")


def test_a_full_disk_is_told_before_anything_is_written(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(RuntimeError, match=r"needs (\S+) more bytes, and 1,000 are free") as caught:
        export_model(checkpoint, tmp_path / "out")
    needed = int(str(caught.value).split("needs ")[1].split(" ")[0].replace(",", ""))
    monkeypatch.undo()
    export_model(checkpoint, tmp_path / "out")
    assert needed == (tmp_path / "out" / "model.safetensors").stat().st_size


def test_a_disk_that_fills_up_on_the_way_leaves_what_is_finished(
    model: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    usage = shutil.disk_usage(tmp_path)

    def fsync(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 3:
            monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(
        RuntimeError, match=r"more bytes, and 0 are free on its disk.*finished files are kept in .*out\.partial"
    ):
        export_model(checkpoint, tmp_path / "out", shard_bytes=2000)
    assert len(identities(tmp_path / "out.partial")) == 2
    monkeypatch.undo()
    export_model(checkpoint, tmp_path / "out", shard_bytes=2000)
    assert_same(tmp_path / "out", model)


def test_two_copies_of_one_half_are_not_a_whole(tmp_path: Path) -> None:
    """With tied embeddings the last stage writes its own copy; the other half of the vocabulary must still be missed."""
    model = make_model(tmp_path / "model", tie_word_embeddings=True)
    checkpoint = make_checkpoint(model, tmp_path / "step_000001", tp=2, pp=2)
    for rank in (1, 3):
        for path in (checkpoint / "shards").glob(f"rank{rank:05d}-*"):
            path.unlink()
    with pytest.raises(ValueError, match=r"incomplete: model\.embed_tokens\.weight, of which 84 of 156 elements are there"):
        export_model(checkpoint, tmp_path / "out")
    weights, spec = open_weights(checkpoint), read_model_spec(model)
    lost = next(s for s in megatron_layout(spec, MegatronParallel(tp=2), 1).shards if "embed_tokens" in s.tensor)
    with pytest.raises(ValueError, match=r"holds 0 of 72 elements that are needed of model\.embed_tokens\.weight"):
        weights.read(lost.tensor, lost.box, torch.empty(lost.box.shape))


@pytest.mark.parametrize("where", ["model", "checkpoint"])
def test_a_truncated_file_is_named(model: Path, checkpoint: Path, tmp_path: Path, where: str) -> None:
    source = {"model": model, "checkpoint": checkpoint / "shards"}[where]
    path = sorted(source.glob("*.safetensors"))[-1]
    path.write_bytes(path.read_bytes()[:-10])
    convert = {
        "model": lambda: import_model(model, tmp_path / "out", tp=1, pp=1),
        "checkpoint": lambda: export_model(checkpoint, tmp_path / "out"),
    }
    with pytest.raises(ValueError, match=rf"{path.name} is damaged or cut short"):
        convert[where]()


def test_a_checkpoint_says_what_it_needs(model: Path, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    moved = model.rename(tmp_path / "moved")
    with pytest.raises(
        ValueError, match=r"was trained from .*model, which is not there any more; give a copy of it with --model"
    ):
        export_model(checkpoint, out)
    (checkpoint / "state.json").write_text('{"step": 1}')
    with pytest.raises(ValueError, match="does not say which model it was trained from"):
        export_model(checkpoint, out)
    export_model(checkpoint, out, model=moved)
    assert_same(out, moved)
    (checkpoint / "state.json").unlink()
    with pytest.raises(ValueError, match="is a checkpoint that was not finished"):
        export_model(checkpoint, tmp_path / "other", model=moved)
    with pytest.raises(ValueError, match="nothing is not a finished checkpoint"):
        export_model(tmp_path / "nothing", tmp_path / "other")


def test_an_import_of_another_model_is_refused(model: Path, tmp_path: Path) -> None:
    import_model(make_model(tmp_path / "other", seed=1), tmp_path / "cut", tp=2, pp=1)
    with pytest.raises(
        ValueError, match=r"model\.shards = .*cut was not imported from model\.path = .*: 51 of 51 tensors differ"
    ):
        check_imported(tmp_path / "cut", model)


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ({"tp": 4, "pp": 1}, "2 key/value heads"),
        ({"tp": 1, "pp": 3}, "4 layers"),
        ({"tp": 1, "pp": 2, "vpp": 3}, "3 chunks do not divide a pipeline stage of 2 layers"),
        ({"tp": 1, "pp": 2, "first_layers": 4}, "4 layers do not split over 2 pipeline stages with 4 in the first"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(model: Path, tmp_path: Path, split: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        import_model(model, tmp_path / "out", **split)
