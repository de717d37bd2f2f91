"""Rows and values of tokens on disk, and the time of a step."""

import io
import json
import math
import re
from collections import Counter
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tepo_megatron.config import LogConfig
from tepo_megatron.core.problem import Problem
from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.core.types import Batch
from tepo_megatron.run.metrics import (
    PHASES,
    MetricsWriter,
    Stopwatch,
    TokenSamples,
    read_metrics,
    read_tokens,
    token_file,
    token_files,
    value_in,
)
from tepo_megatron.run.output.token_samples import token_samples
from tepo_megatron.run.step.minibatches import mark_recorded, minibatches
from tepo_megatron.runtime.files import write_atomically
from tepo_megatron.trainer.packing import pack
from tepo_megatron.trainer.protocol import UpdateResult
from tests.support.report_runs import made_up_tokens
from tests.unit.run.conftest import scalars

keys = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=8).filter(
    lambda key: key != "step"
)
rows = st.lists(st.dictionaries(keys, st.floats(allow_nan=True, allow_infinity=True), max_size=4), max_size=5)


@settings(max_examples=20)
@given(rows=rows)
def test_rows_are_read_as_written_and_what_is_not_finite_is_null(
    rows: list[dict[str, float]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    output = tmp_path_factory.mktemp("run")
    with closing(MetricsWriter(output, tensorboard=False)) as writer:
        for step, row in enumerate(rows):
            writer.write(step, row)
    expected = [
        {"step": step} | {key: value if math.isfinite(value) else None for key, value in row.items()}
        for step, row in enumerate(rows)
    ]
    assert read_metrics(output / "metrics.jsonl") == expected


def test_resuming_drops_the_rows_beyond_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tepo_megatron.run.metrics._NUMBERS", iter((9, 10))
    )  # TensorBoard reads files in the order of their names
    with closing(MetricsWriter(tmp_path, tensorboard=True)) as writer:
        for step in range(5):
            writer.write(step, {"lr": float(step), "accuracy/avg@k": 0.5 if step else math.nan})
    with closing(MetricsWriter(tmp_path, tensorboard=True)) as writer:
        writer.truncate_after(2)
        writer.write(3, {"lr": 30.0})
    assert [(row["step"], row["lr"]) for row in read_metrics(tmp_path / "metrics.jsonl")] == [(0, 0), (1, 1), (2, 2), (3, 30)]
    assert scalars(tmp_path, "lr") == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 30.0)]
    assert scalars(tmp_path, "accuracy/avg@k") == [(1, 0.5), (2, 0.5)]


def test_resuming_mends_rows_that_were_edited_and_says_which_are_missing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}, "lr": {number}}}\n' for number, step in enumerate([0, 3, 1, 1, 9])))
    with closing(MetricsWriter(tmp_path, tensorboard=False)) as writer:
        assert writer.truncate_after(4) == [2]
        assert writer.last_step == 3
    assert [(row["step"], row["lr"]) for row in read_metrics(path)] == [(0, 0), (1, 3), (3, 1)]


moves = st.lists(st.sampled_from([*PHASES, "end", "fail"]) | st.integers(0, 9), max_size=20)


@given(moves=moves)
def test_time_is_that_of_the_innermost_phase(moves: list[str | int]) -> None:
    """Numbers are seconds that pass; a phase ends also if it raises."""
    now = [100.0]
    watch, expected, phases = Stopwatch(lambda: now[0]), Counter[str](), list[tuple[str, AbstractContextManager[None]]]()
    for move in moves:
        if isinstance(move, int):
            now[0] += move
            expected[phases[-1][0] if phases else "other"] += move
        elif move in PHASES:
            phases.append((move, watch.phase(move)))
            phases[-1][1].__enter__()
        elif phases:
            error = ZeroDivisionError() if move == "fail" else None
            assert not phases.pop()[1].__exit__(None if error is None else type(error), error, None)
    split = watch.split()
    assert split == {f"time/{name}": expected[name] for name in (*PHASES, "other")} | {"time/step": expected.total()}
    assert set(watch.split().values()) == {0.0}


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
    written = made_up_tokens(step, lengths, seed=seed)
    written = replace(written, prompts=(*written.prompts, replace(made_up_tokens().prompts[0], text=text, answer=None)))
    assert token_files(folder) == {}
    for name in ("step_0000030.npz.partial", "step_last.npz"):
        write_atomically(folder / "tokens" / name, b"")
    paths = {at: token_file(folder, at) for at in sorted({step, 5 * 10**6, 10**8})}
    for path in reversed(paths.values()):
        write_atomically(path, written.encode())
    assert list(token_files(folder).items()) == list(paths.items())
    result = read_tokens(paths[step])
    assert result.encode() == written.encode() == paths[step].read_bytes()
    for index, length in enumerate(lengths):
        assert result.ids[result.tokens_of(index)].size == length
    if result.ids.size:
        assert result.encode() != replace(result, masked=~result.masked).encode()


@given(at=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255), cut=st.booleans())
def test_a_damaged_file_is_a_sentence_or_has_lost_nothing(
    at: float, flip: int, cut: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    made = made_up_tokens().encode()
    data = bytearray(made)
    place = int(at * len(data))
    data[place:] = b"" if cut else bytes([data[place] ^ flip]) + data[place + 1 :]
    path = tmp_path_factory.mktemp("run") / "step_0000030.npz"
    path.write_bytes(data)
    said = ""
    try:
        assert read_tokens(path).encode() == made
    except ValueError as error:
        said = str(error)
    assert not said or re.fullmatch(rf"{path} holds no token values that can be read: .*; remove it", said)


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
        ({"meta": np.array(json.dumps({"format": 3}))}, "is of format 3, and this version reads format 2"),
    ],
)
def test_what_does_not_fit_together_is_refused(changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    path = tmp_path / "step_0000030.npz"
    path.write_bytes(archive(**changes))
    with pytest.raises(ValueError, match=why):
        read_tokens(path)
    with pytest.raises(FileNotFoundError):
        read_tokens(tmp_path / "another.npz")


PROBLEMS = {f"p{at}": Problem(f"p{at}", f"{at}+1=", f"{at + 1}", source="sums") for at in (1, 2, 4)}
TOKENIZER: Any = SimpleNamespace(show=lambda ids: f"shown {ids}", piece=lambda token: f"⟪{token}⟫")


@st.composite
def steps(draw: st.DrawFn) -> list[Rollout]:
    """A step's rollouts: groups of several sizes, some numbers of groups missing; turns of environments, cut responses, tokens
    of several versions. Every token of the step has an id of its own.
    """
    found: list[Rollout] = []
    token = 10
    for group in draw(st.lists(st.integers(1, 5), min_size=1, max_size=4, unique=True).map(sorted)):
        prompt = draw(st.integers(1, 3))
        for _ in range(draw(st.integers(1, 3))):
            size = draw(st.integers(1, 5))
            own = draw(st.lists(st.booleans(), min_size=size, max_size=size).filter(any))
            starts = [0, *sorted(draw(st.sets(st.integers(1, 5))) & set(range(1, size)))]
            ids = range(token, token + prompt + size)
            token += prompt + size
            found.append(
                Rollout(
                    f"p{group}",
                    group,
                    ids[:prompt],
                    ids[prompt:],
                    [-float(id_) if mine else 0.0 for id_, mine in zip(ids[prompt:], own, strict=True)],
                    draw(st.sampled_from(["stop", "length"])),
                    tuple((start, WeightsVersion(7 + start)) for start in starts),
                    reward=float(len(found)) / 2,
                    loss_mask=own,
                )
            )
    return found


def scored(part: Batch) -> Batch:
    """Every value says of which token it is: labels are the tokens' ids."""
    label_T = part.labels_T.float()
    part = part.with_(old_logprobs_T=label_T + 0.25, old_entropy_T=label_T + 0.5)
    return part.with_(advantages_S=part.rewards_S + 100)


def updated(part: Batch, *, skipped: bool) -> UpdateResult:
    """As the engine hands values back: of recorded sequences, prompts included."""
    if skipped or part.recorded_S is None:
        return UpdateResult(1.0, 1.0, 0.1, {}, {})
    label_R = part.labels_T[(part.recorded_S >= 0)[part.sequence_index_T]].float()
    values = {"logprob_update": label_R + 1, "entropy_change": label_R + 2, "ratio": label_R + 3, "masked": label_R % 2 == 0}
    return UpdateResult(1.0, 1.0, 0.1, {}, {}, token_values=values)


def record(rollouts: list[Rollout], count: int, parts: int, *, mask_truncated: bool, skipped: int) -> TokenSamples:
    batch = mark_recorded(pack(rollouts, mask_truncated=mask_truncated), LogConfig(token_samples=count), 20)
    cut = [scored(part) for part in minibatches(batch, parts, seed=0, step=19)]
    updates = [updated(part, skipped=at == skipped) for at, part in enumerate(cut)]
    return token_samples(20, rollouts, cut, updates, count, PROBLEMS, TOKENIZER)


@given(
    rollouts=steps(), count=st.integers(1, 5), parts=st.integers(1, 3), mask_truncated=st.booleans(), skipped=st.integers(0, 4)
)
def test_every_value_is_that_of_its_token(
    rollouts: list[Rollout], count: int, parts: int, mask_truncated: bool, skipped: int
) -> None:
    found = record(rollouts, count, parts, mask_truncated=mask_truncated, skipped=skipped)
    groups = sorted({rollout.group for rollout in rollouts})[:count]
    chosen = [rollout for rollout in rollouts if rollout.group in groups]
    trained = [not (mask_truncated and rollout.finish_reason == "length") for rollout in chosen]
    assert found.step == 20
    assert [prompt.problem for prompt in found.prompts] == [f"p{group}" for group in groups]
    assert [prompt.answer for prompt in found.prompts] == [
        PROBLEMS[name].answer if (name := f"p{group}") in PROBLEMS else None for group in groups
    ]
    assert found.lengths.tolist() == [rollout.response_ids.size for rollout in chosen]
    assert [groups[at] for at in found.prompt] == found.group.tolist() == [rollout.group for rollout in chosen]
    assert found.reward.tolist() == [rollout.reward for rollout in chosen]
    assert found.truncated.tolist() == [rollout.finish_reason == "length" for rollout in chosen]
    assert (found.update > 0).tolist() == trained
    assert set(found.update.tolist()) <= set(range(parts + 1))
    for at, (rollout, is_trained) in enumerate(zip(chosen, trained, strict=True)):
        tokens, own = found.tokens_of(at), rollout.loss_mask
        mine = np.ones(rollout.response_ids.size, bool) if own is None else own
        ids = rollout.response_ids
        assert found.ids[tokens].tolist() == ids.tolist()
        assert found.loss_mask[tokens].tolist() == mine.tolist()
        assert found.version[tokens].tolist() == [
            7 + max(s for s, _ in rollout.versions if s <= place) for place in range(ids.size)
        ]
        np.testing.assert_array_equal(found.logprob_sampler[tokens], np.where(mine, -ids.astype(np.float32), np.nan))
        learns = mine & is_trained
        moved = learns & (found.update[at] != skipped + 1)
        expected = {
            "logprob_trainer": np.where(learns, ids + 0.25, np.nan),
            "entropy": np.where(learns, ids + 0.5, np.nan),
            "advantage": np.where(learns, 100 + (rollout.reward or 0.0), np.nan),
            "logprob_update": np.where(moved, ids + 1, np.nan),
            "entropy_change": np.where(moved, ids + 2, np.nan),
            "ratio": np.where(moved, ids + 3, np.nan),
        }
        for name, values in expected.items():
            np.testing.assert_array_equal(getattr(found, name)[tokens], values.astype(np.float32), err_msg=name)
        assert found.masked[tokens].tolist() == (moved & (ids % 2 == 0)).tolist()


def test_the_first_groups_are_marked_in_steps_that_are_recorded() -> None:
    """The marks go with the sequences."""
    batch = pack([Rollout(f"p{at}", at // 2, (1,), (2 + at,), (-1.0,), "stop", WeightsVersion(0)) for at in range(6)])
    for count, step in ((0, 20), (3, 19)):
        assert mark_recorded(batch, LogConfig(token_samples=count), step) is batch
    recorded_S = mark_recorded(batch, LogConfig(token_samples=2), 10).select([5, 3, 0, 1, 2]).recorded_S
    assert recorded_S.tolist() == [-1, 3, 0, 1, 2]


@given(k=st.integers(0, 99), other=st.integers(100, 999))
def test_accuracies_of_samples_have_their_number_and_the_earlier_name_is_understood(k: int, other: int) -> None:
    name = f"accuracy/avg@{k}"
    for row in ({name: 0.5}, {"accuracy/avg@k": 0.5}):
        assert value_in(row, name) == value_in(row, "accuracy/avg@k") == 0.5
        assert value_in(row, f"eval/{name}") is None
    assert value_in({name: 0.5}, f"accuracy/avg@{other}") is None
