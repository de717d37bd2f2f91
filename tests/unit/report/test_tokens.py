"""Per-token values on their way into the page, and which samples it has room for."""

from __future__ import annotations

import base64
import math
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tepo_megatron.run.metrics import TokenSamples, token_file
from tepo_megatron.tools.report.samples import COLUMNS, SampleGroup, evenly, pack, read_samples
from tests.support.report_runs import write_run
from tests.support.token_values import made_up_tokens


def decode(text: str, width: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """As the page does: planes of bytes, the lowest first."""
    planes = np.frombuffer(base64.b64decode(text), np.uint8).reshape(width, -1).astype(np.uint32)
    return np.asarray(sum(plane << (8 * at) for at, plane in enumerate(planes)), np.uint32)


def as_floats(text: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    return (decode(text, 2) << 16).view(np.float32)


def write_tokens(folder: Path, samples: TokenSamples) -> Path:
    path = token_file(folder, samples.step)
    path.parent.mkdir()
    path.write_bytes(samples.encode())
    return folder


def packed(folder: Path, **values: Any) -> dict[str, Any]:
    """Columns of six tokens with these values in place of made-up ones."""
    samples = made_up_tokens(10, [2, 4])
    for name, value in values.items():
        getattr(samples, name)[:] = value
    return pack(read_samples(0, write_tokens(folder, samples), "tokens"))["columns"]


FLOATS = st.floats(-(2.0**99), 2.0**99, width=32, allow_subnormal=False) | st.sampled_from([math.nan, math.inf, -math.inf])


@given(arrays.arrays(np.float32, 6, elements=FLOATS))
def test_floats_come_back_to_two_digits(values: np.ndarray[Any, np.dtype[np.float32]]) -> None:
    values.view(np.uint32)[np.isnan(values)] = 0x7FFFFFFF  # a NaN that rounding would carry over into −0
    with TemporaryDirectory() as folder:
        columns = packed(Path(folder), entropy=values)
    if np.isfinite(values).any():
        np.testing.assert_allclose(as_floats(columns["entropy"]), values, rtol=2.0**-8)
    else:
        assert "entropy" not in columns


@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=7), seed=st.integers(0, 99), chosen=st.integers(1, 2**7))
def test_the_tokens_of_chosen_groups_lie_where_the_page_looks(
    lengths: list[int], seed: int, chosen: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    samples = made_up_tokens(30, lengths, seed=seed)
    folder = write_tokens(tmp_path_factory.mktemp("run"), samples)
    groups = [group for at, group in enumerate(read_samples(3, folder, "tokens")) if chosen >> at & 1]
    columns = pack(groups)
    assert columns["tokens"] == sum(group.cost for group in groups)
    ids = decode(columns["columns"]["id"], 4)
    flags, versions = decode(columns["columns"]["flags"], 1), decode(columns["columns"]["version"], 4)
    for group in groups:
        for response, at in zip(group.responses, group.origin[1], strict=True):
            there, here = samples.tokens_of(at), slice(response["at"], response["at"] + response["tokens"])
            text = "".join(samples.pieces[token] for token in samples.ids[there].tolist())
            assert "".join(columns["pieces"][piece] for piece in ids[here]) == text
            assert (flags[here] & 1).astype(bool).tolist() == samples.loss_mask[there].tolist()
            assert (flags[here] >> 1).astype(bool).tolist() == samples.masked[there].tolist()
            assert versions[here].tolist() == samples.version[there].tolist()
            assert response["reward"] == float(samples.reward[at])
            for name, column in COLUMNS.items():
                wanted = column(samples)[there]
                if name in columns["columns"]:
                    np.testing.assert_allclose(as_floats(columns["columns"][name])[here], wanted, rtol=2**-7)
                else:
                    assert np.isnan(wanted).all()


def test_small_differences_survive_the_rounding(tmp_path: Path) -> None:
    """A gap of 1e-6 between log-probs of −1, a sequence ratio of 1.0003: rounded first, both would be nothing."""
    columns = packed(tmp_path, logprob_sampler=-1.0, logprob_trainer=-1.0 + 1e-6, ratio=1.0003)
    np.testing.assert_allclose(as_floats(columns["gap"]), 1e-6, rtol=0.1)
    np.testing.assert_allclose(as_floats(columns["ratio"]), 3e-4, rtol=0.01)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    write_run(tmp_path, steps=1, recorded=[1])
    token_file(tmp_path, 1).write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(ValueError, match=r"step_0000001\.npz"):
        read_samples(0, tmp_path, "tokens")


def group(step: int, responses: int, cost: int) -> SampleGroup:
    return SampleGroup(0, "train", step, "", "", "", [{} for _ in range(responses)], cost)


@given(
    steps=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 4), st.integers(0, 9)), max_size=40),
    responses=st.integers(0, 60),
    room=st.integers(0, 200),
)
def test_no_more_is_chosen_than_there_is_room_for(steps: list[tuple[int, int, int]], responses: int, room: int) -> None:
    groups = [group(*each) for each in sorted(steps)]
    chosen = evenly(groups, responses, room)
    assert sum(len(each.responses) for each in chosen) <= responses
    assert sum(each.cost for each in chosen) <= room
    places = [next(at for at, each in enumerate(groups) if each is one) for one in chosen]
    assert places == sorted(set(places))
    if sum(len(each.responses) for each in groups) <= responses and sum(each.cost for each in groups) <= room:
        assert chosen == groups


@pytest.mark.parametrize("take", [1, 2, 3, 5, 10, 90, 100, 400])
def test_what_is_chosen_lies_evenly_over_the_steps(take: int) -> None:
    groups = [group(step, 8, 1) for step in range(1, 91) for _ in range(4)]
    found = [each.step for each in evenly(groups, 8 * take, 10**6)]
    assert (len(found), max(found)) == (min(take, 360), 90)  # the newest is always there
    counts = [found.count(step) for step in range(1, 91)]
    assert max(counts) - min(counts) <= 1
    if 3 <= take <= 90:
        assert max(after - before for before, after in pairwise(found)) <= 2.1 * 89 / (take - 1) + 1
