"""The fused head's products: logits in fp32, and a weight gradient that is added to ``main_grad`` in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tepo_megatron.core.scores import fused_linear, fused_linear_logprob_and_entropy
from tepo_megatron.tools.bench.step_rank import peak_bytes
from tests.support.dense_scores import BACKENDS, dense_logprob_and_entropy

FP32_EPSILON = 2.0**-24


@given(
    rows=st.integers(1, 70),
    width=st.integers(1, 9),
    tokens=st.integers(1, 40),
    chunks=st.integers(1, 6),
    seed=st.integers(0, 99),
)
def test_products_of_bfloat16_are_summed_in_fp32(rows: int, width: int, tokens: int, chunks: int, seed: int) -> None:
    """Within what fp32 itself may err by: rounding a chunk's product to bfloat16 errs by up to 32 768 times as much."""
    generator = torch.Generator().manual_seed(seed)
    total = torch.randn(rows, width, generator=generator)
    exact, magnitude = total.double(), total.double().abs()
    for _ in range(chunks):
        left = torch.randn(tokens, rows, generator=generator).bfloat16().t()
        right = torch.randn(tokens, width, generator=generator).bfloat16()
        exact = exact + left.double() @ right.double()
        magnitude = magnitude + left.double().abs() @ right.double().abs()
        fused_linear._add_product(total, left, right)
    assert ((total.double() - exact).abs() <= (tokens + 1) * (chunks + 1) * FP32_EPSILON * magnitude).all()


def gradients(dtype: torch.dtype, *, main_grad: Tensor | None, times: int = 1, **marks: Any) -> torch.nn.Parameter:
    """A head of 300 columns after so many backward passes of 64 tokens, in chunks of 16."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 24, generator=generator).to(dtype)
    weight = torch.nn.Parameter((torch.randn(300, 24, generator=generator) / 5).to(dtype))
    labels = torch.randint(0, 300, (64,), generator=generator)
    if main_grad is not None:
        weight.main_grad = main_grad  # type: ignore[attr-defined] # Megatron's DDP sets both
        weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    for name, value in marks.items():
        setattr(weight, name, value)
    for _ in range(times):
        scores = fused_linear_logprob_and_entropy(hidden, weight, labels, gradient_accumulation_fusion=True, backend="torch")
        (scores.logprob.sum() - 0.3 * scores.entropy.sum()).backward()
    return weight


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_linear, "_CHUNK_BYTES", {"cpu": 1})  # 16 rows, the fewest
    monkeypatch.setattr(fused_linear, "_PART_ROWS", 128)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_added_to_main_grad_of_a_weight_that_has_one(dtype: torch.dtype) -> None:
    before = torch.randn(300, 24)
    weight = gradients(dtype, main_grad=before.clone(), times=3)
    plain = gradients(torch.float32, main_grad=None)
    assert plain.grad is not None
    rounding = 1e-5 if dtype == torch.float32 else 0.02
    added = (weight.main_grad - before) / 3  # type: ignore[attr-defined]
    assert (added - plain.grad).norm() <= rounding * plain.grad.norm()
    assert weight.grad_added_to_main_grad  # type: ignore[attr-defined]
    assert weight.grad is not None, "the hook of an overlapped reduction needs one"
    assert weight.grad.dtype == dtype


def test_autograd_gets_the_gradient_of_a_weight_without_main_grad() -> None:
    weight = gradients(torch.bfloat16, main_grad=None)
    assert weight.grad is not None
    assert weight.grad.dtype == torch.bfloat16
    assert not hasattr(weight, "grad_added_to_main_grad")


def test_a_tied_weight_leaves_autograd_to_the_embedding() -> None:
    """Megatron's hook adds what autograd has to ``main_grad`` too: that must be the embedding's gradient alone."""
    weight = gradients(torch.float32, main_grad=torch.zeros(300, 24), zero_out_wgrad=True)
    assert weight.grad is None
    assert weight.main_grad.abs().sum() > 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 300), st.integers(1, 40)),
    scale=st.sampled_from([1.0, 4.0, 16.0]),
    masked=st.booleans(),
    seed=st.integers(0, 99),
)
def test_scores_of_bfloat16_are_those_of_unrounded_logits(
    backend: Any, shape: tuple[int, int, int], scale: float, masked: bool, seed: int
) -> None:
    """Logits that were rounded to bfloat16 err by 2^-9 of themselves: 0.03 where they are 16."""
    (tokens, vocab, width), generator = shape, torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=generator).bfloat16().requires_grad_()
    head = (scale * torch.randn(vocab, width, generator=generator) / width**0.5).bfloat16().requires_grad_()
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    mask = torch.rand(tokens, generator=generator) < 0.7 if masked else None
    options: dict[str, Any] = {"mask_T": mask, "temperature": 0.8, "entropy_slope": True}
    scores = fused_linear_logprob_and_entropy(hidden, head, labels, backend=backend, **options)
    dense = [leaf.detach().double().requires_grad_() for leaf in (hidden, head)]
    oracle = dense_logprob_and_entropy(dense[0] @ dense[1].t(), labels, **options)
    for name in ("logprob", "entropy", "entropy_slope"):
        ours, theirs = getattr(scores, name).detach(), getattr(oracle, name).detach()
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-5, atol=2e-5)
    gradients = torch.autograd.grad((scores.logprob - 0.3 * scores.entropy).sum(), (hidden, head))
    expected = torch.autograd.grad((oracle.logprob - 0.3 * oracle.entropy).sum(), dense)
    for ours, theirs in zip(gradients, expected, strict=True):
        # the logits' gradient and the result are rounded to bfloat16, and nothing else
        assert float((ours.double() - theirs).norm()) <= 2**-7 * float(theirs.norm()) + 1e-9


def test_a_chunk_of_fp32_logits_and_their_gradient_stays_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = 16 * 2**20
    monkeypatch.setattr(fused_linear, "_CHUNK_BYTES", {"cpu": budget})
    hidden, head = (torch.randn(n, 8).bfloat16().requires_grad_() for n in (2048, 8192))

    def compute() -> None:
        scores = fused_linear_logprob_and_entropy(hidden, head, torch.arange(2048), backend="torch")
        scores.logprob.sum().backward()

    assert budget / 2 < peak_bytes(compute) < 1.2 * budget
