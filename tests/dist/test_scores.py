"""Scores of sharded logits on real gloo ranks, against the dense fp64 oracle."""

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tepo_megatron.core.scores import fused_linear_logprob_and_entropy, logprob_and_entropy
from tepo_megatron.core.types import TeacherHead, TeacherLogits
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
    kept = torch.full((len(labels), vocab - 1), -1)
    for row, label in zip(kept, labels, strict=True):
        others = [int(token) for token in torch.randperm(vocab, generator=generator) if token != label]
        count = int(torch.randint(0, vocab, (), generator=generator))
        row[:count] = torch.tensor(others[:count])
    return kept


# width of a shard, true vocabulary: even, padded, a whole shard of padding, ...
SHAPES = {1: [(37, 37), (40, 37)], 2: [(16, 32), (16, 29), (16, 13)], 4: [(8, 31), (8, 9), (10, 17)]}
# dtype → bound on log-prob and entropy, relative bound on gradients: half precision loses nothing but the gradient's rounding
BOUNDS = {
    torch.float32: (1e-5, 1e-5),
    torch.float64: (1e-10, 1e-10),
    torch.bfloat16: (1e-5, 2**-8),
    torch.float16: (1e-5, 2**-10),
}


def _compare(rank, world, shape, dtype, bounds, *, backend, masked=True, inplace=False, kept=False, divergence=None, k=0):
    """This rank's scores and gradient are those of the dense oracle, and its scores the other ranks' to the bit."""
    (width, vocab), (tolerance, rounding) = shape, bounds
    logits, labels, mask, weights = _case(world, width, vocab, dtype)
    columns, group = slice(rank * width, (rank + 1) * width), dist.group.WORLD if world > 1 else None
    teacher: Any = None
    own_teacher: Any = None
    if divergence is not None:
        teacher = teacher_of(logits, labels, divergence, seed=1)
        own_teacher = TeacherLogits(teacher.logits_TVp[:, columns], divergence)
    if k:
        logits[:, :vocab] = logits[:, :vocab] / 3  # a rest of e⁻²⁰ would be below what counts
        own_teacher = teacher = top_k_of(TeacherLogits(teacher.logits_TVp[:, :vocab].clamp(min=-5), divergence), k, 0.7)
    options: dict[str, Any] = {"temperature": 0.7, "vocab_size": vocab, "mask_T": mask if masked else None}
    options |= {"entropy_slope": True, "kept_TK": _kept(labels, vocab) if kept else None}
    leaf = logits[:, columns].clone().requires_grad_()
    shard = leaf.view_as(leaf)  # what a head's output is: no leaf, so it may be overwritten
    parallel = {"tp_group": group, "inplace_backward": inplace, "backend": backend}
    scores = logprob_and_entropy(shard, labels, teacher=own_teacher, **parallel, **options)
    assert torch.equal(shard.detach().nan_to_num(), logits[:, columns].nan_to_num()), "the forward changed its input"
    assert scores.logprob.dtype == scores.entropy.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    loss(scores, weights).backward()
    assert (leaf.grad.data_ptr() == shard.data_ptr()) == inplace
    dense = logits.double().requires_grad_()
    oracle = dense_logprob_and_entropy(dense, labels, teacher=teacher, **options)
    loss(oracle, weights).backward()
    names = ["logprob", "entropy", "entropy_slope"]
    for name in names:
        ours, theirs = getattr(scores, name).detach(), getattr(oracle, name).detach()
        torch.testing.assert_close(ours.double(), theirs, atol=tolerance, rtol=0)
    if divergence is not None:
        assert_scores(scores, oracle, tolerance)
        names.append("divergence")
    # nothing flows to the padding; where it held inf, autograd's slice gives 0 as well
    expected = dense.grad.nan_to_num()[:, columns]
    torch.testing.assert_close(leaf.grad.double(), expected, atol=rounding * float(expected.abs().max()), rtol=rounding)
    if group is not None:
        own = torch.stack([getattr(scores, name).detach() for name in names])
        others = [torch.empty_like(own) for _ in range(world)]
        dist.all_gather(others, own)
        assert all(torch.equal(other, own) for other in others)


def _match(rank, world):
    ways = [*((name, False) for name in BACKENDS), ("auto", True)]
    for shape, (dtype, bounds), masked, (backend, kept) in product(SHAPES[world], BOUNDS.items(), (True, False), ways):
        _compare(rank, world, shape, dtype, bounds, backend=backend, masked=masked, inplace=not masked, kept=kept)


def _diverge(rank, world):
    bounds = {dtype: BOUNDS[dtype] for dtype in (torch.float32, torch.float64)} | {torch.bfloat16: (1e-5, 2**-7)}
    for shape, dtype, backend, divergence, k in product(SHAPES[world], bounds, BACKENDS, DIVERGENCES, (0, 3)):
        _compare(rank, world, shape, dtype, bounds[dtype], backend=backend, divergence=divergence, k=k)


@pytest.mark.parametrize("world", SHAPES)
def test_matches_the_dense_oracle(world):
    """With temperature, padding, with and without a mask, in place and not, in all dtypes, by all backends; over the whole
    vocabulary, and over the few tokens that a sampler has kept, wherever they are.
    """
    if world == 1:
        _match(0, 1)
    else:
        run_dist(world, _match)


@pytest.mark.parametrize("world", [2, 4])  # alone: test_divergence.py
def test_divergences_match_the_dense_oracle(world):
    """With a teacher's shards or its top 3, a mask, a temperature, and shards of padding alone."""
    run_dist(world, _diverge)


def _collectives(rank, world):
    """For each way to score 6 tokens, forward and backward: bytes per token of what is gathered, names of other collectives."""
    counted: list[Any] = []
    for name in [name for name in dir(dist) if name.startswith(("all_", "reduce", "broadcast", "gather", "scatter"))]:
        original = getattr(dist, name)

        def spy(*args, name=name, original=original, **kwargs):
            counted.append(args[0].nbytes // 6 // world if name.startswith("all_gather") else name)
            return original(*args, **kwargs)

        setattr(dist, name, spy)
    labels, group, hidden = torch.arange(6), dist.group.WORLD, torch.randn(6, 4, requires_grad=True)
    logits, weight = torch.randn(6, 8, requires_grad=True), torch.randn(8, 4, requires_grad=True)
    teachers = [
        teacher
        for divergence in DIVERGENCES
        for teacher in (
            TeacherLogits(torch.randn(6, 8), divergence),
            top_k_of(TeacherLogits(torch.randn(6, 16), divergence), 5),
        )
    ]
    seen = []
    for score in (
        *(partial(logprob_and_entropy, logits, entropy_slope=slope) for slope in (False, True)),
        *(partial(fused_linear_logprob_and_entropy, hidden, weight, entropy_slope=slope) for slope in (False, True)),
        *(partial(logprob_and_entropy, logits, teacher=teacher) for teacher in teachers),
    ):
        counted.clear()
        scores = score(labels, tp_group=group)
        forward = list(counted)
        counted.clear()
        loss(scores, torch.tensor([1.0, 0.5])).backward()
        seen.append((forward, list(counted)))
    return seen


def test_one_collective_forward_and_none_backward():
    """With and without the entropy's slope. The fused form sums the hidden states' gradient over the vocabulary shards, once,
    as its linear has to. A teacher, of logits or of the top 5, adds bytes, and JSD a small collective.
    """
    expected: list[Any] = [([16], []), ([24], []), ([16], ["all_reduce"]), ([24], ["all_reduce"])]
    expected += [([40], []), ([36], []), ([40], []), ([36], []), ([40, 8], []), ([36], [])]  # with teachers
    assert run_dist(2, _collectives) == 2 * [expected]


def _fused(rank, world, shapes):
    scored = [(False, None, 0), (True, None, 0), *((False, it, k) for it in DIVERGENCES for k in (0, 4))]
    dtypes = (torch.float32, torch.float64, torch.bfloat16)
    for (width, vocab), dtype, is_sharded, case in product(shapes, dtypes, (False, True), scored):
        _fused_one(rank, world, width, vocab, dtype, is_sharded, *case)


def _fused_one(rank, world, width, vocab, dtype, sequence_parallel, kept, divergence, k):
    generator = torch.Generator().manual_seed(3)
    hidden = (torch.randn(20, 6, generator=generator) / (4 if k else 1)).to(dtype)  # with a top k, of a rest that counts
    weight = torch.randn(world * width, 6, generator=generator).to(dtype)
    labels, mask = torch.randint(0, vocab, (20,), generator=generator), torch.rand(20, generator=generator) < 0.8
    rows = slice(rank * 20 // world, (rank + 1) * 20 // world) if sequence_parallel else slice(None)
    own_hidden = hidden[rows].clone().requires_grad_()
    own_weight = weight[rank * width : (rank + 1) * width].clone().requires_grad_()
    options: dict[str, Any] = {"temperature": 0.8, "vocab_size": vocab, "mask_T": mask, "entropy_slope": True}
    options["kept_TK"] = _kept(labels, vocab) if kept else None
    own_teacher: Any = None
    of_whole: Any = None
    if divergence is not None:
        whole = teacher_head(hidden, weight, divergence)
        own_teacher = TeacherHead(whole.hidden_TG[rows], whole.weight_VpG[rank * width : (rank + 1) * width], divergence)
        of_whole = TeacherLogits(whole.hidden_TG.double() @ whole.weight_VpG.double().t(), divergence)
    if k:
        own_teacher = of_whole = top_k_of(TeacherLogits(of_whole.logits_TVp / 4, divergence), k, 0.8, vocab)
    parallel = {"tp_group": dist.group.WORLD, "sequence_parallel": sequence_parallel}
    scores = fused_linear_logprob_and_entropy(own_hidden, own_weight, labels, teacher=own_teacher, **parallel, **options)
    weights = torch.tensor([1.0, -0.3])
    loss(scores, weights).backward()
    dense_hidden, dense_weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    oracle = dense_logprob_and_entropy(dense_hidden @ dense_weight.t(), labels, teacher=of_whole, **options)
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
