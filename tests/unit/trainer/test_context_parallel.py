"""Which tokens a context-parallel rank computes, and what a run with context parallelism is refused for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.models.common.embeddings.rope_utils import _get_thd_freqs_on_this_cp_rank

from tepo_megatron.config import EngineConfig
from tepo_megatron.trainer.megatron.batch import cut, packed_order, pad_sequences, padded_tokens, rank_order
from tepo_megatron.trainer.megatron.model.fp8 import token_multiple
from tepo_megatron.trainer.megatron.model.model import decide
from tepo_megatron.trainer.megatron.platform import Ranks
from tepo_megatron.trainer.packing import pack
from tepo_megatron.weights.layouts import check_trainer_split
from tests.support.small_llama import draw_rollouts
from tests.unit.trainer.test_refusals_gpu import SPEC

sizes = st.sampled_from([1, 2, 3, 4, 8])


def offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), sizes)
def test_each_rank_has_its_two_chunks_of_every_sequence(chunks: list[int], cp: int) -> None:
    """A token is computed once, as many on every rank; and at the positions that Megatron's RoPE takes them to have."""
    order_T = rank_order(offsets([2 * cp * chunk for chunk in chunks]), cp)
    assert sorted(order_T.tolist()) == list(range(2 * cp * sum(chunks)))
    assert torch.equal(packed_order(order_T)[order_T], torch.arange(order_T.numel()))
    for rank, own_t in enumerate(order_T.view(cp, -1)):
        start = 0
        expected: list[int] = []
        for chunk in chunks:
            for number in (rank, 2 * cp - 1 - rank):
                expected += range(start + number * chunk, start + (number + 1) * chunk)
            start += 2 * cp * chunk
        assert own_t.tolist() == expected
        start = 0
        for chunk, own in zip(chunks, own_t.split([2 * chunk for chunk in chunks]), strict=True):
            places = torch.arange(2 * cp * max(chunks))
            assert torch.equal(_get_thd_freqs_on_this_cp_rank(rank, cp, own, places), own - start) or cp == 1
            start += 2 * cp * chunk


def test_the_example_of_transformer_engine() -> None:
    """Of the docstring of ``attn_forward_func_with_cp``: sequences of 8 and 4 tokens on two ranks."""
    order_T = rank_order(offsets([8, 4]), 2)
    assert order_T.tolist() == [0, 1, 6, 7, 8, 11, 2, 3, 4, 5, 9, 10]


@given(st.lists(st.integers(3, 20), min_size=1, max_size=6), sizes, st.integers(1, 16))
def test_shares_are_all_of_a_micro_batch_and_padding_has_no_scores(lengths: list[int], cp: int, multiple: int) -> None:
    micro = pack(draw_rollouts(lengths))
    whole = token_multiple(EngineConfig(parallel={"cp": cp})) * multiple
    size = -(-padded_tokens(lengths, cp) // whole) * whole
    shares = [cut(micro, size, Ranks(rank, cp, 1, 0, 1, 0, 1, 0, cp, rank, None, None)) for rank in range(cp)]
    assert all(share.micro is micro for share in shares)
    assert all(share.tokens_t.numel() == size // cp for share in shares)
    source_T = shares[0].source_T
    for name, expected in (("tokens_t", micro.tokens_T), ("positions_t", micro.positions_T), ("labels_t", micro.labels_T)):
        gathered_T = torch.cat([getattr(share, name) for share in shares])
        assert torch.equal(gathered_T[source_T], expected), name
    mask_T = torch.cat([share.mask_t for share in shares])
    assert torch.equal(mask_T[source_T], micro.loss_mask_T)
    assert mask_T.sum() == micro.loss_mask_T.sum()
    for share in shares:
        padded = share.packed.cu_seqlens_q.diff()
        assert not (padded % (2 * cp if cp > 1 else 1)).any()
        assert share.packed.max_seqlen_q == int(padded.max())
        assert (share.packed.cu_seqlens_q_padded is share.packed.cu_seqlens_q) == (cp > 1)


@given(st.lists(st.integers(3, 20), min_size=1, max_size=6), st.integers(1, 16))
def test_sequences_are_padded_by_their_last_token(lengths: list[int], multiple: int) -> None:
    batch = pack(draw_rollouts(lengths)).with_(advantages_S=torch.ones(len(lengths)))
    padded = pad_sequences(batch, multiple)
    for number, length in enumerate(lengths):
        before, after = batch.select([number]), padded.select([number])
        assert after.num_tokens == -(-length // multiple) * multiple
        assert torch.equal(after.tokens_T[:length], before.tokens_T)
        assert torch.equal(after.sampler_logprobs_T[:length], before.sampler_logprobs_T)
        assert (after.tokens_T[length:] == before.tokens_T[-1]).all()
        assert after.loss_mask_T.sum() == before.loss_mask_T.sum()
        assert not after.sampler_logprobs_T[length:].any()


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"parallel": {"cp_comm_type": "a2a"}}, r"cp_comm_type = a2a is for context parallelism, and cp = 1"),
        ({"parallel": {"cp": 2, "cp_comm_type": "a2a"}, "platform": "cpu"}, r"cp_comm_type = a2a .* platform = cpu gathers"),
        ({"parallel": {"cp": 2, "cp_comm_type": "a2a"}, "layers": "local"}, r"cp_comm_type = a2a .* layers = local gathers"),
        ({"parallel": {"cp": 2}, "fp8": {"recipe": "delayed"}}, r"cp = 2 with fp8.recipe = delayed.*blockwise"),
        ({"parallel": {"cp": 2}, "fp8": {"recipe": "tensorwise"}}, r"cp = 2 with fp8.recipe = tensorwise.*mxfp8"),
        ({"parallel": {"cp": 2, "ep": 4}}, r"ep × etp = 4 × 1 does not divide the 2 ranks of a pipeline stage"),
    ],
)
def test_what_cannot_be_is_refused_with_the_configuration(engine: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig.model_validate(engine)


def test_an_exchange_of_transformer_engine_is_refused_on_a_machine_without_a_gpu() -> None:
    config = EngineConfig(parallel={"cp": 2, "cp_comm_type": "a2a"})
    with pytest.raises(ValueError, match=r"cp_comm_type = a2a is for Transformer Engine's attention, which needs a GPU"):
        decide(config, "cpu", None)
    assert decide(config, "cuda", None) == "te"


@pytest.mark.parametrize(("tp", "cp", "heads"), [(1, 8, "4 key/value"), (2, 4, "2 key/value"), (1, 3, "8 attention")])
def test_heads_that_ranks_cannot_trade_are_refused(tp: int, cp: int, heads: str) -> None:
    parallel = EngineConfig(parallel={"tp": tp, "cp": cp, "cp_comm_type": "a2a"}).parallel
    with pytest.raises(ValueError, match=rf"cp = {cp} with cp_comm_type = a2a does not divide the {heads} heads"):
        check_trainer_split(SPEC, parallel)
    check_trainer_split(SPEC, parallel.model_copy(update={"cp_comm_type": "p2p"}))
