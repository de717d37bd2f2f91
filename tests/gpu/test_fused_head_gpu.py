"""The fused head on a GPU: its weight gradient in fp32 ``main_grad``, and the memory that it takes."""

from typing import Any

import pytest
import torch

from tepo_megatron.core.scores import fused_linear, fused_linear_logprob_and_entropy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, torch sees none")]


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
    monkeypatch.setattr(fused_linear, "_CHUNK_BYTES_ACCELERATOR", 256 * 4096 * 2)
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
