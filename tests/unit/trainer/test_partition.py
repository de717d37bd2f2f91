"""Each sequence is computed once, within the bound, and every rank and micro-batch costs about as much as the others."""

import random
import re

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.trainer.megatron.batching.partition import attention_length, partition
from tepo_megatron.weights.architecture import read_model_spec

Parts = list[list[list[int]]]


def cost(length: int, attention: float) -> float:
    return length + length * length / attention


def imbalance(loads: list[float]) -> float:
    return max(loads) / (sum(loads) / len(loads))


def lognormal(count: int, *, mean: float, longest: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [min(longest, 1 + int(rng.lognormvariate(0, 1) * mean / 1.65)) for _ in range(count)]


lengths = st.lists(st.integers(1, 100), min_size=4, max_size=60)


attentions = st.sampled_from([10.0, 1e3, float("inf")])


@given(lengths, st.sampled_from([1, 2, 4]), st.integers(20, 300), attentions, st.integers(1, 8))
def test_each_sequence_is_in_one_micro_batch_and_each_rank_has_as_many(
    lengths: list[int], ranks: int, max_tokens: int, attention: float, multiple: int
) -> None:
    """Also a multiple of the pipeline's stages, where these are interleaved."""
    assume(ranks * multiple <= len(lengths))
    parts = partition(lengths, ranks=ranks, max_tokens=max_tokens, attention_length=attention, multiple=multiple)
    assert sorted(at for rank in parts for micro in rank for at in micro) == list(range(len(lengths)))
    assert len({len(rank) for rank in parts}) == 1
    assert len(parts[0]) % multiple == 0
    assert all(micro for rank in parts for micro in rank)


@given(lengths, st.sampled_from([1, 2, 4]), st.integers(20, 300), attentions, st.integers(1, 8))
@example([51] * 40, 2, 100, 1e3, 1)
@example([60, 60, 41, 41, 41, 20, 20, 20, 20], 1, 101, 10.0, 1)
@example([60, 60, 41, 41, 41, 20, 20, 20, 20], 1, 101, 10.0, 4)
def test_the_bound_holds_while_there_are_sequences_to_divide(
    lengths: list[int], ranks: int, max_tokens: int, attention: float, multiple: int
) -> None:
    assume(ranks * multiple <= len(lengths))
    parts = partition(lengths, ranks=ranks, max_tokens=max_tokens, attention_length=attention, multiple=multiple)
    over = [micro for rank in parts for micro in rank if sum(lengths[at] for at in micro) > max_tokens and len(micro) > 1]
    assert not over or len(parts[0]) == len(lengths) // (ranks * multiple) * multiple


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("seed", range(3))
def test_costs_are_balanced_on_a_lognormal(ranks: int, seed: int) -> None:
    drawn = lognormal(4096, mean=4000, longest=32768, seed=seed)
    parts = partition(drawn, ranks=ranks, max_tokens=65536, attention_length=1e5)
    costs = [[sum(cost(drawn[at], 1e5) for at in micro) for micro in rank] for rank in parts]
    assert imbalance([sum(rank) for rank in costs]) <= 1.05
    assert imbalance([micro for rank in costs for micro in rank]) <= 1.05
    held = sum(len(rank) for rank in parts)
    assert held <= 1.05 * sum(drawn) / 65536 + 2 * ranks


def test_a_long_sequence_weighs_more_than_its_tokens() -> None:
    """100 tokens at once cost 100 + 100²/50 = 300, ten at a time 12 each: the rank of the long one gets fewer tokens."""
    drawn = [100, *[10] * 40]
    alike = partition(drawn, ranks=2, max_tokens=1000)
    weighed = partition(drawn, ranks=2, max_tokens=1000, attention_length=50)
    tokens = lambda parts: [sum(drawn[at] for micro in rank for at in micro) for rank in parts]  # noqa: E731
    assert sorted(tokens(alike)) == [250, 250]
    assert sorted(tokens(weighed)) == [180, 320]  # costs of 300 + 8 · 12 = 396 and 32 · 12 = 384


def test_the_cost_of_attention_is_that_of_the_model() -> None:
    spec = read_model_spec(resolve_model_path("builtin:tiny"))
    weights = spec.hidden_size * (2 * 128 + 2 * 64) + 3 * spec.hidden_size * spec.ffn_size
    assert attention_length(spec) == pytest.approx((weights + spec.hidden_size * spec.vocab_size / spec.num_layers) / 128)


def test_too_few_sequences_for_the_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("1 sequences cannot be spread over 2 data-parallel ranks")):
        partition([3], ranks=2, max_tokens=10)


def test_too_few_sequences_for_interleaved_stages_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"7 sequences cannot be spread over 2 data-parallel ranks, 4 for each, which interleaved"
    ):
        partition([3] * 7, ranks=2, max_tokens=10, multiple=4)
    assert [len(rank) for rank in partition([3] * 9, ranks=2, max_tokens=100, multiple=4)] == [4, 4]
