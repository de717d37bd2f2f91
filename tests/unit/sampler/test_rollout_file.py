"""Recorded rollouts come back exactly, and damage is named with file and line."""

import json
import re
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from tepo_megatron.core.rollout import TOP_TOKEN, Rollout, SamplingMask, WeightsVersion, token_ids
from tepo_megatron.sampler.rollout_file import Record, check_rollouts, record_path, rollout_fault, write_rollouts

floats = st.floats(allow_nan=False)
sizes = array_shapes(min_dims=3, max_dims=3, min_side=0, max_side=4)
routes = st.none() | arrays(st.sampled_from([np.uint8, np.int16]), sizes)
tops = st.tuples(st.integers(0, 5), st.integers(1, 4)).flatmap(lambda shape: arrays(TOP_TOKEN, shape))
version = st.builds(WeightsVersion, step=st.integers(0, 10**9), digest=st.text(max_size=8))
ids = st.lists(st.integers(0, 2**31 - 1), max_size=6).map(tuple)
plain_rollouts = st.builds(
    Rollout,
    problem_id=st.text(),
    group=st.integers(0, 10**6),
    prompt_ids=ids,
    response_ids=ids,
    sampler_logprobs=st.lists(st.floats(width=32), max_size=6).map(tuple),
    finish_reason=st.sampled_from(["stop", "length"]),
    versions=st.lists(st.tuples(st.integers(0, 6), version), min_size=1, max_size=3).map(tuple),
    text=st.text(),
    reward=floats,
    routed_experts=routes,
    reward_parts=st.dictionaries(st.text(max_size=3), st.floats(allow_nan=False, allow_infinity=False), max_size=2),
)


@st.composite
def rollouts_with_masks(draw: st.DrawFn) -> Rollout:
    found = draw(plain_rollouts)
    size = found.response_ids.size
    mask = draw(st.none() | st.lists(st.booleans(), min_size=size, max_size=size))
    counts = draw(st.none() | st.lists(st.integers(0, 2), min_size=size, max_size=size))
    return replace(
        found,
        loss_mask=None if mask is None else np.array(mask, np.bool_),
        teacher_top=draw(st.none() | tops),
        sampling_mask=None if counts is None else SamplingMask(counts, draw(st.permutations(range(sum(counts))))),
    )


rollouts = rollouts_with_masks()

ONE = Rollout("p", 0, (1, 2), (3,), (-0.1,), "stop", WeightsVersion(4, "ab"), "a\nb\u2028c", 1.0)


@given(written=st.lists(rollouts, max_size=5), step=st.integers(0, 10**8))
def test_what_is_read_is_what_was_written(written: list[Rollout], step: int) -> None:
    with TemporaryDirectory() as folder:
        write_rollouts(Path(folder) / "rollouts", step, written)
        read = Record.read(Path(folder) / "rollouts", step).rollouts
    assert repr(read) == repr(written)  # repr tells -0.0 from 0.0, and an int from a float
    assert read == written


def test_a_failed_write_leaves_the_older_record(tmp_path: Path) -> None:
    write_rollouts(tmp_path, 3, [ONE])
    with pytest.raises(TypeError):
        write_rollouts(tmp_path, 3, [replace(ONE, reward=object())])  # type: ignore[arg-type]
    assert Record.read(tmp_path, 3).rollouts == [ONE]
    assert [path.name for path in tmp_path.iterdir()] == ["step_0000003.jsonl"]


@given(data=st.data())
def test_a_record_cut_anywhere_is_refused(data: st.DataObject) -> None:
    with TemporaryDirectory() as folder:
        path = write_rollouts(Path(folder), 3, [ONE, replace(ONE, group=1), replace(ONE, group=2)])
        whole = path.read_bytes()
        path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
        with pytest.raises(ValueError, match=r"step_0000003\.jsonl, line [1-4]: "):
            Record.read(Path(folder), 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward": "much"}, "reward: Input should be a valid number"),
        ({"response_ids": [1.5]}, "response_ids: Value error, not base64 text"),
        ({"sampler_logprobs": "A~A="}, "sampler_logprobs: "),
        ({"loss_mask": 1}, "loss_mask: Value error, not base64 text"),
        ({"loss_mask": "AAA="}, "loss_mask has 16 bits for 1 response tokens"),
        ({"teacher_top": "AAAA"}, "teacher_top: Value error, not a teacher's top tokens"),
        ({"teacher_top": {"k": 3, "data": "AAAAAAAAAAA="}}, "teacher_top: .*cannot reshape"),
        ({"routed_experts": "AAAA"}, "routed_experts: Value error, not a routing record"),
        ({"routed_experts": {"dtype": "|u1", "data": "AA=="}}, "routed_experts: Value error, not a routing record"),
        ({"routed_experts": {"shape": [2, 1, 1], "dtype": "|u1", "data": "AA=="}}, "routed_experts: .*cannot reshape"),
        *(
            ({"routed_experts": {"shape": [size, 1, 1], "dtype": "|u1", "data": "AA=="}}, "routed_experts: .*not a shape")
            for size in (None, float("inf"), -1, 2**40)
        ),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = write_rollouts(tmp_path, 3, [ONE, ONE])
    lines = path.read_text().splitlines()
    lines[2] = json.dumps(json.loads(lines[2]) | change)
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=rf"step_0000003\.jsonl, line 3: not a rollout: {message}"):
        Record.read(tmp_path, 3)


def test_top_tokens_that_cannot_be_are_named(tmp_path: Path) -> None:
    for place, message in (
        ([(1, -0.5), (2, -1.0)], ""),
        ([(1, -0.5), (1, -1.0)], "some of the teacher's top tokens are not among the model's 9, or twice at one place"),
        ([(9, -0.5), (1, -1.0)], "some of the teacher's top tokens are not among the model's 9"),
        ([(1, -0.5), (-1, -1.0)], "some of the teacher's top tokens"),
        ([(1, -0.5), (2, np.nan)], "the teacher's top tokens are of 1, and some may not be finite, for 1 tokens"),
    ):
        fault = rollout_fault(replace(ONE, teacher_top=np.array([place], TOP_TOKEN)), 4, vocab_size=9)
        assert (fault or "").startswith(message)
        assert bool(fault) == bool(message)
    two = replace(ONE, teacher_top=np.array([[(1, -0.5)]] * 2, TOP_TOKEN))
    assert "are of 2" in str(rollout_fault(two, 4, vocab_size=9))


def test_a_record_of_another_step_and_a_missing_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"step_0000003\.jsonl: the recorded rollouts of step 3 cannot be read"):
        Record.read(tmp_path, 3)
    write_rollouts(tmp_path, 3, [ONE]).rename(record_path(tmp_path, 5))
    with pytest.raises(ValueError, match="line 1: not the head of a record of step 5"):
        Record.read(tmp_path, 5)


STEP = [replace(ONE, problem_id=f"p{at // 2}", group=at // 2, prompt_ids=token_ids((1, at // 2))) for at in range(4)]
NAN = float("nan")


def check(rollouts: list[Rollout], folder: Path) -> None:
    path = write_rollouts(folder, 4, rollouts)
    check_rollouts(path, Record.read(folder, 4).rollouts, step=4, prompts=2, samples=2, vocab_size=10)


def test_a_whole_step_is_taken_and_one_that_misses_a_rollout_is_not(tmp_path: Path) -> None:
    check(STEP, tmp_path)
    check([replace(rollout, sampler_logprobs=np.array([1e-7], np.float32)) for rollout in STEP], tmp_path)  # rounding
    nothing = replace(STEP[1], response_ids=token_ids(()), sampler_logprobs=np.zeros(0, np.float32), reward=None)
    check([STEP[0], nothing, *STEP[2:]], tmp_path)  # an episode that failed before the model's first token
    for count in (0, 2, 3):
        fault = rf"line {count + 1}: the file ends after {count} rollouts, but rollout.prompts_per_step"
        with pytest.raises(ValueError, match=fault):
            check(STEP[:count], tmp_path)


@pytest.mark.parametrize(
    ("at", "change", "message"),
    [
        (1, {"versions": WeightsVersion(3, "ab")}, "drawn by the weights of step 3, not of step 4"),
        (0, {"group": -1}, "group -1 where group 0 is due"),
        (3, {"group": 0}, "group 0 where group 1 is due"),
        (1, {"prompt_ids": (1, 1)}, "another problem or prompt than the first rollout of group 0"),
        (3, {"problem_id": "p0"}, "another problem or prompt than the first rollout of group 1"),
        (0, {"sampler_logprobs": (-0.1, -0.1)}, "2 log-probs for 1 response tokens"),
        (2, {"sampler_logprobs": (NAN,)}, "the log-prob of response token 0 is nan"),
        (1, {"loss_mask": (False,)}, "the model wrote none of the response tokens"),
        (
            1,
            {"response_ids": (3, 4), "sampler_logprobs": (-0.1, -0.5), "loss_mask": (True, False)},
            "response token 1 has the log-prob -0.5, not 0, and the model did not write it",
        ),
        (1, {"reward": NAN}, "the reward is nan"),
        (1, {"response_ids": (10,)}, "token 10 is not one of the model's 10"),
        (1, {"response_ids": (), "sampler_logprobs": ()}, "the prompt or the response has no token"),
        (0, {"sampling_mask": SamplingMask([1, 1], [5, 6])}, "a sampling mask of 2 tokens for 1 response tokens"),
        (2, {"sampling_mask": SamplingMask([1], [10])}, "token 10 is not one of the model's 10"),
    ],
)
def test_what_cannot_be_trained_on_is_named_with_its_line(
    at: int, change: dict[str, object], message: str, tmp_path: Path
) -> None:
    rollouts = list(STEP)
    rollouts[at] = replace(rollouts[at], **change)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"step_0000004\.jsonl, line {at + 2}: {re.escape(message)}"):
        check(rollouts, tmp_path)


@pytest.mark.parametrize(
    ("old", "new"), [('"reward": 1.0', '"reward": 0.5'), ('"p"', '"q"'), ('"drawn_by": "x"', '"drawn_by": "y"')]
)
def test_a_change_that_is_still_a_rollout_is_seen(old: str, new: str, tmp_path: Path) -> None:
    path = write_rollouts(tmp_path, 3, [ONE, ONE], drawn_by="x")
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(ValueError, match="line 1: the file was changed or damaged after it was written"):
        Record.read(tmp_path, 3)


def test_records_of_the_first_formats_are_read(tmp_path: Path) -> None:
    line = (
        '{"problem_id": "p", "group": 0, "prompt_ids": [1, 2], "response_ids": [3], "sampler_logprobs": [-0.1], '
        '"finish_reason": "stop", "weights_version": {"step": 4, "digest": "ab"}, "text": "a\\nb\\u2028c", "reward": 1.0}\n'
    )
    head = '{"format": 2, "step": 3, "rollouts": 1}'
    digest = sha256(f"{head}\n{line}".encode()).hexdigest()
    for first in ('{"format": 1, "step": 3, "rollouts": 1}', head[:-1] + f', "sha256": "{digest}"}}'):
        record_path(tmp_path, 3).write_text(f"{first}\n{line}")
        assert Record.read(tmp_path, 3).rollouts == [ONE]
