"""An evaluation that was ended goes on with what was answered, and comes to the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tepo_megatron.core.rollout import Response, WeightsVersion
from tepo_megatron.tasks.evaluate.standalone import StoredResponses

PROMPTS: list[tuple[int, ...]] = [(3, number) for number in range(6)]


class Sampler:
    """Draws ids of a prompt's number and the seed, and ends after some prompts as a killed process would."""

    def __init__(self, ends_after: int = 100) -> None:
        self.ends_after = ends_after
        self.asked: list[tuple[int, ...]] = []

    def __call__(self, prompts: list[tuple[int, ...]], **settings: Any) -> list[list[Response]]:
        for index in reversed(range(len(prompts))):  # in no order
            if len(self.asked) == self.ends_after:
                raise KeyboardInterrupt
            self.asked.append(prompts[index])
            number = settings["numbers"][index]
            ids = [(number, settings["seed"], sample) for sample in range(settings["n"])]
            reason: Any = "length" if number == 2 else "stop"
            settings["on_group"](index, [Response(item, (0.0,) * 3, reason, WeightsVersion(0)) for item in ids])
        return []


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"one")
    return folder


def ask(path: Path, sampler: Sampler, model: Path, n: int = 2, seed: int = 5) -> list[list[tuple[list[int], str]]]:
    groups = StoredResponses(path, sampler, model)(PROMPTS, n=n, temperature=0.5, max_new_tokens=8, seed=seed)
    return [[(item.response_ids.tolist(), item.finish_reason) for item in group] for group in groups]


def test_an_interrupted_evaluation_asks_only_for_the_rest(tmp_path: Path, model: Path) -> None:
    whole = ask(tmp_path / "whole", Sampler(), model)
    assert whole[2][1] == ([2, 5, 1], "length")
    path = tmp_path / "responses.jsonl"
    with pytest.raises(KeyboardInterrupt):
        ask(path, Sampler(ends_after=4), model)
    with path.open("a") as file:
        file.write('{"key": "cut o')  # by the kill
    for missing in (PROMPTS[:2], []):
        sampler = Sampler()
        assert ask(path, sampler, model) == whole
        assert sorted(sampler.asked) == missing


def test_other_settings_and_models_are_asked_again(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "responses.jsonl"
    ask(path, Sampler(), model)
    for n, seed, weights in ((1, 5, b"one"), (2, 6, b"one"), (2, 5, b"other")):
        (model / "model.safetensors").write_bytes(weights)
        sampler = Sampler()
        ask(path, sampler, model, n, seed)
        assert len(sampler.asked) == len(PROMPTS)


def test_a_damaged_file_is_a_sentence(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "responses.jsonl"
    path.write_text("{}\n")
    with pytest.raises(ValueError, match=r"responses\.jsonl:1: no responses"):
        ask(path, Sampler(), model)
