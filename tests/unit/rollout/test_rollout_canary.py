"""What the canary lets pass and what it stops, and how its message names the cause."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.config import RunConfig
from tepo_megatron.rollout.canary import Canary, canary_prompt, tolerance

PROMPT = (5, 9, 2, 7)
OURS = [-3.0, -2.5, -8.0]


def moved(by: float, at: int = 1) -> list[float]:
    return [value + by * (place == at) for place, value in enumerate(OURS)]


def test_the_largest_difference_over_all_servers_is_reported() -> None:
    theirs = {"http://a": moved(1e-4), "http://b": moved(-3e-4, at=2)}
    assert Canary(1e-3).check(4, PROMPT, OURS, theirs) == pytest.approx(3e-4)


def test_a_server_that_differs_is_named_with_prompt_position_token_and_both_values() -> None:
    with pytest.raises(RuntimeError) as caught:
        Canary(1e-3).check(4, PROMPT, OURS, {"http://a": OURS, "http://b": moved(0.25), "http://c": moved(-2.0, at=2)})
    text = str(caught.value)
    assert "weights 4" in text
    assert "[5, 9, 2, 7]" in text
    assert "http://a" not in text
    assert "http://b gives token 2 at position 2 the log-prob -2.25, the trainer -2.5" in text
    assert "http://c gives token 7 at position 3 the log-prob -10, the trainer -8" in text
    assert "rollout.canary.tolerance = 0.001" in text


@given(st.floats(0, 10), st.floats(1e-6, 1), st.integers(0, 2), st.sampled_from([-1, 1]))
def test_what_is_beyond_the_tolerance_stops_and_nothing_else_does(gap: float, bound: float, at: int, sign: int) -> None:
    canary, theirs = Canary(bound), {"http://a": moved(sign * gap, at)}
    if abs(theirs["http://a"][at] - OURS[at]) > bound:
        with pytest.raises(RuntimeError, match="log-prob"):
            canary.check(0, PROMPT, OURS, theirs)
    else:
        assert canary.check(0, PROMPT, OURS, theirs) <= bound


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_what_is_no_number_stops(value: float) -> None:
    for ours, theirs in ((OURS, [-3.0, value, -8.0]), ([-3.0, value, -8.0], OURS)):
        with pytest.raises(RuntimeError, match="token 2 at position 2"):
            Canary(1e3).check(0, PROMPT, ours, {"http://a": theirs})


def test_a_server_that_kept_its_weights_is_known_even_within_the_tolerance() -> None:
    canary = Canary(0.5)
    canary.check(1, PROMPT, OURS, {"http://a": moved(0.01), "http://b": moved(0.02)})
    with pytest.raises(RuntimeError, match="http://b gives the same log-probs as with the weights before") as caught:
        canary.check(2, PROMPT, moved(0.1), {"http://a": moved(0.11), "http://b": moved(0.02)})
    assert "http://a" not in str(caught.value)


def test_weights_that_did_not_change_may_have_the_same_answer() -> None:
    canary, theirs = Canary(0.5), {"http://a": moved(0.01)}
    canary.check(1, PROMPT, OURS, theirs)
    canary.check(1, PROMPT, OURS, theirs)
    canary.check(2, PROMPT, moved(1e-4), theirs)  # by less than the servers' dtype shows


@given(st.integers(2, 200_000), st.integers(3, 5000))
def test_the_prompt_is_the_same_everywhere_and_within_what_a_model_takes(vocab_size: int, limit: int) -> None:
    prompt = canary_prompt(vocab_size, limit)
    assert prompt == canary_prompt(vocab_size, limit)
    assert all(0 <= token < vocab_size for token in prompt)
    assert len(prompt) == min(32, limit - 1)  # and one that the server samples


def test_the_prompt_touches_every_part_of_a_vocabulary_split_over_eight_ranks() -> None:
    for vocab_size in (32_000, 128_256, 151_936):
        assert {token * 8 // vocab_size for token in canary_prompt(vocab_size, 4096)} == set(range(8))


def test_a_trainer_in_fp8_has_the_tolerance_of_fp8() -> None:
    document = {"model": {"dtype": "bfloat16"}, "engine": {"fp8": {"recipe": "tensorwise"}}}
    assert tolerance(RunConfig.model_validate(document)) == 2.0


@pytest.mark.parametrize(
    ("trained", "served", "quantization", "expected"),
    [
        ("float32", "auto", "none", 1e-3),
        ("bfloat16", "auto", "none", 0.5),
        ("float32", "bfloat16", "none", 0.5),
        ("bfloat16", "float32", "none", 0.5),
        ("bfloat16", "auto", "fp8_per_block", 2.0),
    ],
)
def test_the_default_tolerance_is_that_of_the_coarser_side(
    trained: str, served: str, quantization: str, expected: float
) -> None:
    server = {"dtype": served, "quantization": quantization}
    document = {"model": {"dtype": trained}, "rollout": {"server": server}, "objective": {"mismatch": {}}}
    assert tolerance(RunConfig.model_validate(document)) == expected
    document["rollout"]["canary"] = {"tolerance": 0.07}  # type: ignore[assignment]
    assert tolerance(RunConfig.model_validate(document)) == 0.07
