"""A sampling mask stays with the label that it is of, from rollouts to every micro-batch of every rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.core.rollout import Rollout, SamplingMask, WeightsVersion
from tepo_megatron.core.types import Batch
from tepo_megatron.run.step.minibatches import summarize
from tepo_megatron.trainer.megatron.batch import cut, padded_tokens
from tepo_megatron.trainer.megatron.platform import Ranks
from tepo_megatron.trainer.packing import check_recorded, pack
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


@given(rollouts, st.integers(0, 9), st.data())
def test_masks_stay_with_their_labels(sampled: list[Rollout], extra: int, data: st.DataObject) -> None:
    batch = pack(sampled)
    assert_in_place(batch)
    order = data.draw(st.lists(st.sampled_from(range(len(sampled))), unique=True, min_size=1))
    selected = batch.select(order)
    assert_in_place(selected)
    for cp in (1, 2):
        size = -(-(padded_tokens(selected.lengths_S.tolist(), cp) + extra) // (2 * cp)) * 2 * cp
        for rank in range(cp):
            share = cut(selected, size, Ranks(rank, cp, 1, 0, 1, 0, 1, 0, cp, rank, None, None))
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
    check_recorded([first, second], routes_of=None, sampling_masks=True)
    with pytest.raises(ValueError, match=r"problem p0 has no sampling mask, but rollout\.sampling\.top_k says"):
        check_recorded([first, none], routes_of=None, sampling_masks=True)


def test_a_steps_row_says_from_how_many_tokens_one_was_drawn() -> None:
    update = UpdateResult(0.0, 0.0, 0.1, {}, {}, skipped="of no interest")
    row = summarize(pack([rollout([5, 6], [7, 8, 11]), rollout([9], [3])]), [update])
    assert (row["sampling/kept_mean"], row["sampling/kept_max"]) == ((2 + 3 + 3 + 1) / 4, 3)
    none = summarize(pack([replace(rollout([5], [7]), sampling_mask=None)]), [update])
    assert not any(name.startswith("sampling/") for name in none)
