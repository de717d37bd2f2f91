"""Nothing of the demonstration stands beside one's own model and problems."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from tepo_megatron.config import DataConfig, RunConfig
from tepo_megatron.config.load import dump_resolved, load_run


def load(*overrides: str) -> tuple[RunConfig, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = load_run(None, overrides)
    return config, [str(each.message) for each in caught]


def test_the_demonstration_is_examined_in_what_it_is_trained_in() -> None:
    config, said = load()
    assert (config.data.train, config.data.heldout, config.evaluate.every, said) == (
        "builtin:addition",
        "builtin:addition-heldout",
        10,
        [],
    )


@pytest.mark.parametrize("given", [(), ("data.heldout=null",)])
def test_without_held_out_problems_nothing_is_evaluated_and_that_is_said(given: tuple[str, ...], tmp_path: Path) -> None:
    config, said = load("data.train=mine.jsonl", *given)
    assert (config.data.heldout, config.evaluate.every) == (None, 0)
    assert len(said) == 1
    assert said[0].startswith("no held-out problems (data.heldout): nothing is evaluated.")
    silent, nothing = load("data.train=mine.jsonl", "evaluate.every=0", *given)
    assert (silent.evaluate.every, nothing) == (0, [])
    path = tmp_path / "resolved.yaml"
    path.write_text(dump_resolved(config))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_run(path) == config


def test_a_section_that_was_built_in_a_program_counts_as_given() -> None:
    with pytest.warns(UserWarning, match="nothing is evaluated"):
        config = RunConfig(data=DataConfig(train="mine.jsonl"))
    assert (config.data.heldout, config.evaluate.every) == (None, 0)


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({"model": {"path": "models/mine"}}, True),
        ({"model": {"path": "models/mine"}, "data": {"max_prompt_tokens": 9}}, True),
        ({"model": {"path": "models/mine"}, "data": {"train": "builtin:addition"}}, False),
        ({"model": {"path": "models/mine"}, "rollout": {"replay": "recorded"}}, False),
        ({"model": {"path": "builtin:tiny"}}, False),
        ({}, False),
    ],
)
def test_ones_own_model_is_not_trained_on_sums_by_an_oversight(given: dict[str, Any], refused: bool) -> None:
    config = RunConfig.model_validate(given)
    if refused:
        with pytest.raises(ValueError, match=r"data.train is not given, and model.path = models/mine is a model of your own"):
            config.require_data()
    else:
        config.require_data()
