"""The fused head's weight gradient: added to ``main_grad`` as Megatron's linears add theirs, in fp32, no chunk rounded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tepo_megatron.core.scores import fused_linear, fused_linear_logprob_and_entropy

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


def test_chunks_in_bfloat16_are_nearer_to_the_exact_sum_than_rounded_chunks() -> None:
    """The gradient of the logits is rounded to bfloat16 either way; each chunk's product no more."""
    products: list[tuple[Tensor, Tensor]] = []
    add = fused_linear._add_product

    def noted(total: Tensor, left: Tensor, right: Tensor) -> None:
        products.append((left.clone(), right.clone()))
        add(total, left, right)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_linear, "_add_product", noted)
        weight = gradients(torch.bfloat16, main_grad=torch.zeros(300, 24))
    assert len(products) == 4
    exact = sum((left.double() @ right.double() for left, right in products), torch.zeros(300, 24, dtype=torch.float64))
    rounded = sum((left @ right for left, right in products), torch.zeros(300, 24))
    error = (weight.main_grad.double() - exact).norm()  # type: ignore[attr-defined]
    assert error < 1e-3 * (rounded.double() - exact).norm()
