"""The example with an objective of its own: the commands of its README as they stand; the run for two small steps."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tepo_megatron.cli.main import app
from tests.support.processes import assert_none_names
from tests.support.programs import TIMEOUT_S

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/own_objective"
COMMANDS = re.findall(r"^\.venv/bin/tepo (.*)$", (EXAMPLE / "README.md").read_text(), re.M)
SMALL = (
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "train.minibatches=2",
    "evaluate.problems=4",
    "evaluate.every=2",
)


def train(run: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tepo_megatron", "train", str(run), *SMALL, *overrides]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


@pytest.mark.parametrize("command", [each for each in COMMANDS if not each.startswith("train")])
def test_what_it_shows_and_checks(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    done = CliRunner().invoke(app, command.split())
    assert done.exit_code == int("mean_of_means" in command), done.output
    if "mean_of_means" in command:
        shown = re.search(r"the loss is \S+ in one piece, \S+ in micro-batches", (EXAMPLE / "README.md").read_text())
        assert shown is not None
        assert shown[0] in done.stdout


def test_every_run_of_it_begins_as_the_readme_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    runs = [each.split()[1:] for each in COMMANDS if each.startswith("train")]
    kinds = []
    for words in runs:
        done = CliRunner().invoke(app, ["config", "show", *words])
        assert done.exit_code == 0, done.output
        kinds += re.findall(r"kind: (gate|geometric_mean)", done.stdout)
    assert kinds == ["gate", "gate", "geometric_mean"]


def test_a_run_trains_with_it_and_is_not_resumed_with_another(tmp_path: Path) -> None:
    folder, out = tmp_path / "mine", tmp_path / "out"
    shutil.copytree(EXAMPLE, folder)
    done = train(folder / "run.yaml", f"output={out}", "train.steps=2", "train.save_every=1")
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[-1]["clip/low"] == rows[-1]["clip/high"] == 0  # a gate clips nothing
    assert f"- {folder}/my_objective.py" in (out / "resolved.yaml").read_text()
    plugin = folder / "my_objective.py"
    plugin.write_text(plugin.read_text().replace("4 / tau_T", "5 / tau_T"))
    refused = train(folder / "run.yaml", f"output={out}", "train.steps=3", "--resume")
    assert refused.returncode == 1
    assert "objective.plugins' my_objective.py, by its digest: " in refused.stderr
    assert "let through what was: train.allow_change=[objective.plugins]" in refused.stderr
    wrong = train(folder / "run.yaml", f"output={tmp_path}/wrong", f"objective.preset={folder}/mean_of_means.yaml")
    assert wrong.returncode == 1
    assert re.search(
        r"mean_of_means\.py, breaks a rule \(micro-batches\): the loss is \S+ in one piece, \S+ in micro", wrong.stderr
    )
    assert not (tmp_path / "wrong").exists()
    assert_none_names(out)


@pytest.mark.learns
@pytest.mark.timeout(7200)
def test_the_run_learns(tmp_path: Path) -> None:
    """With the settings of its file."""
    command = [sys.executable, "-m", "tepo_megatron", "train", str(EXAMPLE / "run.yaml"), f"output={tmp_path}/out"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=7000, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    greedy = [row["accuracy/greedy"] for row in rows if row.get("accuracy/greedy") is not None]
    print("held out, greedy:", greedy)
    assert greedy[-1] > greedy[0] + 0.2
