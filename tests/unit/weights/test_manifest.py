"""Every damage of a checkpoint is found and named before anything of it is used."""

import errno
import hashlib
import json
import os
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from safetensors.torch import load_file

from tepo_megatron.runtime import files
from tepo_megatron.trainer.checkpoint_folder import read_state
from tepo_megatron.weights.storage.manifest import CheckpointManifest, DamagedCheckpoint, FileRecord, sampled_digest
from tepo_megatron.weights.storage.stored import StoredWeights, write_boxes
from tests.support.checkpoints import DAMAGES, ONLY_BY_READING, flip_bit, make_whole, shards
from tests.support.processes import files_of_at_most


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_whole(tmp_path_factory.mktemp("kept"), 6)


def find(folder: Path) -> str:
    """The sentence about a damaged checkpoint: the quick look's, or else that of reading all."""

    def look() -> None:
        read_state(folder)
        CheckpointManifest.read_whole(folder)

    with pytest.raises(DamagedCheckpoint) as caught:
        look()
    assert str(caught.value).startswith(f"{folder.name} is damaged (")
    return str(caught.value)


@pytest.mark.parametrize("kind", ONLY_BY_READING)
def test_damage_is_found_and_named(kind: str, tmp_path: Path) -> None:
    """The other kinds, which the quick look finds: tests/unit/run/test_folder.py."""
    folder, other = make_whole(tmp_path, 6), make_whole(tmp_path, 4)
    assert CheckpointManifest.read_whole(folder).step == read_state(folder)["step"] == 6
    damage, words = DAMAGES[kind]
    damage(folder, other)
    assert words in find(folder)
    assert CheckpointManifest.read_whole(other).step == 4


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize(
    ("name", "method"),
    [("manifest.json", "read_bytes"), *(("state.json", method) for method in ("stat", "open", "read_bytes"))],
)
def test_a_short_error_of_the_disk_is_no_damage(
    kept: Path, name: str, method: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that stays is named as such, and not as a missing file."""
    whole, left, pauses = getattr(Path, method), [times], list[float]()

    def failing(path: Path, *args: Any, **settings: Any) -> Any:
        if path.name == name and left[0]:
            left[0] -= 1
            raise OSError(errno.ESTALE, "Stale file handle")
        return whole(path, *args, **settings)

    monkeypatch.setattr(files, "time", SimpleNamespace(sleep=pauses.append))
    monkeypatch.setattr(Path, method, failing)
    if times == 1:
        assert read_state(kept)["step"] == CheckpointManifest.read_whole(kept).step == 6
        assert len(pauses) == 1
    else:
        assert f"{name} cannot be read: Stale file handle" in find(kept)


@given(file=st.integers(0), bit=st.integers(0))
def test_any_bit_of_any_file_counts(kept: Path, file: int, bit: int) -> None:
    files = [*shards(kept), kept / "state.json", kept / "manifest.json"]
    path = files[file % len(files)]
    flip_bit(path, bit)
    try:
        assert path.name in find(kept) or path.name == "state.json"
    finally:
        flip_bit(path, bit)
    CheckpointManifest.read_whole(kept)


@given(st.integers(1, 9), st.lists(st.integers(0, 10**9), min_size=1, max_size=30))
def test_the_ranks_shares_are_every_file_once_and_about_equal(parts: int, sizes: list[int]) -> None:
    files = {f"shards/{at}": FileRecord(size, "") for at, size in enumerate(sizes)}
    shares = CheckpointManifest(Path(), 0, {**files, "state.json": FileRecord(1, "")}).shares(parts)
    assert len(shares) == parts
    assert sorted(name for share in shares for name in share) == sorted(files)
    loads = [sum(files[name].bytes for name in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes)


def test_what_was_written_is_read_by_safetensors_and_sha256sum(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    boxes = {f"master|t{at}|0,0": torch.randn(3 + at, 5) for at in range(5)} | {"exp_avg|s|0": torch.randn(7).bfloat16()}
    written = write_boxes(tmp_path, "rank00000", boxes.items(), metadata={"step": "8"}, file_bytes=150)
    assert written.bytes == sum(tensor.nbytes for tensor in boxes.values())
    assert len(written.files) > 2
    found = {key: tensor for name in written.files for key, tensor in load_file(tmp_path / name).items()}
    assert set(found) == set(boxes)
    assert all(torch.equal(found[key], tensor) for key, tensor in boxes.items())
    for name, record in written.files.items():
        data = (tmp_path / name).read_bytes()
        assert record == FileRecord(len(data), hashlib.sha256(data).hexdigest())
    CheckpointManifest.write(tmp_path, 8, written.files)
    listed = json.loads((tmp_path / "manifest.json").read_text())["files"]
    lines = "".join(f"{record['sha256']}  {name}\n" for name, record in listed.items())
    assert subprocess.run(["sha256sum", "-c", "--quiet"], input=lines, text=True, cwd=tmp_path).returncode == 0
    assert set(StoredWeights.open_boxes(tmp_path, "master").boxes) == {f"t{at}" for at in range(5)}


def test_a_failed_write_is_told_and_every_box_is_still_drawn(tmp_path: Path) -> None:
    """Ranks make boxes together: one that stopped drawing would leave the others waiting."""
    (tmp_path / "shards").mkdir()
    drawn = []

    def boxes():
        for at in range(6):
            drawn.append(at)
            yield f"master|t{at}|0", torch.zeros(500 * at + 1)

    with files_of_at_most(6000):
        written = write_boxes(tmp_path, "rank00000", boxes(), metadata={}, file_bytes=1)
    assert written.error is not None
    assert "rank00000-00004" in written.error
    assert "File too large (EFBIG)" in written.error
    assert drawn == list(range(6))
    assert written.bytes == 4 * (500 * 15 + 6)


def test_a_short_error_of_the_disk_costs_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that is told only when all is written."""
    sync, errors = os.fsync, [OSError(number, os.strerror(number)) for number in (errno.EIO, errno.ESTALE)]

    def failing(handle: int) -> None:
        if errors:
            raise errors.pop()
        sync(handle)

    monkeypatch.setattr(files, "time", SimpleNamespace(sleep=lambda _: None))
    monkeypatch.setattr(os, "fsync", failing)
    assert CheckpointManifest.read_whole(make_whole(tmp_path, 6)).step == 6
    assert not errors


@pytest.mark.parametrize(("key", "value"), [("updates", -4), ("updates", "24"), ("updates", True), ("model", None)])
def test_a_state_that_cannot_be_is_refused_although_its_digest_is_right(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(DamagedCheckpoint, match=rf"state\.json: {key} = "):
        read_state(make_whole(tmp_path, 6, **{key: value}))


def test_files_that_are_no_shards_do_no_harm(tmp_path: Path) -> None:
    folder = make_whole(tmp_path, 3)
    (folder / "notes.txt").write_text("the good one")
    (folder / "shards" / ".nfs0001").write_text("")
    assert CheckpointManifest.read_whole(folder) == CheckpointManifest.read(folder)


# -- sampled digests

Weights = dict[str, np.ndarray]
sizes = st.integers(1, 40)


def written(weights: Weights, files: int = 1) -> str | None:
    with tempfile.TemporaryDirectory() as folder:
        names = sorted(weights)
        parts = {f"model-{number}.safetensors": names[number::files] for number in range(files)}
        for file, held in parts.items():
            save_file({name: weights[name] for name in held}, Path(folder) / file, metadata={"format": "pt"})
        if files > 1:
            index = {"weight_map": {name: file for file, held in parts.items() for name in held}}
            (Path(folder) / "model.safetensors.index.json").write_text(json.dumps(index))
            save_file({"of": np.ones(3)}, Path(folder) / "another-format.safetensors")  # which the index does not name
        return sampled_digest(Path(folder))


shapes_of = st.dictionaries(st.text("abc.0", min_size=1, max_size=9), st.tuples(sizes, sizes), min_size=1, max_size=30)


@given(shapes_of, st.data())
@settings(max_examples=15)
def test_a_copy_has_the_same_and_another_tensor_shows(shapes: dict[str, tuple[int, int]], data: st.DataObject) -> None:
    drawn = np.random.default_rng(data.draw(st.integers(0, 9)))
    weights = {name: drawn.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    digest = written(weights)
    assert digest == written(weights, files=data.draw(st.integers(1, 4)))
    name = data.draw(st.sampled_from(sorted(weights)))
    middle = weights[name].copy()
    middle.reshape(-1)[middle.size // 2] += 1
    assert digest != written({**weights, name: middle})
    assert digest != written({**weights, name: weights[name].astype(np.float16)})
    assert digest != written({**weights, name: np.concatenate([weights[name]] * 2)})
    assert digest != written({**weights, name + "d": weights[name]})


def test_one_value_of_a_hundred_shows_also_among_many_tensors() -> None:
    drawn = np.random.default_rng(0)
    weights = {f"layers.{at}": drawn.normal(size=(30, 30)) for at in range(200)}
    assert written(weights) != written({name: each + (drawn.random(each.shape) < 0.01) for name, each in weights.items()})


def test_no_weights_and_damaged_ones(tmp_path: Path) -> None:
    assert sampled_digest(tmp_path / "nowhere") is None
    assert sampled_digest(tmp_path) is None
    (tmp_path / "model.safetensors").write_bytes(b"\x08" + bytes(7) + b"no json!")
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged or cut short"):
        sampled_digest(tmp_path)
