"""A model that a server cannot split is refused before any server is started, wherever servers are started."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tepo_megatron.cli.main import app
from tepo_megatron.config.load import load_run
from tepo_megatron.run.checks import check_model
from tepo_megatron.tasks.evaluate.standalone import evaluate_model

SAID = "rollout.server.tp = 3 does not fit this model"
RUN = Path(__file__).parents[3] / "examples/tiny/run.yaml"
HEADS = "tp = 3 does not divide the model's 4 attention heads; use a divisor of 4"


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object, **_options: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)


@pytest.mark.parametrize(
    "start",
    [
        lambda output: check_model(load_run(None, ["rollout.server.tp=3"])),
        lambda output: evaluate_model(load_run(None, ["rollout.server.tp=3", f"output={output}"]), "builtin:tiny"),
    ],
    ids=["train", "eval"],
)
def test_an_impossible_tp_is_a_sentence_that_names_the_field(start: Callable[[Path], object], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=SAID) as caught:
        start(tmp_path)
    assert HEADS in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_serve_refuses_it(tmp_path: Path) -> None:
    overrides = ["rollout.server.placement=external", f"rollout.server.registry={tmp_path}/servers", f"output={tmp_path}/out"]
    result = CliRunner().invoke(app, ["serve", str(RUN), "rollout.server.tp=3", *overrides])
    assert result.exit_code == 1
    assert SAID in " ".join(result.output.split())
    assert not list(tmp_path.iterdir())


def test_a_replayed_run_starts_no_server_and_needs_no_split(tmp_path: Path) -> None:
    check_model(load_run(None, ["rollout.server.tp=3", f"rollout.replay={tmp_path}"]))
