"""Weights that are rounded again, and the quantiles of what that does to scores."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.core.scores import logprob_and_entropy
from tepo_megatron.core.scores.noise import noise_quantiles, rerounded
from tepo_megatron.core.types import TokenScores
from tests.support.objective_batches import make_batch, masks

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=4), st.sampled_from(DTYPES), st.integers(0, 99))
def test_every_weight_is_a_neighbour_of_itself_and_comes_back(sizes: list[int], dtype: torch.dtype, seed: int) -> None:
    weights = [(10.0 ** torch.randint(-6, 3, (size, 3)) * torch.randn(size, 3)).to(dtype) for size in sizes]
    before = [weight.clone() for weight in weights]
    with rerounded(weights, seed):
        for old, new in zip(before, weights, strict=True):
            up, down = (torch.nextafter(old, torch.full_like(old, bound)) for bound in (torch.inf, -torch.inf))
            assert ((new == old) | (new == up) | (new == down)).all()
    assert all(torch.equal(old, new) for old, new in zip(before, weights, strict=True))


def test_a_quarter_moves_as_often_up_as_down_and_the_same_on_every_rank() -> None:
    weights = [torch.randn(200, 300).bfloat16(), torch.nn.Parameter(torch.randn(200, 300).bfloat16())]
    before, seen = [weight.detach().clone() for weight in weights], []
    for _ in range(2):
        with rerounded(weights):
            seen.append([weight.detach().clone() for weight in weights])
    assert all(torch.equal(first, second) for first, second in zip(*seen, strict=True))
    moves = [(new.double() - old.double()).sign() for old, new in zip(before, seen[0], strict=True)]
    for move in moves:
        assert float(move.abs().mean()) == pytest.approx(0.25, abs=0.01)
        assert float(move.mean()) == pytest.approx(0, abs=0.01)
    assert not torch.equal(*moves)  # each tensor has a draw of its own


def test_the_bits_come_back_after_an_error() -> None:
    weight = torch.randn(9, 9).bfloat16()
    before = weight.clone()
    inside = []

    def fail() -> None:
        with rerounded([weight]):
            inside.append(weight.clone())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not torch.equal(inside[0], before)
    assert torch.equal(weight, before)


@given(masks(), st.integers(0, 99))
def test_quantiles_are_those_of_the_differences_in_float64(rows: list[list[bool]], seed: int) -> None:
    batch, scores = make_batch(rows, seed=seed)
    logprob, entropy = scores.logprob.detach(), scores.entropy.detach()
    old = batch.old_logprobs_T, batch.old_entropy_T
    noise = noise_quantiles(TokenScores(*old), TokenScores(logprob, entropy), batch)
    mask, owner = batch.loss_mask_T.numpy(), batch.sequence_index_T.numpy()
    delta = (logprob - old[0]).numpy()
    means = [delta[mask & (owner == i)].mean() if (mask & (owner == i)).any() else 0.0 for i in range(batch.num_sequences)]
    expected = {
        "entropy": (entropy - old[1]).abs().numpy()[mask],
        "ratio": np.abs(np.expm1(delta[mask])),
        "sequence_ratio": np.abs(np.expm1(means)),
    }
    for name, values in expected.items():
        for level in (50, 90, 99):
            assert noise[f"{name}/noise/p{level}"] == pytest.approx(np.quantile(values, level / 100), abs=1e-12)


def _bfloat16_scores(hidden: torch.Tensor, weights: list[torch.Tensor], labels: torch.Tensor) -> TokenScores:
    """Residual layers in bfloat16, whose logits are not rounded."""
    *layers, head = weights
    for weight in layers:
        hidden = hidden + torch.tanh(hidden @ weight.t())
    hidden = torch.nn.functional.rms_norm(hidden, hidden.shape[-1:])
    return logprob_and_entropy(hidden.float() @ head.float().t(), labels)


def test_it_is_the_noise_of_an_update_with_a_learning_rate_near_0() -> None:
    """An update of 1e-6 flips a few weights in a thousand; what that does to entropies is within what is measured."""
    generator = torch.Generator().manual_seed(0)
    masters = [torch.randn(64, 64, generator=generator) / 8 for _ in range(24)]
    masters.append(torch.randn(500, 64, generator=generator) / 2)
    hidden = torch.randn(400, 64, generator=generator).bfloat16()
    labels = torch.randint(0, 500, (400,), generator=generator)
    weights = [master.bfloat16() for master in masters]
    first = _bfloat16_scores(hidden, weights, labels)
    moved = [(master + 1e-6 * torch.randn(master.shape, generator=generator).sign()).bfloat16() for master in masters]
    flipped = float(torch.cat([(new != old).flatten() for new, old in zip(moved, weights, strict=True)]).double().mean())
    assert 0 < flipped < 0.01
    updated = _bfloat16_scores(hidden, moved, labels)
    with rerounded(weights):
        second = _bfloat16_scores(hidden, weights, labels)
    change = (updated.entropy - first.entropy).abs()
    measured = (second.entropy - first.entropy).abs()
    assert float(change.quantile(0.99)) < 2 * float(measured.quantile(0.99)) < 20 * float(change.quantile(0.99))
