"""What must not matter: the order of sequences, how they are cut into micro-batches and ranks, padding."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tepo_megatron.config.objective.presets import PRESETS
from tepo_megatron.config.objective.section import ObjectiveConfig
from tepo_megatron.core.objective.checking import RULES
from tepo_megatron.core.objective.compose import build_objective
from tepo_megatron.core.objective.ratio import sequence_sum
from tests.support.objective_batches import make_batch, masks

VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {"preset": name} for name in PRESETS},
    "tepo, covariance mask": {"kl_mask": {"falling": "covariance", "against": "reference"}},
    "tepo, first-order mask": {"kl_mask": {"falling": "first_order"}},
    "entropy, adaptive": {"entropy": {"kind": "adaptive", "coefficient": 0.1, "target": 0.7}, "kl": {"coefficient": 0.04}},
    "icepop, sequence": {"preset": "grpo", "mismatch": {"kind": "mask", "level": "sequence", "low": 0.9, "high": 1.1}},
    "truncated, product ratio": {
        "ratio": {"kind": "sequence", "length_normalized": False},
        "mismatch": {"kind": "truncate", "cap": 1.1},
        "aggregation": {"kind": "constant", "per": "step"},
    },
    "many chosen by covariance": {"preset": "kl_cov", "kl_cov": {"fraction": 0.4, "estimator": "k2"}},
    "gdpo, weighted": {"preset": "gdpo", "advantage": {"weights": [1.0, 3.0]}},
    "whitened over tokens": {"preset": "grpo", "advantage": {"kind": "whitened", "over": "tokens"}},
    "rejection, geometric": {"preset": "dapo", "rejection": {"low": 0.9, "high": 1.05}},
    "rejection, sequence, with weights": {
        "preset": "dapo",
        "rejection": {"level": "sequence", "low": 0.8, "high": 1.2},
        "mismatch": {"kind": "truncate", "level": "geometric", "cap": 1.01},
    },
    "opsm": {"preset": "dapo", "opsm": {"delta": 0.05}},
    "m2po": {"preset": "dapo", "m2po": {"threshold": 0.01}},
    "many drawn": {"preset": "clip_cov", "trust_region": {"fraction": 0.4, "cov_low": 0.0}},
}


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=20)
@given(rows=masks(), seed=st.integers(0, 99), spread=st.sampled_from([1e-4, 0.3, 1.5]))
def test_order_and_cuts_do_not_matter(variant, rows, seed, spread):
    """Nor do ranks and padding; gradients are finite and the same again."""
    objective = build_objective(ObjectiveConfig(**VARIANTS[variant]))
    for check in RULES.values():
        check(objective, make_batch(rows, seed=seed, spread=spread), seed)


@given(seed=st.integers(0, 2**31), sequences=st.integers(1, 20), tokens=st.integers(1, 3000))
def test_the_order_of_adding_does_not_change_a_sequences_sum(seed: int, sequences: int, tokens: int) -> None:
    """A GPU adds by atomics, in any order; the ranks of a tensor-parallel group must agree about what is clipped."""
    generator = torch.Generator().manual_seed(seed)
    values_T, order = torch.randn(tokens, generator=generator) * 0.03, torch.randperm(tokens, generator=generator)
    index_T = torch.randint(0, sequences, (tokens,), generator=generator)
    sums_S = sequence_sum(values_T, index_T, sequences)
    assert sums_S.dtype == torch.float32
    assert torch.equal(sums_S, sequence_sum(values_T[order], index_T[order], sequences))
