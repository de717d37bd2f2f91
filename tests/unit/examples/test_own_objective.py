"""The example with an objective of its own: the commands of its README as they stand; a run on the reference backends."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tepo_megatron.cli.main import app
from tests.support.example_runs import ROOT, SMALL_RUN, greedy_accuracies, tepo
from tests.support.reference_runs import train_on_references

EXAMPLE = ROOT / "examples/own_objective"
COMMANDS = re.findall(r"^\.venv/bin/tepo (.*)$", (EXAMPLE / "README.md").read_text(), re.M)
SMALL = (*SMALL_RUN, "evaluate.problems=4")


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


@pytest.mark.slow
def test_a_run_trains_with_it_and_is_not_resumed_with_another(tmp_path: Path) -> None:
    folder, out = tmp_path / "mine", tmp_path / "out"
    shutil.copytree(EXAMPLE, folder)
    trained = train_on_references(folder / "run.yaml", out, *SMALL, "train.save_every=1")
    assert [row["step"] for row in trained] == [0, 1, 2]
    assert trained[-1]["clip/low"] == trained[-1]["clip/high"] == 0  # a gate clips nothing
    assert f"- {folder}/my_objective.py" in (out / "resolved.yaml").read_text()
    plugin = folder / "my_objective.py"
    plugin.write_text(plugin.read_text().replace("4 / tau_T", "5 / tau_T"))
    with pytest.raises(ValueError, match=r"objective\.plugins' my_objective\.py, by its digest: ") as refused:
        train_on_references(folder / "run.yaml", out, *SMALL, "train.steps=3", "train.resume=true")
    assert "let through what was: train.allow_change=[objective.plugins]" in str(refused.value)
    broken = r"mean_of_means\.py, breaks a rule \(micro-batches\): the loss is \S+ in one piece, \S+ in micro"
    with pytest.raises(ValueError, match=broken):
        train_on_references(folder / "run.yaml", tmp_path / "wrong", *SMALL, f"objective.preset={folder}/mean_of_means.yaml")
    assert not (tmp_path / "wrong").exists()


@pytest.mark.learns
@pytest.mark.timeout(7200)
def test_the_run_learns(tmp_path: Path) -> None:
    tepo("train", str(EXAMPLE / "run.yaml"), f"output={tmp_path}/out", timeout_s=7000)
    greedy = greedy_accuracies(tmp_path / "out")
    assert greedy[-1] > greedy[0] + 0.2
