"""Scores on a GPU, against the dense fp64 oracle: Triton's kernels, kept tokens, and the fused head."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tepo_megatron.core.scores import fused_linear, fused_linear_logprob_and_entropy, logprob_and_entropy
from tests.support.dense_scores import (
    DIVERGENCES,
    cases,
    compare,
    compare_fused,
    dense_logprob_and_entropy,
    loss,
    teacher_head,
    teacher_of,
)

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


def _large(tokens, width, dtype, vocab=None):
    """Logits [T, width], labels below ``vocab``, a mask and weights, on the GPU."""
    torch.manual_seed(tokens + width)
    logits = (3 * torch.randn(tokens, width, device="cuda")).to(dtype)
    labels = torch.randint(0, vocab or width, (tokens,), device="cuda")
    return logits, labels, torch.rand(tokens, device="cuda") < 0.7, torch.randn(2, tokens, device="cuda")


def _compare_large(tokens, width, vocab, dtype, divergence=None):
    logits, labels, mask, weights = _large(tokens, width, dtype, vocab)
    teacher = None if divergence is None else teacher_of(logits, labels, divergence)
    options = {"vocab_size": vocab, "mask_T": mask, "temperature": 0.7, "teacher": teacher}
    tolerances = {"tolerance": 2e-5, "gradient_tolerance": max(torch.finfo(dtype).eps, 1e-5)}
    compare(logits, labels, options, weights, inplace=True, backend="triton", **tolerances)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("tokens", "width", "vocab"), [(2500, 16032, 16032), (2500, 32064, 32000), (700, 64128, 50257), (500, 128256, 128256)]
)
def test_shapes_of_real_models(tokens, width, vocab, dtype):
    _compare_large(tokens, width, vocab, dtype)


@pytest.mark.parametrize("divergence", DIVERGENCES, ids=lambda divergence: divergence.kind)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "width", "vocab"), [(700, 32064, 32000), (3, 128256, 128256)])
def test_divergences(tokens, width, vocab, dtype, divergence):
    _compare_large(tokens, width, vocab, dtype, divergence)


def test_more_than_two_billion_logits():
    if torch.cuda.get_device_properties(0).total_memory < 24 * 2**30:
        pytest.skip("needs 24 GiB of GPU memory")
    logits, labels, _, weights = _large(17_000, 128_256, torch.bfloat16)
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
    logits, labels, mask, weights = _large(300, 50_304, torch.bfloat16, 50_257)
    seen = []
    for inplace in (False, True):
        leaf = logits.clone().requires_grad_()
        options = {"vocab_size": 50_257, "mask_T": mask, "inplace_backward": inplace, "backend": "triton"}
        scores = logprob_and_entropy(leaf.view_as(leaf), labels, **options)
        loss(scores, weights).backward()
        seen.append((scores.logprob, scores.entropy, leaf.grad))
    assert all(torch.equal(first, second) for first, second in zip(*seen, strict=True))


def test_a_transposed_view():
    logits, labels, _, weights = _large(600, 500, torch.float32)
    compare(logits.t(), labels[:500] % 600, {}, weights[:, :500], inplace=False, backend="triton", tolerance=2e-5)


def test_extra_memory_is_below_two_percent():
    logits, labels, mask, weights = _large(8192, 16032, torch.bfloat16)
    leaf = logits.requires_grad_()
    given = leaf.view_as(leaf)
    for _ in range(2):  # the first call compiles
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        scores = logprob_and_entropy(given, labels, mask_T=mask, inplace_backward=True, backend="triton")
        torch.autograd.grad(loss(scores, weights), given)
        given = leaf.view_as(leaf)
    assert torch.cuda.max_memory_allocated() - before < 0.02 * logits.numel() * logits.element_size()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_impossible_logits_are_named(bad):
    logits, labels, _, _ = _large(20, 16032, torch.bfloat16)
    logits[9, 12_345] = bad
    with pytest.raises(ValueError, match="first at token 9"):
        logprob_and_entropy(logits, labels, backend="triton")


def test_fused_with_the_head():
    generator = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(n, 64, generator=generator).cuda().requires_grad_() for n in (500, 5000))
    labels, weights = torch.randint(0, 4990, (500,), generator=generator).cuda(), torch.randn(2, 500, device="cuda")
    for divergence in (None, *DIVERGENCES):
        close = {"tolerance": 1e-4, "gradient_tolerances": (1e-3, 1e-3)}
        teacher = None if divergence is None else teacher_head(hidden.detach(), head.detach(), divergence)
        compare_fused(hidden, head, labels, {"vocab_size": 4990}, weights, teacher=teacher, **close)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-8)])
def test_kept_tokens_match_the_dense_oracle(dtype: torch.dtype, rtol: float) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = (3 * torch.randn(64, 500, generator=generator)).to(dtype)
    labels = torch.randint(0, 500, (64,), generator=generator)
    others = (labels[:, None] + 1 + torch.arange(40) * 7) % 500
    kept = torch.where(torch.arange(40) < torch.randint(0, 41, (64, 1), generator=generator), others, -1)
    options = {"temperature": 0.7, "mask_T": (torch.rand(64, generator=generator) < 0.7).cuda(), "kept_TK": kept.cuda()}
    how = {"inplace": True, "backend": "auto", "tolerance": 1e-5, "gradient_tolerance": rtol}
    compare(logits.cuda(), labels.cuda(), options, torch.randn(2, 64, device="cuda"), **how)


def _head(tokens, vocab, hidden):
    """bf16 hidden states and head, labels, and an fp32 main_grad of zeros, as Megatron's DDP gives one."""
    torch.manual_seed(0)
    states = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight: Any = torch.nn.Parameter((torch.randn(vocab, hidden, device="cuda") / hidden**0.5).bfloat16())
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(vocab, hidden, device="cuda"), False
    return states, weight, torch.randint(0, vocab, (tokens,), device="cuda")


def _backward(states, weight, labels):
    scores = fused_linear_logprob_and_entropy(states, weight, labels, gradient_accumulation_fusion=True)
    (scores.logprob.sum() - 0.1 * scores.entropy.sum()).backward()


def test_products_are_summed_in_fp32(monkeypatch):
    """A chunk's product that was rounded to bf16 would err by 2^-9 of itself."""
    monkeypatch.setattr(fused_linear, "_CHUNK_BYTES_ACCELERATOR", 256 * 4096 * 6)
    products, add = [], fused_linear._add_product

    def noted(total, left, right):
        products.append((left.clone(), right.clone()))
        add(total, left, right)

    monkeypatch.setattr(fused_linear, "_add_product", noted)
    states, weight, labels = _head(2048, 4096, 256)
    _backward(states, weight, labels)
    assert len(products) == 8
    exact = sum(left.double() @ right.double() for left, right in products)
    rounded = sum((left @ right).float() for left, right in products)
    error = (weight.main_grad.double() - exact).norm()
    assert error < 0.02 * (rounded.double() - exact).norm()
    assert weight.grad_added_to_main_grad


def test_logits_of_bfloat16_are_not_rounded():
    """Against float64, on the scale of a 70B's logits; rounded logits would err by 0.03."""
    states, weight, labels = _head(300, 16032, 4096)
    weight = (8 * weight.detach()).bfloat16()
    with torch.no_grad():
        scores = fused_linear_logprob_and_entropy(states, weight, labels, entropy_slope=True)
        oracle = dense_logprob_and_entropy(states.double() @ weight.double().t(), labels, entropy_slope=True)
    for name in ("logprob", "entropy", "entropy_slope"):
        torch.testing.assert_close(getattr(scores, name).double(), getattr(oracle, name), rtol=1e-4, atol=1e-4)


def test_it_takes_a_chunk_of_logits_and_not_a_micro_batch_of_them():
    tokens, vocab, hidden = 8192, 128256, 1024
    states, weight, labels = _head(tokens, vocab, hidden)
    logits = 2 * tokens * vocab
    for _ in range(2):  # the first call compiles
        states.grad = weight.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        _backward(states, weight, labels)
        torch.cuda.synchronize()
    # 256 MiB of a chunk, 251 MiB that stand for the weight's gradient in its dtype, 32 MiB of hidden states and their gradient
    assert torch.cuda.max_memory_allocated() - before < 0.3 * logits
