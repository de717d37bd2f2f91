"""The command line, as a user meets it."""

import json
import subprocess
import sys
from pathlib import Path

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


def test_train_starts_the_ranks_that_the_run_needs(run_yaml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert started == [(["train", str(run_yaml), "train.steps=3", "train.resume=true"], 2, Path("out/run/status"))]


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
