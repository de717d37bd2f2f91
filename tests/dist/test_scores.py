"""Scores of sharded logits on real gloo ranks, against the dense fp64 oracle."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tepo_megatron.core.scores import fused_linear_logprob_and_entropy, logprob_and_entropy
from tepo_megatron.core.types import TeacherHead, TeacherLogits, TeacherTopK
from tests.support.dense_scores import (
    BACKENDS,
    DIVERGENCES,
    assert_scores,
    dense_logprob_and_entropy,
    loss,
    teacher_head,
    teacher_of,
    top_k_of,
)
from tests.support.launch import run_dist


def _case(world, width, vocab, dtype):
    """The whole logits [T, world·width] with rubbish in the padding, labels, a mask, weights of a loss; same on all ranks."""
    generator = torch.Generator().manual_seed(7)
    logits = 3 * torch.randn(23, world * width, generator=generator)
    logits[:, vocab:] = torch.tensor([float("inf"), float("nan"), 90.0]).repeat(world * width)[: world * width - vocab]
    labels = torch.randint(0, vocab, (23,), generator=generator)
    mask = torch.rand(23, generator=generator) < 0.7
    weights = torch.randn(2, 23, generator=generator).double()
    return logits.to(dtype), labels, mask, weights


def _kept(labels, vocab):
    """The tokens beside each label that a sampler's mask has kept: none for some, most of the vocabulary for others."""
    generator = torch.Generator().manual_seed(8)
    kept = torch.full((23, vocab - 1), -1)
    for row, label in zip(kept, labels, strict=True):
        others = [int(token) for token in torch.randperm(vocab, generator=generator) if token != label]
        count = int(torch.randint(0, vocab, (), generator=generator))
        row[:count] = torch.tensor(others[:count])
    return kept


def _score(rank, world, cases):
    return [_score_one(rank, world, dist.group.WORLD, *case) for case in cases]


def _score_one(rank, world, group, width, vocab, dtype, temperature, masked, inplace, backend, kept):
    logits, labels, mask, weights = _case(world, width, vocab, dtype)
    leaf = logits[:, rank * width : (rank + 1) * width].clone().requires_grad_()
    shard = leaf.view_as(leaf)  # what a head's output is: no leaf, so it may be overwritten
    before = shard.detach().clone()
    scores = logprob_and_entropy(
        shard,
        labels,
        tp_group=group,
        temperature=temperature,
        vocab_size=vocab,
        mask_T=mask if masked else None,
        inplace_backward=inplace,
        entropy_slope=True,
        kept_TK=_kept(labels, vocab) if kept else None,
        backend=backend,
    )
    assert torch.equal(shard.detach().nan_to_num(), before.nan_to_num()), "the forward changed its input"
    assert scores.logprob.dtype == scores.entropy.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    (weights[0] * scores.logprob + weights[1] * scores.entropy).sum().backward()
    assert (leaf.grad.data_ptr() == shard.data_ptr()) == inplace
    return scores.logprob.detach(), scores.entropy.detach(), scores.entropy_slope, leaf.grad


# width of a shard, true vocabulary: even, padded, a whole shard of padding, ...
VOCABULARIES = {1: [(37, 37), (40, 37)], 2: [(16, 32), (16, 29), (16, 13)], 4: [(8, 31), (8, 9), (10, 17)]}
# dtype, bound on log-prob and entropy, relative bound on gradients: half precision loses nothing but the gradient's rounding
DTYPES = [
    (torch.float32, 1e-5, 1e-5),
    (torch.float64, 1e-10, 1e-10),
    (torch.bfloat16, 1e-5, 2**-8),
    (torch.float16, 1e-5, 2**-10),
]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_matches_the_dense_oracle(world):
    """With temperature, padding, with and without a mask, in place and not, in all dtypes, by all backends; over the whole
    vocabulary, and over the few tokens that a sampler has kept, wherever they are.
    """
    cases, bounds = [], []
    for width, vocab in VOCABULARIES[world]:
        for dtype, atol, rtol in DTYPES:
            for masked, inplace in ((True, False), (False, True)):
                for backend, kept in [*((name, False) for name in BACKENDS), ("auto", True)]:
                    cases.append((width, vocab, dtype, 0.7, masked, inplace, backend, kept))
                    bounds.append((atol, rtol))
    ranks = run_dist(world, _score, cases) if world > 1 else [[_score_one(0, 1, None, *case) for case in cases]]
    for number, (case, (atol, rtol)) in enumerate(zip(cases, bounds, strict=True)):
        _compare([results[number] for results in ranks], world, *case[:5], case[-1], atol=atol, rtol=rtol)


def _compare(ranks, world, width, vocab, dtype, temperature, masked, kept, *, atol, rtol):
    logits, labels, mask, weights = _case(world, width, vocab, dtype)
    mask = mask if masked else None
    dense = logits.double().requires_grad_()
    options = {"temperature": temperature, "vocab_size": vocab, "mask_T": mask, "entropy_slope": True}
    oracle = dense_logprob_and_entropy(dense, labels, kept_TK=_kept(labels, vocab) if kept else None, **options)
    (weights[0] * oracle.logprob + weights[1] * oracle.entropy).sum().backward()
    gradient = dense.grad.nan_to_num()  # nothing flows to the padding; where it held inf, autograd's slice gives 0 as well
    for rank, (logprob, entropy, slope, grad) in enumerate(ranks):
        torch.testing.assert_close(logprob.double(), oracle.logprob.detach(), atol=atol, rtol=0)
        torch.testing.assert_close(entropy.double(), oracle.entropy.detach(), atol=atol, rtol=0)
        torch.testing.assert_close(slope.double(), oracle.entropy_slope, atol=atol, rtol=0)
        expected = gradient[:, rank * width : (rank + 1) * width]
        torch.testing.assert_close(grad.double(), expected, atol=rtol * expected.abs().max().item(), rtol=rtol)
        assert torch.equal(logprob, ranks[0][0])
        assert torch.equal(entropy, ranks[0][1])
        assert torch.equal(slope, ranks[0][2])


def _count_collectives(rank, world):
    counted = []
    for name in [name for name in dir(dist) if name.startswith(("all_", "reduce", "broadcast", "gather", "scatter"))]:
        original = getattr(dist, name)

        def spy(*args, name=name, original=original, **kwargs):
            counted.append(name)
            return original(*args, **kwargs)

        setattr(dist, name, spy)
    labels, seen = torch.arange(6), []
    hidden, weight = torch.randn(6, 4, requires_grad=True), torch.randn(8, 4, requires_grad=True)
    asked: dict[str, Any] = {"tp_group": dist.group.WORLD, "entropy_slope": True}
    for score in (
        lambda: logprob_and_entropy(torch.randn(6, 8, requires_grad=True), labels, tp_group=dist.group.WORLD),
        lambda: logprob_and_entropy(torch.randn(6, 8, requires_grad=True), labels, **asked),
        lambda: fused_linear_logprob_and_entropy(hidden, weight, labels, tp_group=dist.group.WORLD),
        lambda: fused_linear_logprob_and_entropy(hidden, weight, labels, **asked),
    ):
        counted.clear()
        scores = score()
        seen.append(list(counted))
        counted.clear()
        (scores.logprob + scores.entropy).sum().backward()
        seen.append(list(counted))
    return seen


def test_one_collective_forward_and_none_backward():
    """With and without the entropy's slope. The fused form sums the hidden states' gradient over the vocabulary shards, once,
    as its linear has to.
    """
    for seen in run_dist(2, _count_collectives):
        kinds = [[name.split("_")[1] for name in names] for names in seen]
        assert kinds == 2 * [["gather"], []] + 2 * [["gather"], ["reduce"]]


def _diverge(rank, world, shapes):
    group = dist.group.WORLD if world > 1 else None
    for width, vocab in shapes:
        for dtype, tolerance, rounding in (
            (torch.float32, 1e-5, 1e-5),
            (torch.float64, 1e-10, 1e-10),
            (torch.bfloat16, 1e-5, 2**-7),
        ):
            for backend in BACKENDS:
                for divergence in DIVERGENCES:
                    for k in (0, 3):
                        _diverge_once(rank, group, width, vocab, dtype, backend, divergence, k, tolerance, rounding)


def _diverge_once(rank, group, width, vocab, dtype, backend, divergence, k, tolerance, rounding):
    world = 1 if group is None else dist.get_world_size(group)
    logits, labels, mask, weights = _case(world, width, vocab, dtype)
    held: TeacherLogits | TeacherTopK = (whole := teacher_of(logits, labels, divergence, seed=1))
    columns = slice(rank * width, (rank + 1) * width)
    leaf = logits[:, columns].clone().requires_grad_()
    options = {"temperature": 0.7, "vocab_size": vocab, "mask_T": mask, "entropy_slope": True}
    shard: TeacherLogits | TeacherTopK = TeacherLogits(whole.logits_TVp[:, columns], divergence)
    if k:
        logits[:, :vocab] = logits[:, :vocab] / 3  # a rest of e⁻²⁰ would be below what counts
        leaf = logits[:, columns].clone().requires_grad_()
        shard = held = top_k_of(TeacherLogits(whole.logits_TVp[:, :vocab].clamp(min=-5), divergence), k, 0.7)
    scores = logprob_and_entropy(leaf, labels, tp_group=group, backend=backend, teacher=shard, **options)
    dense = logits.double().requires_grad_()
    oracle = dense_logprob_and_entropy(dense, labels, teacher=held, **options)
    assert_scores(scores, oracle, tolerance)
    loss(scores, weights).backward()
    loss(oracle, weights).backward()
    expected = dense.grad.nan_to_num()[:, columns]
    torch.testing.assert_close(
        leaf.grad.double(), expected, atol=rounding * float(dense.grad.nan_to_num().abs().max()), rtol=rounding
    )
    if group is not None:
        several = [torch.empty_like(scores.divergence) for _ in range(world)]
        dist.all_gather(several, scores.divergence.detach())
        assert all(torch.equal(one, several[0]) for one in several)


@pytest.mark.parametrize(
    ("world", "shapes"), [(1, [(37, 37), (40, 37)]), (2, [(16, 32), (16, 29), (16, 13)]), (4, [(8, 31), (8, 9), (10, 17)])]
)
def test_divergences_match_the_dense_oracle(world, shapes):
    """With a teacher's shards or its top 3, a mask, a temperature, and shards of padding alone; equal bits on all ranks."""
    if world == 1:
        _diverge(0, 1, shapes)
    else:
        run_dist(world, _diverge, shapes)


def _count_collectives_with_a_teacher(rank, world):
    gathered = []
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    original = getattr(dist, name)

    def spy(output, *args, **kwargs):
        gathered.append(output.nbytes // 6 // world)
        return original(output, *args, **kwargs)

    setattr(dist, name, spy)
    seen = []
    for divergence in DIVERGENCES:
        logits = torch.randn(6, 8, requires_grad=True)
        teacher = TeacherLogits(torch.randn(6, 8), divergence)
        scores = logprob_and_entropy(logits, torch.arange(6), tp_group=dist.group.WORLD, teacher=teacher)
        scores.divergence.sum().backward()
        seen.append(list(gathered))
        gathered.clear()
        top = top_k_of(TeacherLogits(torch.randn(6, 16), divergence), 5)
        scores = logprob_and_entropy(logits, torch.arange(6), tp_group=dist.group.WORLD, teacher=top)
        scores.divergence.sum().backward()
        seen.append(list(gathered))
        gathered.clear()
    return seen


def test_a_teacher_adds_bytes_to_the_collective_and_jsd_a_small_one():
    """Bytes per token, forward and backward, from logits and from the top 5."""
    assert run_dist(2, _count_collectives_with_a_teacher) == 2 * [[[40], [36], [40], [36], [40, 8], [36]]]


def _fused(rank, world, shapes):
    for width, vocab in shapes:
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            for sequence_parallel in (False, True):
                cases = [(False, None, 0), (True, None, 0), *((False, it, k) for it in DIVERGENCES for k in (0, 4))]
                for kept, divergence, k in cases:
                    _fused_one(rank, world, width, vocab, dtype, sequence_parallel, kept, divergence, k)


def _fused_one(rank, world, width, vocab, dtype, sequence_parallel, kept, divergence, k):
    generator = torch.Generator().manual_seed(3)
    hidden = (torch.randn(20, 6, generator=generator) / (4 if k else 1)).to(dtype)  # with a top k, of a rest that counts
    weight = torch.randn(world * width, 6, generator=generator).to(dtype)
    labels, mask = torch.randint(0, vocab, (20,), generator=generator), torch.rand(20, generator=generator) < 0.8
    rows = slice(rank * 20 // world, (rank + 1) * 20 // world) if sequence_parallel else slice(None)
    own_hidden = hidden[rows].clone().requires_grad_()
    own_weight = weight[rank * width : (rank + 1) * width].clone().requires_grad_()
    kept_TK = _kept(torch.cat([labels, labels[:3]]), vocab)[:20] if kept else None
    own_teacher: Any = None
    of_whole: Any = None
    if divergence is not None:
        whole = teacher_head(hidden, weight, divergence)
        own_teacher = TeacherHead(whole.hidden_TG[rows], whole.weight_VpG[rank * width : (rank + 1) * width], divergence)
        of_whole = TeacherLogits(whole.hidden_TG.double() @ whole.weight_VpG.double().t(), divergence)
    if k:
        own_teacher = of_whole = top_k_of(TeacherLogits(of_whole.logits_TVp / 4, divergence), k, 0.8, vocab)
    scores = fused_linear_logprob_and_entropy(
        own_hidden,
        own_weight,
        labels,
        tp_group=dist.group.WORLD,
        temperature=0.8,
        vocab_size=vocab,
        mask_T=mask,
        sequence_parallel=sequence_parallel,
        entropy_slope=True,
        kept_TK=kept_TK,
        teacher=own_teacher,
    )
    weights = torch.tensor([1.0, -0.3])
    loss(scores, weights).backward()
    dense_hidden, dense_weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    options = {"temperature": 0.8, "vocab_size": vocab, "mask_T": mask, "entropy_slope": True}
    oracle = dense_logprob_and_entropy(dense_hidden @ dense_weight.t(), labels, kept_TK=kept_TK, teacher=of_whole, **options)
    loss(oracle, weights).backward()
    assert_scores(scores, oracle, 1e-5)
    # in bfloat16 the gradients of the logits and the results are rounded
    scale = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-6}[dtype]
    for own, expected in (
        (own_hidden.grad, dense_hidden.grad[rows]),
        (own_weight.grad, dense_weight.grad[rank * width :][:width]),
    ):
        torch.testing.assert_close(own.double(), expected, atol=scale * expected.abs().max().item(), rtol=scale)


@pytest.mark.parametrize(("world", "cases"), [(2, [(8, 16), (8, 13), (8, 5)]), (4, [(4, 7)])])
def test_fused_linear_matches_the_dense_oracle(world, cases):
    """Both gradients, with hidden states whole or sharded over the sequence, padding, a mask and a temperature; over the whole
    vocabulary and over the few tokens that a sampler has kept.
    """
    run_dist(world, _fused, cases)


def _bad_logits(rank, world):
    messages = []
    for everywhere, bad in ((False, torch.nan), (False, torch.inf), (True, -torch.inf)):
        logits = torch.zeros(5, 4)
        if everywhere or rank == 1:
            logits[3] = bad
        with pytest.raises(ValueError, match="token 3") as caught:
            logprob_and_entropy(logits, torch.zeros(5, dtype=torch.int64), tp_group=dist.group.WORLD)
        messages.append(str(caught.value))
    return messages


def test_impossible_logits_are_named_on_every_rank():
    """All ranks raise, also those whose own logits are fine: otherwise the group would hang."""
    for nan, infinite, nothing in run_dist(2, _bad_logits):
        assert "NaN or +inf logits on tensor-parallel rank 1, first at token 3" in nan
        assert "tensor-parallel rank 1" in infinite
        assert "every logit of token 3 is −inf" in nothing
