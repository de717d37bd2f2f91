"""Every command that prints a table prints it for tools, too; settings alone make a run; shells complete them."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tepo_megatron.cli import main
from tepo_megatron.cli.main import app
from tepo_megatron.config import RunConfig
from tests.support.checkpoints import make_whole

runner = CliRunner()
CLI = Path(main.__file__).parent
TABLES = {"show", "show_table", "_show", "_show_plan", "print"}


def commands() -> dict[str, ast.FunctionDef]:
    """The functions of the command line that print a table, and are commands: they have arguments of Typer."""
    found = {}
    for path in CLI.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and ("Annotated" in ast.unparse(node.args) or node.decorator_list):
                called = {
                    call.func.id for call in ast.walk(node) if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
                }
                if called & TABLES:
                    found[f"{path.stem}:{node.name}"] = node
    return found


def test_every_command_with_a_table_has_json() -> None:
    found = commands()
    assert len(found) > 12
    lacking = [name for name, node in found.items() if "as_json" not in {each.arg for each in node.args.args}]
    assert not lacking


def as_json(*words: str) -> Any:
    done = runner.invoke(app, [*words, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_tables_as_json(tmp_path: Path) -> None:
    make_whole(tmp_path / "checkpoints", 2)
    assert [each["checkpoint"] for each in as_json("checkpoint", "list", str(tmp_path))] == ["step_000002"]
    assert as_json("checkpoint", "verify", str(tmp_path))[0]["found"].startswith("whole")
    objectives = as_json("objective", "list")
    assert objectives["presets"]["grpo"]["objective"]["trust_region"] == {
        **{"kind": "clip", "low": 0.2, "high": 0.2, "scale": "fixed"},
        **dict.fromkeys(("share", "initial", "dual")),
    }
    assert objectives["corrections"]
    (tmp_path / "resolved.yaml").write_text("name: mine\noutput: out\ntrain: {steps: 9}\nevaluate: {samples: 2}\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "accuracy/greedy": 0.5}\n{"step": 1, "reward/mean": 0.25}\n')
    status = as_json("status", str(tmp_path))
    assert (status["name"], status["runs"], status["step"], status["steps"]) == ("mine", False, 1, 9)
    assert status["last_evaluation"] == {"step": 0, "accuracy/greedy": 0.5}


def test_settings_alone_make_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    started: list[list[str]] = []

    def start_ranks(config: RunConfig, words: list[str]) -> tuple[int, str]:
        started.append([*words])
        return 0, ""

    monkeypatch.setattr("tepo_megatron.cli.train.start_ranks", start_ranks)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    settings = ["model.path=models/mine", "data.train=mine.jsonl", "reward.verifier=exact", "evaluate.every=0"]
    assert runner.invoke(app, ["train", *settings]).exit_code == 0
    assert started == [settings]
    shown = runner.invoke(app, ["config", "show", *settings, "--diff"])
    assert "path: models/mine" in shown.stdout
    neither = runner.invoke(app, ["train"])
    assert (neither.exit_code, "neither a run's file nor settings" in neither.stderr) == (1, True)
    (tmp_path / "a=b.yaml").write_text("name: odd\n")
    assert "name: odd" in runner.invoke(app, ["config", "show", "a=b.yaml", "train.steps=3", "--diff"]).stdout


@pytest.mark.parametrize(
    ("words", "completions"),
    [
        ("checkp", {"checkpoint"}),
        ("train run.yaml optimizer.l", {"optimizer.lr="}),
        ("train run.yaml model.dtype=b", {"model.dtype=bfloat16"}),
        ("train run.yaml train.save_e", {"train.save_every="}),
    ],
)
def test_a_shell_completes_settings_and_commands(words: str, completions: set[str]) -> None:
    count = str(len(words.split()))
    environment = {"_TEPO_COMPLETE": "complete_bash", "COMP_WORDS": f"tepo {words}", "COMP_CWORD": count}
    assert set(runner.invoke(app, [], env=environment, prog_name="tepo").stdout.split()) == completions


@pytest.mark.parametrize(
    ("override", "fields"),
    [
        ("learning_rate=1", "optimizer.lr"),
        ("train.lr=1", "optimizer.lr"),
        ("rollout.num_generations=8", "rollout.samples_per_prompt"),
        ("objective.beta=0.1", "objective.kl.coefficient"),
        ("engine.temprature=1", "rollout.sampling.temperature"),
        ("verifyer=exact", "reward.verifier or environment.agent.verifier"),
    ],
)
def test_a_key_of_another_place_or_trainer_finds_its_field(override: str, fields: str) -> None:
    done = runner.invoke(app, ["config", "show", override])
    assert done.exit_code == 1
    assert f"did you mean {fields}?" in done.stderr
