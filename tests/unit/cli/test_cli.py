"""The command line, as a user meets it: help, configurations, settings, completions, and tables for tools."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tepo_megatron.cli.main import app
from tepo_megatron.config import RunConfig
from tests.support.checkpoints import make_whole

runner = CliRunner()


@pytest.fixture
def run_yaml(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text("name: tiny\nengine: {parallel: {tp: 2}}\n")
    return path


COMMANDS = """
  train, serve, eval, config, config show, config schema, doctor, plot, plan, import, export, objective list, objective show,
  checkpoint, checkpoint list, checkpoint verify, checkpoint prune
"""


def test_help_teaches_without_torch() -> None:
    commands = [command.split() for command in COMMANDS.split(",")]
    probe = (
        "import sys\nfrom typer.testing import CliRunner\nfrom tepo_megatron.cli.main import app\n"
        f"for command in [[], *{commands!r}]:\n"
        "    result = CliRunner().invoke(app, [*command, '--help'])\n"
        "    shown = ' '.join(result.output.split())\n"
        "    assert result.exit_code == 0, command\n"
        "    assert command in ([], ['config'], ['checkpoint']) or shown.count(' '.join(['tepo', *command])) > 1, command\n"
        "    assert not {'torch', 'numpy', 'matplotlib', 'omegaconf'} & set(sys.modules), command"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_show_prints_the_whole_run_or_what_differs(run_yaml: Path) -> None:
    whole = runner.invoke(app, ["config", "show", str(run_yaml), "optimizer.lr=1e-5"])
    assert whole.exit_code == 0
    assert set(yaml.safe_load(whole.stdout)) == set(RunConfig.model_fields)
    differing = runner.invoke(app, ["config", "show", str(run_yaml), "optimizer.lr=1e-5", "--diff"])
    assert yaml.safe_load(differing.stdout) == {
        "name": "tiny",
        "engine": {"parallel": {"tp": 2}},
        "optimizer": {"lr": 1e-5},
    }


def test_schema_is_a_table_of_all_fields_or_of_a_part_or_json() -> None:
    whole, part = runner.invoke(app, ["config", "schema"]).stdout, runner.invoke(app, ["config", "schema", "train"]).stdout
    assert "train.steps" in part
    assert "optimizer.lr" in whole
    assert "optimizer.lr" not in part
    assert "train" in json.loads(runner.invoke(app, ["config", "schema", "--json"]).stdout)["properties"]
    refused = runner.invoke(app, ["config", "schema", "nothing"])
    assert (refused.exit_code, "no field is nothing or below it" in refused.stderr) == (1, True)


@pytest.mark.parametrize("command", [["train"], ["config", "show"], ["eval", "somewhere", "--run"]])
def test_a_wrong_configuration_is_a_sentence_and_exit_code_1(command: list[str], run_yaml: Path) -> None:
    result = runner.invoke(app, [*command, str(run_yaml), "engine.parallel.pt=2"])
    assert result.exit_code == 1
    assert "engine.parallel.pt: unknown key (got 2); did you mean engine.parallel.tp?" in result.stderr
    assert "Traceback" not in result.output


def test_train_starts_the_ranks_that_a_file_or_settings_need(run_yaml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[object, ...]] = []

    def run_ranks(*args: object, status: Path) -> tuple[int, str]:
        started.append((*args, status))
        return 7, "rank 1 failed"

    monkeypatch.setattr("tepo_megatron.run.start.run_ranks", run_ranks)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(run_yaml.parent)
    make_whole(Path("out/run/checkpoints"), 2)
    result = runner.invoke(app, ["train", str(run_yaml), "train.steps=3", "--resume"])
    assert (result.exit_code, result.stderr) == (7, "error: rank 1 failed\n")
    settings = [
        "model.path=builtin:tiny",
        "data.train=mine.jsonl",
        "reward.verifier=exact",
        "evaluate.every=0",
        "output=out/new",
    ]
    assert runner.invoke(app, ["train", *settings, "engine.parallel.dp=3"]).exit_code == 7
    assert started == [
        (["train", str(run_yaml), "train.steps=3", "train.resume=true"], 2, Path("out/run/status")),
        (["train", *settings, "engine.parallel.dp=3"], 3, Path("out/new/status")),
    ]
    shown = runner.invoke(app, ["config", "show", *settings, "--diff"])
    assert "train: mine.jsonl" in shown.stdout
    neither = runner.invoke(app, ["train"])
    assert (neither.exit_code, "neither a run's file nor settings" in neither.stderr) == (1, True)
    Path("a=b.yaml").write_text("name: odd\n")
    assert "name: odd" in runner.invoke(app, ["config", "show", "a=b.yaml", "train.steps=3", "--diff"]).stdout


def test_a_warning_of_the_configuration_is_a_sentence(run_yaml: Path) -> None:
    result = runner.invoke(app, ["config", "show", str(run_yaml), "objective.trust_region.low=0.2"])
    assert result.exit_code == 0
    assert result.stderr.startswith("warning: objective.ratio.kind = 'sequence_token'")
    assert "cli.py" not in result.stderr


def test_plot_draws_one_run_beside_its_metrics_and_several_where_it_is_told(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    assert runner.invoke(app, ["plot", str(tmp_path / "a")]).exit_code == 0
    assert (tmp_path / "a" / "curves.png").is_file()
    both = runner.invoke(app, ["plot", str(tmp_path / "a"), str(tmp_path / "b"), "--png", str(tmp_path / "ab.png")])
    assert both.exit_code == 0
    assert (tmp_path / "ab.png").is_file()
    missing = runner.invoke(app, ["plot", str(tmp_path)])
    assert (missing.exit_code, "has no metrics.jsonl" in missing.stderr) == (1, True)


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
