"""Weights that are rounded again, and the quantiles of what that does to scores."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.core.scores.noise import noise_quantiles, rerounded
from tepo_megatron.core.types import TokenScores
from tests.support.objective_batches import make_batch, masks

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=4), st.sampled_from(DTYPES), st.integers(0, 99))
def test_every_weight_is_a_neighbour_of_itself_and_comes_back(sizes: list[int], dtype: torch.dtype, seed: int) -> None:
    weights = [(10.0 ** torch.randint(-6, 3, (size, 3)) * torch.randn(size, 3)).to(dtype) for size in sizes]
    before = [weight.clone() for weight in weights]
    with contextlib.suppress(KeyError), rerounded(weights, seed):
        for old, new in zip(before, weights, strict=True):
            up, down = (torch.nextafter(old, torch.full_like(old, bound)) for bound in (torch.inf, -torch.inf))
            assert ((new == old) | (new == up) | (new == down)).all()
        raise KeyError  # the bits come back after an error too
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
