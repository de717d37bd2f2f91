"""A model that a server cannot split is refused before any server is started, wherever servers are started."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tepo_megatron.config.load import load_run
from tepo_megatron.run.checks import check_model
from tepo_megatron.tasks.evaluate.standalone import evaluate_model

RUN = Path(__file__).parents[3] / "examples/tiny/run.yaml"


def test_an_impossible_tp_is_a_sentence_that_names_the_field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object, **_options: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    given = ["rollout.server.tp=3", f"output={tmp_path}/out"]
    config = load_run(None, given)
    said = r"(?s)rollout.server.tp = 3 does not fit this model: .*tp = 3 does not divide the model's 4 attention heads"
    with pytest.raises(ValueError, match=said):
        check_model(config)
    with pytest.raises(ValueError, match=said):
        evaluate_model(config, "builtin:tiny")
    assert not list(tmp_path.iterdir())
    check_model(load_run(None, [*given, f"rollout.replay={tmp_path}"]))  # a replayed run starts no server
