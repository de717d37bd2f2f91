"""What is Triton's alone, in its interpreter. `test_backends.py` runs this file, and tests of all backends, in a process of its
own, with TRITON_INTERPRET=1.
"""

from functools import partial
from typing import Any

import pytest
import torch

from tepo_megatron.core.scores import logprob_and_entropy
from tepo_megatron.core.scores.shard import Gradients, LocalLabels, Logits, Scoring, combine, merge
from tepo_megatron.core.scores.triton_sweep import gradient, mixture, statistics
from tepo_megatron.core.types import Checks, Divergence, TeacherLogits, TokenScores
from tepo_megatron.tools.bench.scores import methods
from tests.support.dense_scores import DIVERGENCES, assert_scores, compare, dense_logprob_and_entropy, loss, teacher_of

check = partial(compare, backend="triton", tolerance=2e-5)


STRIDES = {"rows apart": (666, 1), "columns apart": (666, 2), "transposed": (1, 12)}


@pytest.mark.parametrize(
    ("layout", "dtype", "divergence"),
    [
        ("rows apart", torch.bfloat16, None),
        ("columns apart", torch.float16, None),
        ("transposed", torch.float32, None),
        *zip(STRIDES, 3 * [torch.bfloat16], DIVERGENCES, strict=True),
    ],
)
def test_half_precision_and_any_stride_lose_nothing_but_the_gradients_rounding(
    layout: str, dtype: torch.dtype, divergence: Divergence | None
) -> None:
    logits = torch.empty_strided((12, 333), STRIDES[layout], dtype=dtype).copy_(4 * torch.randn(12, 333))
    labels, mask = torch.randint(0, 301, (12,)), torch.rand(12) < 0.6
    logits[3, 7:200], labels[3], mask[3] = -torch.inf, 300, True
    options: dict[str, Any] = {"temperature": 0.7, "vocab_size": 301, "mask_T": mask}
    if divergence is not None:
        held = teacher_of(logits, labels, divergence)
        there = torch.empty(333, 12, dtype=dtype).t().copy_(held.logits_TVp)
        options["teacher"] = TeacherLogits(there, divergence)
    close = {"tolerance": 1e-5, "gradient_tolerance": max(torch.finfo(dtype).eps, 1e-5)}
    check(logits, labels, options, torch.randn(2, 12), inplace=divergence is None, **close)


def test_fp64_is_as_exact_as_in_torch():
    logits = torch.randn(4, 50, dtype=torch.float64)
    check(logits, torch.arange(4), {"vocab_size": 47}, torch.randn(2, 4), inplace=False, tolerance=1e-9)


def test_a_large_offset_costs_no_digits():
    shifted = (torch.randn(20, 300, dtype=torch.float64) + 1000).float()
    labels = torch.arange(20)
    scores, oracle = logprob_and_entropy(shifted, labels, backend="triton"), dense_logprob_and_entropy(shifted, labels)
    assert (scores.logprob - oracle.logprob).abs().max() < 2e-6
    assert (scores.entropy - oracle.entropy).abs().max() < 2e-6


@pytest.mark.parametrize("used", [["logprob"], ["entropy"], ["logprob", "entropy"]])
def test_in_place_writes_the_same_bits(used):
    """With masked rows and padding, both full of NaN; also where only one of the outputs is used."""
    logits, labels, mask = 3 * torch.randn(7, 290), torch.randint(0, 270, (7,)), torch.rand(7) < 0.5
    logits[~mask] = torch.nan
    logits[:, 270:] = torch.nan
    gradients: list[torch.Tensor] = []
    options: dict[str, Any] = {"vocab_size": 270, "mask_T": mask, "temperature": 1.3}
    for inplace in (False, True):
        leaf = logits.clone().requires_grad_()
        scores = logprob_and_entropy(leaf.view_as(leaf), labels, inplace_backward=inplace, backend="triton", **options)
        sum(getattr(scores, name).sum() for name in used).backward()
        assert (leaf.grad.data_ptr() == leaf.data_ptr()) == inplace
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)
    assert not gradients[0][~mask].any()
    assert not gradients[0][:, 270:].any()
    dense = logits.double().requires_grad_()
    oracle = dense_logprob_and_entropy(dense, labels, **options)
    sum(getattr(oracle, name).sum() for name in used).backward()
    torch.testing.assert_close(gradients[0].double(), dense.grad.nan_to_num(), rtol=1e-5, atol=1e-6)


def test_more_than_two_billion_logits(tmp_path):
    """The third row starts beyond 2³¹ elements; the file that stands for the tensor is sparse."""
    stride = 2**30 + 16
    elements = torch.from_file(str(tmp_path / "logits"), shared=True, size=2 * stride + 300, dtype=torch.bfloat16)
    logits = elements.as_strided((3, 300), (stride, 1)).copy_(torch.randn(3, 300))
    labels, expected = torch.tensor([3, 7, 299]), logits.clone().requires_grad_()
    leaf = logits.requires_grad_()
    logprob_and_entropy(leaf.view_as(leaf), labels, inplace_backward=True, backend="triton").logprob.sum().backward()
    logprob_and_entropy(expected, labels, backend="torch").logprob.sum().backward()
    torch.testing.assert_close(leaf.detach(), expected.grad)  # autograd keeps a copy of a gradient with such strides


def _shard(labels, rank, width, vocab, temperature, divergence):
    """What `Scoring.plan` makes of a call on one of several ranks."""
    columns = min(max(vocab - rank * width, 0), width)
    column = labels - rank * width
    inside = (column >= 0) & (column < columns)
    local = LocalLabels(torch.where(inside, column, 0), inside)
    return Scoring(None, temperature, columns, labels.numel(), None, local, Checks(), True, divergence=divergence)


EVEN, PADDED = (2, 150, 300), (3, 140, 200)


@pytest.mark.parametrize(
    ("divergence", "sizes"), [*((divergence, PADDED) for divergence in DIVERGENCES), (DIVERGENCES[2], EVEN)]
)
def test_shards(divergence, sizes):
    """Even, and with one that is padded in part and one that is all padding; each rank's statistics and gradient, without a
    group between them.
    """
    world, width, vocab = sizes
    logits, labels, weights = 3 * torch.randn(5, world * width), torch.randint(0, vocab, (5,)), torch.randn(2, 5)
    dense = logits.double().requires_grad_()
    held = teacher_of(logits, labels, divergence)
    oracle = dense_logprob_and_entropy(dense, labels, temperature=0.7, vocab_size=vocab, entropy_slope=True, teacher=held)
    loss(oracle, weights).backward()
    scorings = [_shard(labels, rank, width, vocab, 0.7, divergence) for rank in range(world)]
    shards = list(map(Logits, logits.split(width, 1), held.logits_TVp.split(width, 1)))
    stats_pRK, sums_pR2 = torch.full((world, 5, 12), torch.nan), torch.zeros(world, 5, 2)
    for shard, scoring, stats_RK in zip(shards, scorings, stats_pRK, strict=True):
        statistics(shard, scoring, stats_RK)
    rows, _ = combine(stats_pRK, scorings[0])
    for shard, scoring, sums_R2 in zip(shards, scorings, sums_pR2, strict=True):
        if scoring.has_mixture:
            mixture(shard, scoring, rows, sums_R2)
    scores, others = combine(stats_pRK, scorings[0], sums_pR2.sum(0))
    merged, _ = combine(merge(stats_pRK, 0.7, divergence)[None], scorings[0])  # as the parts of a row are
    torch.testing.assert_close(merged.logprob_R, scores.logprob_R)
    assert_scores(TokenScores(scores.logprob_R, scores.entropy_R, *others), oracle, 1e-5)
    out, gradients = torch.full_like(logits, torch.nan), Gradients(weights[0], weights[1], weights[0] - weights[1])
    for shard, scoring, out_shard in zip(shards, scorings, out.split(width, 1), strict=True):
        gradient(shard, scoring, scores, gradients, out_shard)
    torch.testing.assert_close(out.double(), dense.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("bad", "everywhere", "message"),
    [
        (torch.nan, False, "tensor-parallel rank 0, first at token 2"),
        (torch.inf, False, "tensor-parallel rank 0, first at token 2"),
        (-torch.inf, True, "every logit of token 2 is −inf"),
    ],
)
def test_impossible_logits_are_named(bad, everywhere, message):
    logits = torch.zeros(4, 300)
    logits[2, slice(None) if everywhere else 170] = bad
    with pytest.raises(ValueError, match=message):
        logprob_and_entropy(logits, torch.zeros(4, dtype=torch.int64), backend="triton")


def test_what_the_benchmark_measures_is_the_same_gradient():
    """On a GPU: with torch and Triton, whole and the kernels alone."""
    logits, labels, weights = torch.randn(3, 300), torch.randint(0, 300, (3,)), torch.randn(2, 3)
    gradients = []
    for name, method in methods("cuda", logits, labels).items():
        if "tepo" in name or "Triton" in name:
            leaf = logits.clone().requires_grad_()
            torch.autograd.backward(method(leaf.view_as(leaf), labels), list(weights))
            gradients.append(leaf.grad)
    assert len(gradients) == 7
    for gradient_TV in gradients:
        torch.testing.assert_close(gradient_TV, gradients[0], rtol=1e-5, atol=1e-6)
