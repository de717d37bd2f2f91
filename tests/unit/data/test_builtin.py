import json
from collections.abc import Callable
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


def write_index(folder: Path, content: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


def damage(folder: Path) -> None:
    (folder / "config.json").write_text('{"vocab_size": 6')
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])


INDEX = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"}}


@pytest.mark.parametrize(
    ("change", "faults"),
    [
        (lambda folder: (folder / "config.json").unlink(), r"it has no config\.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "it has no weights .*"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "it has no tokenizer .*"),
        (damage, r"its config\.json is damaged .*; its model\.safetensors is damaged .*"),
        (lambda folder: write_index(folder, INDEX), r"1 of 2 weight files are missing \(model-2\.safetensors\)"),
        (lambda folder: write_index(folder, {}), r"its model\.safetensors\.index\.json is damaged .*"),
    ],
)
def test_all_faults_of_a_folder_are_named(folder: Path, change: Callable[[Path], None], faults: str) -> None:
    assert resolve_model_path(str(folder)) == folder
    change(folder)
    with pytest.raises(ValueError, match=f"cannot be used: {faults}$"):
        resolve_model_path(str(folder))


def test_what_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"org/model-8b does not exist; .*hf download"):
        resolve_model_path("org/model-8b")
    with pytest.raises(ValueError, match=r"no config\.json; it has no weights .*; it has no tokenizer"):
        resolve_model_path(str(tmp_path))


def test_builtin_names(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="known: builtin:stack-machine, builtin:tiny; did you mean builtin:tiny"):
        resolve_model_path("builtin:tinny")
    for escape in ("builtin:", "builtin:..", "builtin:tiny/..", "builtin:../builtin/tiny"):
        with pytest.raises(ValueError, match="unknown built-in model"):
            resolve_model_path(escape)
    monkeypatch.setattr(builtin, "files", lambda package: folder.parent)
    (folder.parent / "builtin").symlink_to(folder.parent)
    assert resolve_model_path(f"builtin:{folder.name}").samefile(folder)
