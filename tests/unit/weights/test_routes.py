"""Records of routes: what fits a model, and what is said of one that does not."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from tepo_megatron.weights.architecture import Experts
from tests.support.reshard_models import MOE, small_spec

SPEC = small_spec(architecture="MixtralForCausalLM", num_layers=3, experts=MOE["MixtralForCausalLM"])


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
    assert re.search(message, SPEC.routes_fault(routes, 7) or "")


def test_a_record_that_fits_has_no_fault_and_a_dense_model_no_record() -> None:
    assert SPEC.routes_fault(np.full((6, 3, 2), 3, np.uint8), 7) is None
    assert SPEC.routes_fault(np.zeros((0, 3, 2), np.uint8), 1) is None
    fault = replace(SPEC, experts=None).routes_fault(np.zeros((6, 3, 2), np.uint8), 7)
    assert fault == "has a routing record, and MixtralForCausalLM has no experts"


@pytest.mark.parametrize(("count", "dtype", "size"), [(8, np.uint8, 1), (255, np.uint8, 1), (256, np.int16, 2)])
def test_a_byte_tells_255_experts_and_none_apart(count: int, dtype: type, size: int) -> None:
    spec = replace(SPEC, experts=Experts(count, 2, renormalize=True))
    assert spec.routes_dtype == np.dtype(dtype)
    assert spec.route_bytes == 3 * 2 * size
