"""What a program gives to ``tepo_megatron.train``: settings as values, functions by their names where they have one."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import tepo_megatron
from tepo_megatron.config import ObjectiveConfig, RunConfig
from tepo_megatron.config.load import load_run
from tepo_megatron.errors import is_ours
from tepo_megatron.run import api, training
from tepo_megatron.run.api import TrainResult
from tepo_megatron.run.callbacks import NO_EXTENSIONS, EarlyStopping, Extensions
from tepo_megatron.tasks.reward.verifiers import last_word, load_verifier, resolve_verifier


def started(config: Any = None, **arguments: Any) -> tuple[RunConfig, Extensions]:
    """The configuration and the objects of the run that such a call would start."""
    runs: list[tuple[RunConfig, Extensions]] = []

    def note(config: RunConfig, extensions: Extensions = NO_EXTENSIONS) -> None:
        runs.append((config, extensions))

    def start_ranks(config: RunConfig, files: list[str]) -> tuple[int, str]:
        note(load_run(files[0]))
        return 0, ""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "prepare_run", lambda config, overwrite: None)
        patch.setattr(training, "train_model", note)
        patch.setattr(api, "start_ranks", start_ranks)
        patch.setattr(api, "read_metrics", lambda path: [])
        tepo_megatron.train(config, **arguments)
    return runs[0]


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0$"), max_size=20)
VALUE = st.one_of(TEXT, st.integers(-9, 9), st.floats(-1e9, 1e9), st.booleans(), st.none())


@settings(deadline=None, max_examples=10)
@example(kwargs={"text": ["\x85", "\u2028", "🙂", "1e5", "no", "null", "a: b", "\\n", '"', "~"]}, lr=1e-6)
@given(kwargs=st.dictionaries(TEXT, VALUE, max_size=3), lr=st.floats(1e-9, 1e-2))
def test_settings_are_taken_as_the_values_that_they_are(kwargs: dict[str, Any], lr: float) -> None:
    """No text becomes a number, no number a text, whatever YAML makes of such words."""
    config = started({"reward": {"verifier": "exact", "kwargs": kwargs}, "optimizer.lr": lr})[0]
    assert config.reward.kwargs == kwargs
    assert config.optimizer.lr == lr


def test_a_configuration_is_changed_and_keeps_what_its_preset_does_not_say() -> None:
    base = load_run(None, ["objective.preset=grpo", "train.steps=7", "output=out/base"])
    changed = started(base, train={"minibatches": 2}, output=Path("out/other"), objective="tepo")[0]
    assert changed.objective == RunConfig().objective
    assert (changed.train.steps, changed.train.minibatches, changed.output) == (7, 2, Path("out/other"))
    assert started(base)[0] is base
    assert started({"train.steps": 3}, objective=ObjectiveConfig(preset="grpo"))[0].objective == base.objective


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"train": {"stepz": 3}}, "train.stepz: unknown key (got 3); did you mean train.steps?"),
        ({"trian": {"steps": 3}}, "trian: unknown key"),
        ({"train.steps": "many"}, 'train.steps: got "many"; allowed: an integer > 0'),
        ({"reward": {"verifier": last_word}}, "a setting cannot be function"),
        ({"not a name": 1}, "write path=value"),
    ],
)
@pytest.mark.parametrize("base", [None, RunConfig()])
def test_what_is_wrong_with_settings_is_said_as_of_overrides(base: Any, wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        started(base, **wrong)
    assert says in str(caught.value)
    assert is_ours(caught.value)


def test_a_function_goes_by_a_name_under_which_another_process_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert started(reward=last_word)[0].reward.verifier == "tepo_megatron.tasks.reward.verifiers:last_word"
    (tmp_path / "own_rewards.py").write_text("def near(problem, response):\n    return 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import own_rewards  # type: ignore[import-not-found]

    config, extensions = started(reward=own_rewards.near)
    assert (config.reward.verifier, extensions.reward) == (f"{tmp_path / 'own_rewards.py'}:near", None)
    assert load_verifier(config.reward.verifier)(None, "") == 1.0
    del sys.modules["own_rewards"]


def test_what_has_no_such_name_is_given_as_it_is() -> None:
    def inner(problem: Any, response: str) -> float:
        return 1.0

    cell = ModuleType("__main__")  # as a notebook's
    exec("def near(problem, response):\n    return 1.0", cell.__dict__)
    for function, name in ((inner, "inner"), (lambda problem, response: 1.0, "lambda"), (cell.near, "near")):
        config, extensions = started(reward=function)
        assert extensions.reward is function
        assert config.reward.verifier == f"(python):{name}"
        with pytest.raises(ValueError, match=rf"give it again, tepo_megatron.train\(…, reward={name}\)"):
            resolve_verifier(config.reward.verifier)


def test_ranks_of_their_own_get_names_alone() -> None:
    two: dict[str, Any] = {"engine.parallel.tp": 2}
    named = started(two, reward=last_word, callbacks=["early_stopping", EarlyStopping])[0]
    assert named.reward.verifier.endswith(":last_word")
    assert named.train.callbacks == ("early_stopping", "tepo_megatron.run.callbacks:EarlyStopping")
    assert load_run(None, ["engine.parallel.tp=2"]).train.callbacks == ()
    for wrong, says in (
        ({"reward": lambda problem, response: 1.0}, r"reward=lambda is in this process alone, and the 2 ranks"),
        ({"callbacks": [EarlyStopping(patience=2)]}, r"callbacks=\[EarlyStopping\] is in this process alone"),
    ):
        with pytest.raises(ValueError, match=says):
            started(two, **wrong)


def test_names_of_callbacks_join_those_of_the_configuration() -> None:
    base = load_run(None, ['train.callbacks=["early_stopping"]'])
    stopping = EarlyStopping()
    config, extensions = started(base, callbacks=[stopping, {"callback": "early_stopping", "kwargs": {"patience": 2}}])
    assert [getattr(each, "callback", each) for each in config.train.callbacks] == ["early_stopping"] * 2
    assert extensions.callbacks == (stopping,)


@pytest.mark.parametrize(
    ("resume", "expected"), [(True, (True, None)), ("auto", ("auto", None)), ("step_000004", (True, "step_000004"))]
)
def test_resume_is_what_the_command_takes(resume: Any, expected: tuple[Any, Any]) -> None:
    train = started(resume=resume)[0].train
    assert (train.resume, train.resume_from) == expected


def test_a_result_gives_columns_and_the_best_row() -> None:
    rows = [
        {"step": 0, "a": 0.5},
        {"step": 1, "a": None, "loss": 2.0},
        {"step": 2, "a": 0.7, "loss": 1.0},
        {"step": 3, "a": 0.7},
    ]
    result = TrainResult(Path(), Path(), RunConfig(), rows)
    assert result.step == 3
    assert result.column("a") == ([0, 2, 3], [0.5, 0.7, 0.7])
    assert result.best("a")["step"] == 2
    assert result.best("loss", min)["step"] == 2
    with pytest.raises(KeyError, match="no row has 'b'; there are a, loss, step"):
        result.column("b")
