"""What the canary lets pass and what it stops, and how its message names the cause."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.config import RunConfig
from tepo_megatron.run.consistency_checks import Canary, Tolerances, due_prompt

PROMPT = (5, 9, 2, 7)
OURS = [-3.0, -2.5, -8.0]


def moved(by: float, at: int = 1) -> list[float]:
    return [value + by * (place == at) for place, value in enumerate(OURS)]


def sizes(max_positions: int) -> Any:
    """What of a model counts here."""
    return SimpleNamespace(vocab_size=50, max_positions=max_positions)


def test_a_server_that_differs_is_named_with_prompt_position_token_and_both_values() -> None:
    with pytest.raises(RuntimeError) as caught:
        Canary(1e-3).check(4, PROMPT, OURS, {"http://a": OURS, "http://b": moved(0.25), "http://c": moved(-2.0, at=2)})
    text = str(caught.value)
    for part in (
        "weights 4",
        "[5, 9, 2, 7]",
        "http://b gives token 2 at position 2 the log-prob -2.25, the trainer -2.5",
        "http://c gives token 7 at position 3 the log-prob -10, the trainer -8",
        "rollout.canary.tolerance = 0.001",
    ):
        assert part in text
    assert "http://a" not in text


@given(st.floats(0, 10), st.floats(1e-6, 1), st.integers(0, 2), st.sampled_from([-1, 1]))
def test_what_is_beyond_the_tolerance_stops_and_nothing_else_does(gap: float, bound: float, at: int, sign: int) -> None:
    canary, theirs = Canary(bound), {"http://a": moved(sign * gap, at)}
    if abs(theirs["http://a"][at] - OURS[at]) > bound:
        with pytest.raises(RuntimeError, match="log-prob"):
            canary.check(0, PROMPT, OURS, theirs)
    else:
        theirs["http://b"] = OURS
        assert canary.check(0, PROMPT, OURS, theirs) == abs(theirs["http://a"][at] - OURS[at])


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_what_is_no_number_stops(value: float) -> None:
    wrong = [-3.0, value, -8.0]
    for ours, theirs in ((OURS, wrong), (wrong, OURS)):
        with pytest.raises(RuntimeError, match="token 2 at position 2"):
            Canary(1e3).check(0, PROMPT, ours, {"http://a": theirs})
    with pytest.raises(RuntimeError, match="http://a"):
        Canary(1.0).check_cache(0, {"http://a": (wrong, OURS)})


@given(st.floats(5e-4, 0.05))
def test_a_server_that_kept_its_weights_is_known_after_a_few_small_updates(step: float) -> None:
    """A real learning rate moves the log-probs by less than the share of the tolerance that one update would need."""
    canary, frozen = Canary(0.5), moved(0.01)
    answers_until = math.ceil(0.005 / step + 1e-6)
    for count in range(answers_until):
        canary.check(count, PROMPT, moved(count * step), {"http://a": moved(count * step + 0.01), "http://b": frozen})
    count = answers_until + 1
    with pytest.raises(RuntimeError, match="http://b still gives the same log-probs") as caught:
        canary.check(count, PROMPT, moved(count * step), {"http://a": moved(count * step + 0.01), "http://b": frozen})
    assert "http://a" not in str(caught.value)


def test_a_server_that_follows_in_coarse_steps_is_not_stale() -> None:
    """Small updates round to the same weights for a while, then to others; without an update the answers are the same."""
    canary = Canary(0.5)
    for count in range(200):
        for _ in range(2):
            canary.check(count, PROMPT, moved(count * 0.002), {"http://a": moved(count // 2 * 0.004)})


@pytest.mark.parametrize(
    ("run", "due"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6]),
        ({"rollout": {"canary": {"every": 3}}}, [0, 3, 6]),
        ({"rollout": {"canary": {"every": 0}}}, []),
        ({"rollout": {"replay": "a/folder"}}, []),
        # Servers that sample with an adapter cannot score a prompt meanwhile.
        ({"train": {"schedule": "overlap"}, "model": {"lora": {"serve": "adapter"}}, "rollout": {"uncorrected": True}}, [0]),
    ],
)
def test_the_prompt_is_due_as_often_as_wanted_where_servers_are(run: dict[str, Any], due: list[int]) -> None:
    config, spec = RunConfig.model_validate(run), sizes(64)
    prompts = {sync: due_prompt(config, spec, sync=sync) for sync in range(7)}
    assert [sync for sync, prompt in prompts.items() if prompt is not None] == due
    assert {prompt for prompt in prompts.values() if prompt is not None} <= {Canary.prompt(50, 64)}


@given(st.integers(2, 200_000), st.integers(3, 5000))
def test_the_prompts_are_the_same_everywhere_and_within_what_a_model_takes(vocab_size: int, limit: int) -> None:
    for make, length in (
        (Canary.prompt, min(32, limit - 1)),  # and one that the server samples
        (Canary.cached_prompt, max(2, min(257, limit - 17))),  # 16 are drawn and scored, and the server draws one more
    ):
        prompt = make(vocab_size, limit)
        assert prompt == make(vocab_size, limit)
        assert all(0 <= token < vocab_size for token in prompt)
        assert len(prompt) == length
    served = RunConfig.model_validate({"rollout": {"server": {"max_model_len": 10}}})
    for config, count in ((RunConfig(), min(32, limit - 1)), (served, 9)):
        assert len(due_prompt(config, sizes(limit), sync=0) or ()) == count


def test_the_prompt_touches_every_part_of_a_vocabulary_split_over_eight_ranks() -> None:
    for vocab_size in (32_000, 128_256, 151_936):
        assert {token * 8 // vocab_size for token in Canary.prompt(vocab_size, 4096)} == set(range(8))


@pytest.mark.parametrize(
    ("trained", "served", "quantization", "recipe", "expected"),
    [
        ("float32", "auto", "none", "none", (1e-3, 1e-4)),
        ("bfloat16", "auto", "none", "none", (0.5, 0.1)),
        ("float32", "bfloat16", "none", "none", (0.5, 0.1)),
        ("bfloat16", "float32", "none", "none", (0.5, 0.1)),
        ("bfloat16", "auto", "fp8_per_block", "none", (2.0, 1.0)),
        ("bfloat16", "auto", "none", "tensorwise", (2.0, 1.0)),
    ],
)
def test_the_default_tolerances_are_those_of_the_coarser_side(
    trained: str, served: str, quantization: str, recipe: str, expected: tuple[float, float]
) -> None:
    rollout: dict[str, Any] = {"server": {"dtype": served, "quantization": quantization}}
    document = {"model": {"dtype": trained}, "rollout": rollout, "objective": {"mismatch": {"kind": "truncate"}}}
    document["engine"] = {"fp8": {"recipe": recipe}}
    assert Tolerances.of(RunConfig.model_validate(document)) == expected
    rollout["canary"] = {"tolerance": 0.07, "rollouts_tolerance": 0.03}
    assert Tolerances.of(RunConfig.model_validate(document)) == (0.07, 0.03)


@given(st.floats(0, 10), st.floats(1e-6, 1))
def test_a_cache_that_gives_another_score_than_no_cache_stops(gap: float, bound: float) -> None:
    found = {"http://a": ([-1.0, -3.0], [-1.0, -3.0]), "http://b": ([-1.0, -2.0 - gap], [-1.0, -2.0])}
    if abs(found["http://b"][0][1] + 2.0) > 0.02 * bound:
        with pytest.raises(RuntimeError, match=r"weights 3: http://b gives a token .* prefix cache") as caught:
            Canary(bound).check_cache(3, found)
        assert "http://a" not in str(caught.value)
    else:
        assert Canary(bound).check_cache(3, found) <= bound
        assert Canary(bound).check_cache(3, {"http://c": ([], [])}) == 0  # no token in common
