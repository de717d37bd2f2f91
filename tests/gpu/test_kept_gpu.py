"""Scores among the tokens that a sampler has kept, on a GPU: against float64 on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tepo_megatron.core.scores import logprob_and_entropy
from tests.support.dense_scores import dense_logprob_and_entropy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, torch sees none")]


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-8)])
def test_matches_the_dense_oracle(dtype: torch.dtype, rtol: float) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = (3 * torch.randn(64, 500, generator=generator)).to(dtype)
    labels = torch.randint(0, 500, (64,), generator=generator)
    others = (labels[:, None] + 1 + torch.arange(40) * 7) % 500
    kept = torch.where(torch.arange(40) < torch.randint(0, 41, (64, 1), generator=generator), others, -1)
    mask = torch.rand(64, generator=generator) < 0.7
    dense = logits.double().requires_grad_()
    options: dict[str, Any] = {"temperature": 0.7, "mask_T": mask, "entropy_slope": True}
    oracle = dense_logprob_and_entropy(dense, labels, kept_TK=kept, **options)
    (oracle.logprob - 0.3 * oracle.entropy).sum().backward()
    leaf = logits.cuda().requires_grad_()
    options["mask_T"] = mask.cuda()
    scores = logprob_and_entropy(
        leaf.view_as(leaf), labels.cuda(), kept_TK=kept.cuda(), inplace_backward=True, backend="auto", **options
    )
    (scores.logprob - 0.3 * scores.entropy).sum().backward()
    for name in ("logprob", "entropy", "entropy_slope"):
        ours, theirs = getattr(scores, name).detach(), getattr(oracle, name).detach()
        torch.testing.assert_close(ours.cpu().double(), theirs, atol=1e-5, rtol=0)
    assert leaf.grad is not None
    assert dense.grad is not None
    torch.testing.assert_close(leaf.grad.cpu().double(), dense.grad, atol=rtol * dense.grad.abs().max().item(), rtol=rtol)
