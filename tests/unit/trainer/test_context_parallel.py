"""Which tokens a context-parallel rank computes, and which splits are refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.models.common.embeddings.rope_utils import _get_thd_freqs_on_this_cp_rank

from tepo_megatron.config import EngineConfig, ParallelConfig
from tepo_megatron.trainer.megatron.batch import cut, padded_tokens, rank_order
from tepo_megatron.trainer.megatron.model.fp8 import token_multiple
from tepo_megatron.trainer.megatron.platform import Ranks
from tepo_megatron.trainer.packing import pack
from tepo_megatron.weights.layouts import check_trainer_split, pipeline_stages_of
from tests.support.random_models import draw_rollouts
from tests.unit.trainer.test_refusals_gpu import SPEC

sizes = st.sampled_from([1, 2, 3, 4, 8])


def offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), sizes)
def test_each_rank_has_its_two_chunks_of_every_sequence(chunks: list[int], cp: int) -> None:
    """A token is computed once, as many on every rank; and at the positions that Megatron's RoPE takes them to have."""
    order_T = rank_order(offsets([2 * cp * chunk for chunk in chunks]), cp)
    assert sorted(order_T.tolist()) == list(range(2 * cp * sum(chunks)))
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


@pytest.mark.parametrize(("tp", "cp", "heads"), [(1, 8, "4 key/value"), (2, 4, "2 key/value"), (1, 3, "8 attention")])
def test_heads_that_ranks_cannot_trade_are_refused(tp: int, cp: int, heads: str) -> None:
    parallel = EngineConfig(parallel={"tp": tp, "cp": cp, "cp_comm_type": "a2a"}).parallel
    with pytest.raises(ValueError, match=rf"cp = {cp} with cp_comm_type = a2a does not divide the {heads} heads"):
        check_trainer_split(SPEC, parallel)
    check_trainer_split(SPEC, parallel.model_copy(update={"cp_comm_type": "p2p"}))


FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pp": 3}, r"engine.parallel.pp = 3 does not divide the model's 8 layers"),
        ({"pp": 2, "vpp": 3}, r"pp = 2, vpp = 3: 3 chunks do not divide a pipeline stage of 4 layers"),
        ({"pp": 2, FIRST: 3, LAST: 4}, rf"pp = 2, {FIRST} = 3, {LAST} = 4: 8 layers do not split over 2"),
        ({"pp": 4, FIRST: 1}, rf"pp = 4, {FIRST} = 1: 8 layers do not split over 4 pipeline stages with 1 in the first"),
        ({"pp": 2, "vpp": 2, FIRST: 2, LAST: 4}, r"8 layers do not split"),
    ],
)
def test_stages_that_do_not_fit_the_layers_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pipeline_stages_of(SPEC, ParallelConfig.model_validate(changes))
