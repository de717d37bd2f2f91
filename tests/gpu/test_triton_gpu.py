"""Triton's kernels on a GPU, against the dense fp64 oracle, at the sizes that they are made for."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tepo_megatron.core.scores import fused_linear_logprob_and_entropy, logprob_and_entropy
from tests.support.dense_scores import dense_logprob_and_entropy
from tests.support.score_cases import cases, compare, loss

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, torch sees none")]


def _on_gpu(case):
    logits, labels, options, weights = case
    mask = options["mask_T"]
    return logits.cuda(), labels.cuda(), options | {"mask_T": None if mask is None else mask.cuda()}, weights.cuda()


@settings(max_examples=200)
@given(cases(max_width=20_000), st.booleans())
def test_matches_the_dense_oracle(case, inplace):
    """Few rows, so that each comes in several parts, of any width."""
    logits, *rest = _on_gpu(case)
    compare(logits.float(), *rest, inplace=inplace, backend="triton", tolerance=2e-5)


def _large(tokens, width, vocab, dtype):
    """Logits [T, width], labels below ``vocab``, a mask and weights, on the GPU."""
    torch.manual_seed(tokens + width)
    logits = (3 * torch.randn(tokens, width, device="cuda")).to(dtype)
    labels = torch.randint(0, vocab, (tokens,), device="cuda")
    return logits, labels, torch.rand(tokens, device="cuda") < 0.7, torch.randn(2, tokens, device="cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("tokens", "width", "vocab"), [(2500, 16032, 16032), (2500, 32064, 32000), (700, 64128, 50257), (500, 128256, 128256)]
)
def test_shapes_of_real_models(tokens, width, vocab, dtype):
    logits, labels, mask, weights = _large(tokens, width, vocab, dtype)
    options = {"vocab_size": vocab, "mask_T": mask, "temperature": 0.7}
    tolerances = {"tolerance": 2e-5, "gradient_tolerance": max(torch.finfo(dtype).eps, 1e-5)}
    compare(logits, labels, options, weights, inplace=True, backend="triton", **tolerances)


def test_more_than_two_billion_logits():
    if torch.cuda.get_device_properties(0).total_memory < 24 * 2**30:
        pytest.skip("needs 24 GiB of GPU memory")
    logits, labels, _, weights = _large(17_000, 128_256, 128_256, torch.bfloat16)
    last = slice(16_900, None)
    dense = logits[last].double().requires_grad_()
    oracle = dense_logprob_and_entropy(dense, labels[last])
    loss(oracle, weights[:, last]).backward()
    scores = logprob_and_entropy(logits.requires_grad_().view_as(logits), labels, inplace_backward=True, backend="triton")
    torch.testing.assert_close(scores.logprob[last].double(), oracle.logprob, rtol=2e-5, atol=2e-5)
    loss(scores, weights).backward()
    atol = 2**-8 * float(dense.grad.abs().max())
    torch.testing.assert_close(logits.grad[last].double(), dense.grad, rtol=2**-8, atol=atol)


def test_the_same_input_gives_the_same_bits():
    logits, labels, mask, weights = _large(300, 50_304, 50_257, torch.bfloat16)
    seen = []
    for inplace in (False, True):
        leaf = logits.clone().requires_grad_()
        options = {"vocab_size": 50_257, "mask_T": mask, "inplace_backward": inplace, "backend": "triton"}
        scores = logprob_and_entropy(leaf.view_as(leaf), labels, **options)
        loss(scores, weights).backward()
        seen.append((scores.logprob, scores.entropy, leaf.grad))
    assert all(torch.equal(first, second) for first, second in zip(*seen, strict=True))


def test_a_transposed_view():
    logits, labels, _, weights = _large(600, 500, 500, torch.float32)
    leaf, dense = logits.t().requires_grad_(), logits.t().double().requires_grad_()
    labels, weights = labels[:500] % 600, weights[:, :500]
    scores, oracle = logprob_and_entropy(leaf, labels, backend="triton"), dense_logprob_and_entropy(dense, labels)
    own = torch.autograd.grad(loss(scores, weights), leaf)[0]
    expected = torch.autograd.grad(loss(oracle, weights), dense)[0]
    torch.testing.assert_close(scores.entropy.double(), oracle.entropy, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(own.double(), expected, rtol=1e-5, atol=1e-5)


def test_extra_memory_is_below_two_percent():
    logits, labels, mask, weights = _large(8192, 16032, 16032, torch.bfloat16)
    leaf = logits.requires_grad_()
    given = leaf.view_as(leaf)
    for _ in range(2):  # the first call compiles
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        scores = logprob_and_entropy(given, labels, mask_T=mask, inplace_backward=True, backend="triton")
        torch.autograd.grad(loss(scores, weights), given)
        given = leaf.view_as(leaf)
    assert torch.cuda.max_memory_allocated() - before < 0.02 * logits.numel() * logits.element_size()


@pytest.mark.parametrize(("bad", "message"), [(torch.nan, "first at token 9"), (torch.inf, "first at token 9")])
def test_impossible_logits_are_named(bad, message):
    logits, labels, _, _ = _large(20, 16032, 16032, torch.bfloat16)
    logits[9, 12_345] = bad
    with pytest.raises(ValueError, match=message):
        logprob_and_entropy(logits, labels, backend="triton")


def test_fused_with_the_head():
    generator = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(n, 64, generator=generator).cuda().requires_grad_() for n in (500, 5000))
    labels, weights = torch.randint(0, 4990, (500,), generator=generator).cuda(), torch.randn(2, 500, device="cuda")
    scores = fused_linear_logprob_and_entropy(hidden, head, labels, vocab_size=4990, backend="triton")
    dense_hidden, dense_head = hidden.detach().double().requires_grad_(), head.detach().double().requires_grad_()
    oracle = dense_logprob_and_entropy(dense_hidden @ dense_head.t(), labels, vocab_size=4990)
    torch.testing.assert_close(scores.logprob.double(), oracle.logprob, rtol=1e-4, atol=1e-4)
    own = torch.autograd.grad(loss(scores, weights), (hidden, head))
    expected = torch.autograd.grad(loss(oracle, weights), (dense_hidden, dense_head))
    for mine, theirs in zip(own, expected, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-3, atol=1e-4 * float(theirs.abs().max()))
