"""A sampling mask stays with the label that it is of, from rollouts to every micro-batch of every rank."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.core.rollout import Rollout, SamplingMask, WeightsVersion
from tepo_megatron.core.types import Batch
from tepo_megatron.run.step.minibatches import summarize
from tepo_megatron.trainer.megatron.batch import cut, pad_sequences, pad_to
from tepo_megatron.trainer.megatron.platform import Ranks
from tepo_megatron.trainer.packing import check_masks, pack
from tepo_megatron.trainer.protocol import UpdateResult


def rollout(prompt: list[int], response: list[int]) -> Rollout:
    """A response token r could have been any of r + 100, r + 101, … (r % 3 of them)."""
    others = [[token + 100 + at for at in range(token % 3)] for token in response]
    mask = SamplingMask([len(each) for each in others], [token for each in others for token in each])
    logprobs = (-1.0,) * len(response)
    return Rollout("p0", 0, prompt, response, logprobs, "stop", WeightsVersion(0), sampling_mask=mask)


def expected(label: int, scored: bool) -> list[int]:
    return [label + 100 + at for at in range(label % 3)] if scored else []


def assert_in_place(batch: Batch) -> None:
    assert batch.sampling_mask_T is not None
    rows = batch.sampling_mask_T.padded().tolist()
    assert len(rows) == batch.num_tokens
    for row, label, scored in zip(rows, batch.labels_T.tolist(), batch.loss_mask_T.tolist(), strict=True):
        assert [token for token in row if token >= 0] == expected(label, scored)


ids = st.lists(st.integers(1, 50), min_size=1, max_size=6)
rollouts = st.lists(st.builds(rollout, ids, ids), min_size=1, max_size=6)


@given(rollouts, st.integers(1, 4), st.integers(0, 9), st.data())
def test_masks_stay_with_their_labels(sampled: list[Rollout], multiple: int, extra: int, data: st.DataObject) -> None:
    batch = pack(sampled)
    assert_in_place(batch)
    order = data.draw(st.lists(st.sampled_from(range(len(sampled))), unique=True, min_size=1))
    padded = pad_sequences(batch.select(order), multiple)
    assert_in_place(pad_to(padded, padded.num_tokens + extra))


@pytest.mark.parametrize("cp", [1, 2])
def test_a_context_parallel_rank_gets_those_of_its_tokens(cp: int) -> None:
    batch = pack([rollout([5, 6], [7, 8, 11]), rollout([9], [4])])
    for rank in range(cp):
        ranks: Any = SimpleNamespace(cp=cp, cp_rank=rank, cp_group=None)
        share = cut(batch, 12, cast(Ranks, ranks))
        assert share.kept_tK is not None
        for row, label, scored in zip(share.kept_tK.tolist(), share.labels_t.tolist(), share.mask_t.tolist(), strict=True):
            assert [token for token in row if token >= 0] == expected(label, scored)


def test_what_is_not_known_is_refused() -> None:
    first, second = rollout([5], [7, 8]), rollout([5], [4])
    none = replace(second, sampling_mask=None)
    assert pack([none]).sampling_mask_T is None
    assert pack([first, none], sampling_masks=False).sampling_mask_T is None
    for wrong in (none, replace(second, sampling_mask=first.sampling_mask)):
        with pytest.raises(ValueError, match="problem p0 should have a sampling mask of 1 tokens, but has"):
            pack([first, wrong])
    check_masks([first, second])
    with pytest.raises(ValueError, match=r"problem p0 has no sampling mask, but rollout\.sampling\.top_k says"):
        check_masks([first, none])


def test_a_steps_row_says_from_how_many_tokens_one_was_drawn() -> None:
    update = UpdateResult(0.0, 0.0, 0.1, {}, {}, skipped="of no interest")
    row = summarize(pack([rollout([5, 6], [7, 8, 11]), rollout([9], [3])]), [update])
    assert (row["sampling/kept_mean"], row["sampling/kept_max"]) == ((2 + 3 + 3 + 1) / 4, 3)
    none = summarize(pack([replace(rollout([5], [7]), sampling_mask=None)]), [update])
    assert not any(name.startswith("sampling/") for name in none)
