"""An evaluation that was ended goes on with what was answered, and comes to the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tepo_megatron.core.rollout import Response, WeightsVersion
from tepo_megatron.tasks.evaluate.standalone import StoredResponses, model_identity

PROMPTS: list[tuple[int, ...]] = [(3, at) for at in range(6)]


class Sampler:
    """Draws ids of a prompt's number and the seed, and ends after some prompts as a killed process would."""

    def __init__(self, ends_after: int = 100) -> None:
        self.ends_after = ends_after
        self.asked: list[tuple[int, ...]] = []

    def __call__(
        self,
        prompts: list[tuple[int, ...]],
        *,
        n: int,
        temperature: float,
        max_new_tokens: int,
        seed: int,
        numbers: Sequence[int] | None = None,
        on_group: Callable[[int, list[Response]], None] | None = None,
    ) -> list[list[Response]]:
        assert numbers is not None
        assert on_group is not None
        for at in reversed(range(len(prompts))):  # in no order
            if len(self.asked) == self.ends_after:
                raise KeyboardInterrupt
            self.asked.append(prompts[at])
            reason = "length" if numbers[at] == 2 else "stop"
            version = WeightsVersion(0)
            on_group(at, [Response((numbers[at], seed, index), (0.0,) * 3, reason, version) for index in range(n)])
        return []


def ids(groups: list[list[Response]]) -> list[list[tuple[list[int], str]]]:
    return [[(each.response_ids.tolist(), each.finish_reason) for each in group] for group in groups]


def ask(path: Path, sampler: Sampler, of: str = "model", n: int = 2, seed: int = 5) -> list[list[Response]]:
    return StoredResponses(path, sampler, of)(PROMPTS, n=n, temperature=0.5, max_new_tokens=8, seed=seed)


def test_what_was_answered_is_not_asked_again(tmp_path: Path) -> None:
    whole = ids(ask(tmp_path / "whole", Sampler()))
    assert whole[2][1] == ([2, 5, 1], "length")
    path = tmp_path / "responses.jsonl"
    with pytest.raises(KeyboardInterrupt):
        ask(path, Sampler(ends_after=4))
    with path.open("a") as file:
        file.write('{"key": "cut o')  # by the kill
    rest = Sampler()
    assert ids(ask(path, rest)) == whole
    assert sorted(rest.asked) == PROMPTS[:2]
    nothing = Sampler()
    assert ids(ask(path, nothing)) == whole
    assert nothing.asked == []


def test_other_settings_and_models_are_asked_anew(tmp_path: Path) -> None:
    path = tmp_path / "responses.jsonl"
    ask(path, Sampler())
    for of, n, seed in (("another", 2, 5), ("model", 1, 5), ("model", 2, 6)):
        sampler = Sampler()
        ask(path, sampler, of, n, seed)
        assert len(sampler.asked) == len(PROMPTS)


def test_a_model_that_was_written_anew_is_another(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"one")
    before = model_identity(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"other")
    assert model_identity(tmp_path) != before


def test_a_damaged_file_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "responses.jsonl"
    path.write_text("{}\n")
    with pytest.raises(ValueError, match=r"responses\.jsonl:1: no responses"):
        ask(path, Sampler())
