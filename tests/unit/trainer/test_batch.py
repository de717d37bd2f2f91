"""Packing, padding, micro-batches and the shares of context-parallel ranks: nothing is lost, nothing is counted twice."""

import random
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from megatron.core.models.common.embeddings.rope_utils import _get_thd_freqs_on_this_cp_rank

from tepo_megatron.config import EngineConfig
from tepo_megatron.core.rollout import TOP_TOKEN, Rollout, SamplingMask, WeightsVersion
from tepo_megatron.core.types import Batch
from tepo_megatron.run.step.minibatches import summarize
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.trainer.megatron import forward
from tepo_megatron.trainer.megatron.parallel.batch import Share, broadcast
from tepo_megatron.trainer.megatron.parallel.partition import attention_length, partition
from tepo_megatron.trainer.megatron.parallel.platform import Ranks
from tepo_megatron.trainer.megatron.parallel.positions import rank_order
from tepo_megatron.trainer.packing import check_recorded, pack
from tepo_megatron.trainer.protocol import UpdateResult
from tepo_megatron.weights.architecture import read_model_spec
from tests.support.random_models import draw_rollouts


def rollout(prompt: list[int], response: list[int], *, group: int = 0, reward: float = 0.0) -> Rollout:
    """A response token r could have been any of r + 100, r + 101, … (r % 3 of them)."""
    logprobs = [-0.1 * (index + 1) for index in range(len(response))]
    others = [others_of(token) for token in response]
    mask = SamplingMask([len(tokens) for tokens in others], [token for tokens in others for token in tokens])
    version = WeightsVersion(0)
    return Rollout(f"p{group}", group, prompt, response, logprobs, "stop", version, reward=reward, sampling_mask=mask)


def others_of(token: int) -> list[int]:
    return [token + 100 + number for number in range(token % 3)]


ids = st.lists(st.integers(1, 50), min_size=1, max_size=6)
rollouts = st.lists(
    st.builds(rollout, ids, ids, group=st.integers(0, 3), reward=st.floats(0, 1, width=32)), min_size=1, max_size=8
)


def test_labels_masks_and_logprobs_stand_at_the_token_before() -> None:
    batch = pack([rollout([5, 6], [7, 8]), rollout([9], [4])])
    assert batch.tokens_T.tolist() == [5, 6, 7, 8, 9, 4]
    assert batch.labels_T.tolist() == [6, 7, 8, 0, 4, 0]
    assert batch.loss_mask_T.tolist() == [False, True, True, False, True, False]
    assert batch.sampler_logprobs_T.tolist() == pytest.approx([0, -0.1, -0.2, 0, -0.1, 0])
    assert (batch.cu_seqlens.tolist(), batch.cu_seqlens.dtype) == ([0, 4, 6], torch.int64)  # a step may have 2^31 tokens
    assert batch.positions_T.tolist() == [0, 1, 2, 3, 0, 1]
    assert batch.sequence_index_T.tolist() == [0, 0, 0, 0, 1, 1]


def with_environment(sampled: Rollout, mask: list[bool]) -> Rollout:
    """The rollout with some of its tokens an environment's: those at which the mask, or the first of it, says so."""
    bits = np.resize(np.array([*mask, True]), sampled.response_ids.size)
    bits[-1] = True
    return replace(sampled, sampler_logprobs=np.where(bits, sampled.sampler_logprobs, 0), loss_mask=bits)


@given(rollouts, st.lists(st.booleans(), max_size=5), st.sampled_from(["stop", "length"]))
def test_what_an_environment_wrote_is_context_alone(sampled: list[Rollout], mask: list[bool], finish_reason: str) -> None:
    sampled = [replace(with_environment(one, mask), finish_reason=finish_reason) for one in sampled]
    batch, plain = pack(sampled), pack([replace(one, loss_mask=None) for one in sampled])
    mask_T = batch.loss_mask_T
    own = [(one, slice(None) if one.loss_mask is None else one.loss_mask) for one in sampled]
    assert batch.labels_T[mask_T].tolist() == [token for one, at in own for token in one.response_ids[at]]
    assert batch.sampler_logprobs_T[mask_T].tolist() == [value for one, at in own for value in one.sampler_logprobs[at]]
    assert mask_T.sum() == sum(one.model_tokens for one in sampled)
    assert not batch.sampler_logprobs_T[~mask_T].any()
    assert_same(batch.with_(loss_mask_T=plain.loss_mask_T), plain)  # nothing else differs
    cut = pack(sampled, mask_truncated=True)
    assert cut.loss_mask_T.any() == (finish_reason == "stop")


@given(rollouts, st.data())
def test_select_is_packing_the_selected(sampled: list[Rollout], data: st.DataObject) -> None:
    order = data.draw(st.lists(st.sampled_from(range(len(sampled))), unique=True, min_size=1))
    selected, packed = pack(sampled).select(order), pack([sampled[at] for at in order])
    assert_same(selected, packed)


def test_components_are_columns_in_the_order_of_the_first_that_has_all() -> None:
    parts: list[dict[str, float]] = [{}, {"b": 1.0, "a": 2.0}, {"a": 4.0, "b": 3.0}]
    sampled = [replace(rollout([5], [6, 7], reward=-1.0), reward_parts=each) for each in parts]
    batch = pack(sampled)
    # The first has none: it failed, and counts as reward.failed_reward in each.
    assert batch.reward_parts_SK.tolist() == [[-1.0, -1.0], [1.0, 2.0], [3.0, 4.0]]
    cut = pack([replace(sampled[0], reward_parts={"a": 5.0}), *sampled], cut_episodes=True).reward_parts_SK
    assert cut.tolist() == [[0.0, 5.0], *batch.reward_parts_SK.tolist()]
    assert pack(sampled[:1]).reward_parts_SK is None
    mixed = [*sampled, replace(sampled[0], reward_parts={"c": 1.0})]
    with pytest.raises(ValueError, match=r"problem p0 has the reward's components c, others of the step b, a"):
        pack(mixed)
    assert pack(mixed, reward_parts=False).reward_parts_SK is None  # two verifiers', where no objective reads them


def assert_same(left: Batch, right: Batch) -> None:
    for name in ("tokens_T", "labels_T", "loss_mask_T", "cu_seqlens", "sampler_logprobs_T", "rewards_S", "groups_S"):
        a, b = getattr(left, name), getattr(right, name)
        assert a.dtype == b.dtype, name
        assert torch.equal(a, b), name


ONE_RANK = Ranks(0, 1, 1, 0, 1, 0, 1, 0, 1, 0, None, None)


def shared(micro: Batch, num_tokens: int, ranks: Ranks) -> Share:
    return Share.cut(micro, micro.lengths_S.tolist(), num_tokens, ranks)


@given(rollouts, st.integers(0, 40))
def test_padding_is_beginnings_of_the_longest_sequence_outside_the_mask(sampled: list[Rollout], extra: int) -> None:
    batch = pack(sampled).with_(advantages_S=torch.ones(len(sampled)))
    share, tokens = shared(batch, batch.num_tokens + extra, ONE_RANK), batch.num_tokens
    assert share.tokens_t.numel() == tokens + extra
    assert share.real_t.tolist() == [True] * tokens + [False] * extra
    assert not share.mask_t[tokens:].any()
    longest = max(([*one.prompt_ids.tolist(), *one.response_ids.tolist()] for one in sampled), key=len)
    sequences = share.tokens_t.split(share.packed.cu_seqlens_q.diff().tolist())
    assert all(padding.tolist() == longest[: padding.numel()] for padding in sequences[len(sampled) :])


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (rollout([], [1]), "problem p0 has an empty prompt"),
        (rollout([1], []), "problem p0 has an empty response"),
        (replace(rollout([1], [2]), sampler_logprobs=np.zeros(2, np.float32)), "has 1 response tokens but 2 log-probs"),
        (replace(rollout([1], [2]), reward=None), "has no reward; leave it out of the step"),
        (replace(rollout([1], [2]), loss_mask=np.array([False])), "problem p0 has no token that the model wrote"),
        (replace(rollout([1], [2, 3]), loss_mask=np.array([True, False])), "has a log-prob other than 0 at a token that"),
    ],
)
def test_a_rollout_that_cannot_be_trained_on_is_named(broken: Rollout, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack([broken])


def test_routes_stay_with_their_tokens_and_have_none_for_the_last_of_a_sequence() -> None:
    sampled = [rollout([5, 6], [7, 8]), rollout([9], [4])]
    records = [np.arange(6, dtype=np.uint8).reshape(3, 1, 2), np.array([[[6, 7]]], np.uint8)]
    batch = pack([replace(each, routed_experts=routes) for each, routes in zip(sampled, records, strict=True)])
    none, routes_T = [[255, 255]], batch.routed_experts_T
    assert routes_T.tolist() == [[[0, 1]], [[2, 3]], [[4, 5]], none, [[6, 7]], none]
    chosen_tLk = shared(batch.select([1, 0]), 11, ONE_RANK).chosen_tLk
    assert chosen_tLk.tolist() == [[[6, 7]], none, [[0, 1]], [[2, 3]], [[4, 5]], *[none] * 6]


def test_a_record_of_another_form_is_refused() -> None:
    first, second = rollout([5, 6], [7, 8]), rollout([9], [4])
    record = replace(first, routed_experts=np.zeros((3, 1, 2), np.uint8))
    with pytest.raises(ValueError, match=r"should have a routing record, uint8 of \(1, 1, 2\), but has none"):
        pack([record, second])
    assert pack([record, second], routes=False).routed_experts_T is None
    for wrong in (np.zeros((2, 1, 2), np.uint8), np.zeros((1, 1, 3), np.uint8), np.zeros((1, 1, 2), np.int16)):
        with pytest.raises(ValueError, match=r"but has (uint8|int16) of .* another model or another length"):
            pack([record, replace(second, routed_experts=wrong)])


def top_of(response: list[int], k: int = 2) -> np.ndarray:
    return np.array([[(token + n, -0.1 * token - n) for n in range(k)] for token in response], TOP_TOKEN)


@given(rollouts, st.integers(0, 9), st.data())
def test_sampling_masks_and_top_tokens_stay_with_their_labels(sampled: list[Rollout], extra: int, data: st.DataObject) -> None:
    """From rollouts to every micro-batch of every rank."""
    batch = pack([replace(item, teacher_top=top_of(item.response_ids.tolist())) for item in sampled])
    selected = batch.select(data.draw(st.lists(st.sampled_from(range(len(sampled))), unique=True, min_size=1))).to("cpu")
    parts: list[Any] = [
        (part.labels_T, part.loss_mask_T, part.sampling_mask_T.padded(), part.top_ids_TK, part.top_logprobs_TK)
        for part in (batch, selected)
    ]
    for cp in (1, 2):
        size = -(-(Share.padded_tokens(selected.lengths_S.tolist(), cp) + extra) // (2 * cp)) * 2 * cp
        for rank in range(cp):
            share = shared(selected, size, replace(ONE_RANK, world=cp, rank=rank, cp=cp, cp_rank=rank))
            parts.append((share.labels_t, share.mask_t, share.kept_tK, share.top_ids_tK, share.top_logprobs_tK))
    for labels, mask, kept, ids, logprobs in parts:
        others = [others_of(label) if scored else [] for label, scored in zip(labels.tolist(), mask.tolist(), strict=True)]
        assert [[token for token in row if token >= 0] for row in kept.tolist()] == others
        top = top_of(labels[mask].tolist()).reshape(-1, 2)
        assert ids[mask].tolist() == top["id"].tolist()
        assert logprobs[mask].tolist() == top["logprob"].tolist()


def test_only_micro_batches_have_their_top_tokens_on_the_device() -> None:
    device = torch.device("meta")
    step = broadcast(pack([replace(rollout([5], [7, 8]), teacher_top=top_of([7, 8]))]), device)
    share = Share.cut(step, [3], 3, ONE_RANK)
    for batch, kind in ((step, "cpu"), (share.micro, "meta")):
        assert [values.device.type for values in (batch.top_ids_TK, batch.top_logprobs_TK)] == [kind] * 2
    assert share.top_ids_tK is not None
    assert share.tokens_t.device == share.top_ids_tK.device == device


def test_sampling_masks_come_to_the_device_with_their_micro_batchs_scores() -> None:
    """Padded, those of a mini-batch are gigabytes."""
    device = torch.device("meta")
    share = Share.cut(broadcast(pack([rollout([5], [7, 8])]), device), [3], 3, ONE_RANK)
    assert share.kept_tK is not None
    assert share.kept_tK.device.type == "cpu"
    with mock.patch.object(forward, "logprob_and_entropy") as scores:
        part = forward._Part(share, [share.mask_t], [2], ())
        forward.Forward._local_scores(mock.MagicMock(), torch.zeros(3, 9, device=device), None, part, train=False)
    assert scores.call_args.kwargs["kept_TK"].device == device


def test_top_tokens_of_a_part_of_the_step_or_of_another_k_are_refused() -> None:
    judged = replace(rollout([5], [7, 8]), teacher_top=top_of([7, 8]))
    for wrong in (None, top_of([4], 3), top_of([4, 4])):
        with pytest.raises(ValueError, match=r"problem p0 should have its teacher's top tokens, \(1, 2\), but has"):
            pack([judged, replace(rollout([5], [4]), teacher_top=wrong)])
    assert pack([judged, rollout([5], [4])], top_tokens=False).top_ids_TK is None
    with pytest.raises(ValueError, match=r"a teacher's top tokens must be .* with two axes, but they are float32"):
        replace(judged, teacher_top=np.zeros((2, 2), np.float32))


def test_a_sampling_mask_that_is_not_known_is_refused() -> None:
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


lengths = st.lists(st.integers(1, 100), min_size=4, max_size=60)
attentions = st.sampled_from([10.0, 1e3, float("inf")])


@given(lengths, st.sampled_from([1, 2, 4]), st.integers(20, 300), attentions, st.integers(1, 8))
@example([51] * 40, 2, 100, 1e3, 1)
@example([60, 60, 41, 41, 41, 20, 20, 20, 20], 1, 101, 10.0, 1)
@example([60, 60, 41, 41, 41, 20, 20, 20, 20], 1, 101, 10.0, 4)
def test_each_sequence_is_in_one_micro_batch_and_the_bound_holds_while_there_are_sequences_to_divide(
    lengths: list[int], ranks: int, max_tokens: int, attention: float, multiple: int
) -> None:
    """Each rank has as many, a multiple of the pipeline's stages if these are interleaved."""
    assume(ranks * multiple <= len(lengths))
    parts = partition(lengths, ranks=ranks, max_tokens=max_tokens, attention_length=attention, multiple=multiple)
    assert sorted(at for rank in parts for micro in rank for at in micro) == list(range(len(lengths)))
    assert len({len(rank) for rank in parts}) == 1
    assert len(parts[0]) % multiple == 0
    assert all(micro for rank in parts for micro in rank)
    over = [micro for rank in parts for micro in rank if sum(lengths[at] for at in micro) > max_tokens and len(micro) > 1]
    assert not over or len(parts[0]) == len(lengths) // (ranks * multiple) * multiple


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
def test_costs_are_balanced_on_a_lognormal(ranks: int) -> None:
    rng = random.Random(ranks)
    drawn = [min(32768, 1 + int(rng.lognormvariate(0, 1) * 4000 / 1.65)) for _ in range(4096)]
    parts = partition(drawn, ranks=ranks, max_tokens=65536, attention_length=1e5)
    costs = [[sum(drawn[at] + drawn[at] ** 2 / 1e5 for at in micro) for micro in rank] for rank in parts]
    for loads in ([sum(rank) for rank in costs], [micro for rank in costs for micro in rank]):
        assert max(loads) <= 1.05 * sum(loads) / len(loads)
    held = sum(len(rank) for rank in parts)
    assert held <= 1.05 * sum(drawn) / 65536 + 2 * ranks


def test_a_long_sequence_weighs_more_than_its_tokens() -> None:
    """100 tokens at once cost 100 + 100²/50 = 300, ten at a time 12 each: the rank of the long one gets fewer tokens."""
    drawn = [100, *[10] * 40]
    for attention, expected in ((float("inf"), [250, 250]), (50, [180, 320])):  # costs of 300 + 8 · 12 and 32 · 12
        parts = partition(drawn, ranks=2, max_tokens=1000, attention_length=attention)
        assert sorted(sum(drawn[at] for micro in rank for at in micro) for rank in parts) == expected


def test_the_cost_of_attention_is_that_of_the_model() -> None:
    spec = read_model_spec(resolve_model_path("builtin:tiny"))
    weights = spec.hidden_size * (2 * 128 + 2 * 64) + 3 * spec.hidden_size * spec.ffn_size
    assert attention_length(spec) == pytest.approx((weights + spec.hidden_size * spec.vocab_size / spec.num_layers) / 128)


def test_too_few_sequences_are_refused() -> None:
    with pytest.raises(ValueError, match="1 sequences cannot be spread over 2 data-parallel ranks"):
        partition([3], ranks=2, max_tokens=10)
    with pytest.raises(ValueError, match=r"7 sequences .* over 2 data-parallel ranks, 4 for each, which interleaved"):
        partition([3] * 7, ranks=2, max_tokens=10, multiple=4)
    assert [len(rank) for rank in partition([3] * 9, ranks=2, max_tokens=100, multiple=4)] == [4, 4]


sizes = st.sampled_from([1, 2, 3, 4, 8])


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), sizes)
def test_each_rank_has_its_two_chunks_of_every_sequence(chunks: list[int], cp: int) -> None:
    """A token is computed once, as many on every rank; and at the positions that Megatron's RoPE takes them to have."""
    lengths = [2 * cp * chunk for chunk in chunks]
    order_T, places = torch.from_numpy(rank_order(lengths, cp)), torch.arange(max(lengths))
    assert sorted(order_T.tolist()) == list(range(sum(lengths)))
    for rank, own_t in enumerate(order_T.view(cp, -1)):
        start = 0
        for length, own in zip(lengths, own_t.split([2 * chunk for chunk in chunks]), strict=True):
            expected = _get_thd_freqs_on_this_cp_rank(rank, cp, own, places) if cp > 1 else places[:length]
            assert torch.equal(own - start, expected)
            start += length


@given(st.lists(st.integers(3, 20), min_size=1, max_size=6), sizes, st.integers(1, 16))
def test_shares_are_all_of_a_micro_batch_and_padding_has_no_scores(lengths: list[int], cp: int, multiple: int) -> None:
    micro = pack(draw_rollouts(lengths))
    step = EngineConfig(parallel={"cp": cp}).token_multiple * multiple
    size = -(-Share.padded_tokens(lengths, cp) // step) * step
    shares = [shared(micro, size, Ranks(rank, cp, 1, 0, 1, 0, 1, 0, cp, rank, None, None)) for rank in range(cp)]
    assert all(share.micro is micro for share in shares)
    assert all(share.tokens_t.numel() == size // cp for share in shares)
    for name in ("tokens", "positions", "labels", "mask"):
        gathered_T = torch.cat([getattr(share, f"{name}_t") for share in shares])
        expected = micro.loss_mask_T if name == "mask" else getattr(micro, f"{name}_T")
        assert torch.equal(gathered_T[shares[0].source_T], expected), name
    assert sum(share.mask_t.sum() for share in shares) == micro.loss_mask_T.sum()
    for share in shares:
        padded = share.packed.cu_seqlens_q.diff()
        assert not (padded % (2 * cp if cp > 1 else 1)).any()
        assert share.packed.max_seqlen_q == int(padded.max())
        assert (share.packed.cu_seqlens_q_padded is share.packed.cu_seqlens_q) == (cp > 1)
