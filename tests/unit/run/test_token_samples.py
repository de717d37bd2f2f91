"""Values of single tokens find their response and their place in it, from whichever mini-batch they come."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.config import LogConfig
from tepo_megatron.core.problem import Problem
from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.core.types import Batch
from tepo_megatron.run.metrics import TokenSamples
from tepo_megatron.run.output.token_samples import token_samples
from tepo_megatron.run.step.minibatches import mark_recorded, minibatches
from tepo_megatron.trainer.packing import pack
from tepo_megatron.trainer.protocol import UpdateResult

PROBLEMS = {f"p{at}": Problem(f"p{at}", f"{at}+1=", f"{at + 1}", source="sums") for at in (1, 2, 4)}
TOKENIZER: Any = SimpleNamespace(show=lambda ids: f"shown {ids}", piece=lambda token: f"⟪{token}⟫")
FLOATS = ("logprob_trainer", "logprob_update", "entropy", "entropy_change", "advantage", "ratio")


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
        assert found.text_of(at) == "".join(f"⟪{token}⟫" for token in ids)
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
        assert tuple(sorted(expected)) == tuple(sorted(FLOATS))
        for name, values in expected.items():
            np.testing.assert_array_equal(getattr(found, name)[tokens], values.astype(np.float32), err_msg=name)
        assert found.masked[tokens].tolist() == (moved & (ids % 2 == 0)).tolist()


@pytest.mark.parametrize(("count", "step"), [(0, 20), (3, 19)])
def test_a_batch_is_left_as_it_is_where_nothing_is_recorded(count: int, step: int) -> None:
    batch = pack([Rollout("p", 0, (1,), (2, 3), (-1.0, -1.0), "stop", WeightsVersion(0))])
    assert mark_recorded(batch, LogConfig(token_samples=count), step) is batch


def test_the_marks_go_with_the_sequences() -> None:
    rollouts = [Rollout(f"p{at}", at // 2, (1,), (2 + at,), (-1.0,), "stop", WeightsVersion(0)) for at in range(6)]
    batch = mark_recorded(pack(rollouts), LogConfig(token_samples=2), 10)
    assert batch.recorded_S is not None
    assert batch.recorded_S.tolist() == [0, 1, 2, 3, -1, -1]
    assert torch.equal(batch.select([5, 3, 0]).recorded_S, torch.tensor([-1, 3, 0]))
