"""Every damage of a checkpoint is found and named before anything of it is used."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from tepo_megatron.trainer.checkpoint_folder import read_state
from tepo_megatron.weights.storage.manifest import (
    CheckpointManifest,
    DamagedCheckpoint,
    FileRecord,
    check_whole,
    read_manifest,
    write_manifest,
)
from tepo_megatron.weights.storage.stored import open_boxes, write_boxes
from tests.support.checkpoints import DAMAGES, ONLY_BY_READING, flip_bit, make_whole, shards
from tests.support.disks import files_of_at_most


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_whole(tmp_path_factory.mktemp("kept"), 6)


def find(folder: Path) -> str:
    """The sentence about a damaged checkpoint: the quick look's, or else that of reading all."""

    def look() -> None:
        read_state(folder)
        check_whole(folder)

    with pytest.raises(DamagedCheckpoint) as caught:
        look()
    assert str(caught.value).startswith(f"{folder.name} is damaged (")
    return str(caught.value)


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_found_and_named(kind: str, tmp_path: Path) -> None:
    folder, other = make_whole(tmp_path, 6), make_whole(tmp_path, 4)
    assert check_whole(folder).step == read_state(folder)["step"] == 6
    damage, words = DAMAGES[kind]
    damage(folder, other)
    assert words in find(folder)
    if kind not in ONLY_BY_READING:
        with pytest.raises(DamagedCheckpoint):
            read_state(folder)
    assert check_whole(other).step == 4


@given(file=st.integers(0), bit=st.integers(0))
def test_any_bit_of_any_file_counts(kept: Path, file: int, bit: int) -> None:
    files = [*shards(kept), kept / "state.json", kept / "manifest.json"]
    path = files[file % len(files)]
    flip_bit(path, bit)
    try:
        assert path.name in find(kept) or path.name == "state.json"
    finally:
        flip_bit(path, bit)
    check_whole(kept)


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
    write_manifest(tmp_path, 8, written.files)
    listed = json.loads((tmp_path / "manifest.json").read_text())["files"]
    lines = "".join(f"{record['sha256']}  {name}\n" for name, record in listed.items())
    assert subprocess.run(["sha256sum", "-c", "--quiet"], input=lines, text=True, cwd=tmp_path).returncode == 0
    assert set(open_boxes(tmp_path, "master").boxes) == {f"t{at}" for at in range(5)}


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


@pytest.mark.parametrize(("key", "value"), [("updates", -4), ("updates", "24"), ("updates", True), ("model", None)])
def test_a_state_that_cannot_be_is_refused_although_its_digest_is_right(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(DamagedCheckpoint, match=rf"state\.json: {key} = "):
        read_state(make_whole(tmp_path, 6, **{key: value}))


def test_files_that_are_no_shards_do_no_harm(tmp_path: Path) -> None:
    folder = make_whole(tmp_path, 3)
    (folder / "notes.txt").write_text("the good one")
    (folder / "shards" / ".nfs0001").write_text("")
    assert check_whole(folder) == read_manifest(folder)
