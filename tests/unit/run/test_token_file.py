"""Files of per-token values: read as they were written, or refused."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.run.metrics import read_tokens, token_file, token_files
from tepo_megatron.runtime.files import write_atomically
from tests.support.token_values import made_up_tokens


@given(
    step=st.integers(0, 10**7),
    lengths=st.lists(st.integers(0, 9), max_size=6),
    seed=st.integers(0, 9),
    text=st.text(max_size=9),
)
def test_a_file_is_read_as_it_was_written(
    step: int, lengths: list[int], seed: int, text: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """To the last bit, NaN included, and with any text that a prompt may have; equal values are equal bytes."""
    folder = tmp_path_factory.mktemp("run")
    given_ = made_up_tokens(step, lengths, seed=seed)
    given_ = replace(given_, prompts=(*given_.prompts, replace(made_up_tokens().prompts[0], text=text, answer=None)))
    path = token_file(folder, step)
    write_atomically(path, given_.encode())
    assert token_files(folder) == {step: path}
    found = read_tokens(path)
    assert found == given_
    assert found.encode() == path.read_bytes()
    assert [path.name for path in path.parent.iterdir()] == [path.name]
    for at, length in enumerate(lengths):
        assert found.ids[found.tokens_of(at)].size == length
        assert found.text_of(at) == "".join(found.pieces[token] for token in found.ids[found.tokens_of(at)].tolist())
    if found.ids.size:
        assert found != replace(found, masked=~found.masked)


def test_files_are_in_the_order_of_their_steps_and_nothing_else_is_one(tmp_path: Path) -> None:
    for step in (100, 20, 12345678, 60, 5, 90, 40):
        write_atomically(token_file(tmp_path, step), b"")
    (tmp_path / "tokens" / "step_0000030.npz.partial").touch()
    (tmp_path / "tokens" / "step_last.npz").touch()
    assert list(token_files(tmp_path)) == [5, 20, 40, 60, 90, 100, 12345678]
    assert token_files(tmp_path / "elsewhere") == {}


@given(at=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255), cut=st.booleans())
def test_a_damaged_file_is_a_sentence_or_has_lost_nothing(
    at: float, flip: int, cut: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    made = made_up_tokens()
    data = bytearray(made.encode())
    place = int(at * len(data))
    if cut:
        del data[place:]
    else:
        data[place] ^= flip
    path = tmp_path_factory.mktemp("run") / "step_0000030.npz"
    path.write_bytes(data)
    said = ""
    try:
        assert read_tokens(path) == made
    except ValueError as error:
        said = str(error)
    assert not said or said.startswith(f"{path} holds no token values that can be read: ")
    assert not said or said.endswith("; remove it")


def archive(**changes: Any) -> bytes:
    """The file of made-up values with other arrays; None leaves one out."""
    with np.load(io.BytesIO(made_up_tokens().encode())) as found:
        arrays: dict[str, Any] = {**found, **changes}
    file = io.BytesIO()
    np.savez(file, **{name: array for name, array in arrays.items() if array is not None})
    return file.getvalue()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"ratio": None}, "ratio"),
        ({"ratio": np.zeros(9, np.float32)}, r"ratio is float32 of shape \(9,\), not float32 of shape \(10,\)"),
        ({"masked": np.zeros(10, np.int32)}, "masked is int32 of shape"),
        ({"ids": np.array([None] * 10)}, "allow_pickle"),
        ({"lengths": np.array([3, 0, 5, 1], np.int32)}, "lengths has 9 tokens in all, and ids 10"),
        ({"prompt": np.array([0, 0, 1, 4], np.int32)}, "not among the 4 prompts"),
        ({"meta": np.array("[]")}, "list indices"),
        ({"meta": np.array(json.dumps({"format": 2}))}, "is of format 2, and this version reads format 1"),
    ],
)
def test_what_does_not_fit_together_is_refused(changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    path = tmp_path / "step_0000030.npz"
    path.write_bytes(archive(**changes))
    with pytest.raises(ValueError, match=why):
        read_tokens(path)


def test_what_is_no_archive_or_not_there(tmp_path: Path) -> None:
    np.save(tmp_path / "two.npy", np.zeros(3))
    with pytest.raises(ValueError, match="holds no token values that can be read"):
        read_tokens(tmp_path / "two.npy")
    with pytest.raises(FileNotFoundError):
        read_tokens(tmp_path / "three.npz")
