"""Recorded rollouts come back exactly, and damage is named with file and line."""

import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tepo_megatron.rollout.record import read_rollouts, record_path, write_rollouts
from tepo_megatron.types import Rollout, WeightsVersion

floats = st.floats(allow_nan=False)
ids = st.lists(st.integers(0, 2**31), max_size=6).map(tuple)
rollouts = st.builds(
    Rollout,
    problem_id=st.text(),
    group=st.integers(0, 10**6),
    prompt_ids=ids,
    response_ids=ids,
    sampler_logprobs=st.lists(floats, max_size=6).map(tuple),
    finish_reason=st.sampled_from(["stop", "length"]),
    weights_version=st.builds(WeightsVersion, step=st.integers(0, 10**9), digest=st.text(max_size=8)),
    text=st.text(),
    reward=floats,
)

ONE = Rollout("p", 0, (1, 2), (3,), (-0.1,), "stop", WeightsVersion(4, "ab"), "a\nb\u2028c", 1.0)


@settings(deadline=None)
@given(written=st.lists(rollouts, max_size=5), step=st.integers(0, 10**8))
def test_what_is_read_is_what_was_written(written: list[Rollout], step: int) -> None:
    with TemporaryDirectory() as folder:
        write_rollouts(Path(folder) / "rollouts", step, written)
        read = read_rollouts(Path(folder) / "rollouts", step)
    assert repr(read) == repr(written)  # repr tells -0.0 from 0.0, and an int from a float
    assert read == written


def test_writing_leaves_only_the_whole_file(tmp_path: Path) -> None:
    write_rollouts(tmp_path, 3, [ONE])
    assert [path.name for path in tmp_path.iterdir()] == ["step_0000003.jsonl"]


def test_a_failed_write_leaves_the_older_record(tmp_path: Path) -> None:
    write_rollouts(tmp_path, 3, [ONE])
    with pytest.raises(TypeError):
        write_rollouts(tmp_path, 3, [replace(ONE, reward=object())])  # type: ignore[arg-type]
    assert read_rollouts(tmp_path, 3) == [ONE]


def test_a_missing_record_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"step_0000003\.jsonl: the recorded rollouts of step 3 cannot be read"):
        read_rollouts(tmp_path, 3)


@given(data=st.data())
@settings(deadline=None)
def test_a_record_cut_anywhere_is_refused(data: st.DataObject) -> None:
    with TemporaryDirectory() as folder:
        path = write_rollouts(Path(folder), 3, [ONE, replace(ONE, group=1), replace(ONE, group=2)])
        whole = path.read_bytes()
        path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
        with pytest.raises(ValueError, match=r"step_0000003\.jsonl, line [1-4]: "):
            read_rollouts(Path(folder), 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward": "much"}, "reward: Input should be a valid number"),
        ({"response_ids": [1.5]}, r"response_ids\.0"),
        ({"group": None}, "group"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = write_rollouts(tmp_path, 3, [ONE, ONE])
    lines = path.read_text().splitlines()
    lines[2] = json.dumps(json.loads(lines[2]) | change)
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=rf"step_0000003\.jsonl, line 3: not a rollout: {message}"):
        read_rollouts(tmp_path, 3)


def test_a_record_of_another_step_is_refused(tmp_path: Path) -> None:
    write_rollouts(tmp_path, 3, [ONE]).rename(record_path(tmp_path, 5))
    with pytest.raises(ValueError, match="line 1: not the head of a record of step 5"):
        read_rollouts(tmp_path, 5)
