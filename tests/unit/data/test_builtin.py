import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tepo_megatron.tasks.data import builtin
from tepo_megatron.tasks.data.builtin import resolve_model_path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that looks like a model."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    save_file({"w": np.ones((4, 4), np.float32)}, tmp_path / "model.safetensors")
    return tmp_path


def test_whole_folder(folder: Path) -> None:
    assert resolve_model_path(str(folder)) == folder


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"org/model-8b does not exist; .*hf download"):
        resolve_model_path("org/model-8b")


def test_all_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json; it has no weights .*; it has no tokenizer"):
        resolve_model_path(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "message"),
    [("config.json", "has no config.json"), ("model.safetensors", "has no weights"), ("tokenizer.json", "has no tokenizer")],
)
def test_one_thing_missing(folder: Path, name: str, message: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ValueError, match=message) as error:
        resolve_model_path(str(folder))
    assert ";" not in str(error.value)


def test_damaged_files(folder: Path) -> None:
    (folder / "config.json").write_text('{"vocab_size": 6')
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"config\.json is damaged .*; its model\.safetensors is damaged"):
        resolve_model_path(str(folder))


def test_missing_shards(folder: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"1 of 2 weight files are missing \(model-2\.safetensors\)"):
        resolve_model_path(str(folder))
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"index\.json is damaged"):
        resolve_model_path(str(folder))


def test_builtin_names(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="known: builtin:stack-machine, builtin:tiny; did you mean builtin:tiny"):
        resolve_model_path("builtin:tinny")
    for escape in ("builtin:", "builtin:..", "builtin:tiny/..", "builtin:../builtin/tiny"):
        with pytest.raises(ValueError, match="unknown built-in model"):
            resolve_model_path(escape)
    monkeypatch.setattr(builtin, "files", lambda package: folder.parent)
    (folder.parent / "builtin").symlink_to(folder.parent)
    assert resolve_model_path(f"builtin:{folder.name}").samefile(folder)
