"""Records of routes: what fits a model, and what is said of one that does not."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from tepo_megatron.weights.architecture import Experts, ModelSpec, model_spec
from tepo_megatron.weights.routes import routes_dtype, routes_fault

SPEC = model_spec(
    {
        "architectures": ["MixtralForCausalLM"],
        "num_hidden_layers": 3,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 8,
        "vocab_size": 16,
        "num_local_experts": 4,
    },
    "test",
)


def with_experts(count: int, per_token: int) -> ModelSpec:
    return replace(SPEC, experts=Experts(count, per_token, renormalize=True))


def test_a_record_that_fits_has_no_fault() -> None:
    assert routes_fault(np.full((6, 3, 2), 3, np.uint8), SPEC, 7) is None
    assert routes_fault(np.zeros((0, 3, 2), np.uint8), SPEC, 1) is None


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (np.zeros((7, 3, 2), np.uint8), "7 × 3 × 2, and 7 tokens of this model make 6 × 3 × 2 .* another length"),
        (np.zeros((6, 4, 2), np.uint8), "6 × 4 × 2, and 7 tokens of this model make 6 × 3 × 2"),
        (np.zeros((6, 3, 8), np.uint8), "6 × 3 × 8, and 7 tokens"),
        (np.full((6, 3, 2), 4, np.uint8), "with expert 4, and this model has 4: it is of another model"),
        (np.full((6, 3, 2), -1, np.int16), "with expert -1, and this model has 4"),
    ],
)
def test_a_record_of_another_model_or_length_is_one_sentence(routes: np.ndarray, message: str) -> None:
    fault = routes_fault(routes, SPEC, 7)
    assert fault is not None
    assert re.search(message, fault), fault


def test_a_dense_model_has_no_record() -> None:
    fault = routes_fault(np.zeros((6, 3, 2), np.uint8), replace(SPEC, experts=None), 7)
    assert fault == "has a routing record, and MixtralForCausalLM has no experts"


@pytest.mark.parametrize(("count", "dtype", "size"), [(8, np.uint8, 1), (255, np.uint8, 1), (256, np.int16, 2)])
def test_a_byte_tells_255_experts_and_none_apart(count: int, dtype: type, size: int) -> None:
    spec = with_experts(count, 2)
    assert routes_dtype(spec) == dtype
    assert spec.route_bytes == 3 * 2 * size
