"""The digest by samples: a copy has the same, however it is divided into files, and a trained model has another."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from tepo_megatron.weights.storage.manifest import sampled_digest

Weights = dict[str, np.ndarray]


def written(weights: Weights, files: int = 1) -> str | None:
    """The digest of a folder that has them in so many files."""
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


@given(
    shapes=st.dictionaries(
        st.text("abc.0", min_size=1, max_size=9), st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=30
    ),
    data=st.data(),
)
@settings(max_examples=15, deadline=None)
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
