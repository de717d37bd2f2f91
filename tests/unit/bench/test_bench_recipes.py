"""The benchmark of training steps, on the CPU: what it measures is what the engine does."""

from __future__ import annotations

import math

import pytest

from tepo_megatron.tools.bench.recipes import SIZES, RecipeSetting
from tepo_megatron.weights.architecture import model_spec
from tepo_megatron.weights.table import tensor_shapes


def setting(**changes: object) -> RecipeSetting:
    values = {"size": "tiny", "steps": 3, "sequences": 8, "length": 20, "dtype": "float32", "micro_batch_tokens": 100}
    return RecipeSetting(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_recipe_repeated_gives_the_same_policy() -> None:
    first, second = setting().run(["none", "none"])
    assert first.drift(second) == 0
    assert first.grad_norms == second.grad_norms
    # small random weights: every token is about as likely as any other
    assert first.logprobs[0] == pytest.approx(-math.log(SIZES["tiny"]["vocab_size"]), abs=0.05)
    assert len(set(first.logprobs)) == 3
    assert all(norm > 0 for norm in first.grad_norms)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": "2b"}, "--size 2b is unknown; known: tiny, 1b, 8b"),
        ({"sequences": 6}, "--sequences 6 must be a multiple of 4"),
    ],
)
def test_bad_input(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        setting(**changes).run(["none"])


@pytest.mark.parametrize(("size", "parameters"), [("1b", 1_235_814_400), ("8b", 8_030_261_248)])
def test_the_models_are_as_large_as_published(size: str, parameters: int) -> None:
    assert sum(math.prod(shape) for shape in tensor_shapes(model_spec(SIZES[size], size)).values()) == parameters
