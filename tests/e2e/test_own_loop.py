"""The loop of one's own and the notebook, as they stand; short here, and whole where they are to learn (pytest -m learns)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.example_runs import ROOT, greedy_accuracies, run
from tests.support.kills import rows
from tests.support.processes import assert_none_names
from tests.support.programs import TIMEOUT_S

ENVIRONMENT = {"MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"}
LOOP = "examples/own_loop/loop.py"
NOTEBOOK = "examples/notebook/tiny.ipynb"


def run_notebook(out: Path, timeout_s: float = TIMEOUT_S, **parameters: Any) -> list[dict[str, Any]]:
    """The rows of its run."""
    parameters |= {"output": str(out)}
    run("-m", "tests.support.worlds.notebook", NOTEBOOK, json.dumps(parameters), timeout_s=timeout_s, environment=ENVIRONMENT)
    assert_none_names(out)
    assert (out / "notebook.png").read_bytes().startswith(b"\x89PNG")
    assert yaml.safe_load((out / "resolved.yaml").read_text())["reward"]["verifier"] == "(python):last_word_is_the_sum"
    return rows(out)


def run_loop(out: Path, *overrides: str, timeout_s: float = TIMEOUT_S) -> list[tuple[float, ...]]:
    """The figures of each line that it prints."""
    printed = run(LOOP, f"output={out}", *overrides, timeout_s=timeout_s, environment=ENVIRONMENT).stdout
    assert_none_names(out)
    assert (out / "model" / "model.safetensors").exists()
    return [
        tuple(map(float, re.findall(r"\d\.\d+", line))) for line in printed.splitlines() if "reward" in line or "held" in line
    ]


def test_the_loop_runs_as_it_stands(tmp_path: Path) -> None:
    small = ("rollout.prompts_per_step=4", "rollout.samples_per_prompt=4", "train.minibatches=2", "evaluate.problems=4")
    lines = run_loop(tmp_path / "out", "train.steps=2", "evaluate.every=2", *small)
    assert [len(line) for line in lines] == [1, 1, 2]  # held out; reward; both


@pytest.mark.long
def test_the_notebook_runs_as_it_stands(tmp_path: Path) -> None:
    trained = run_notebook(tmp_path / "out", steps=2, prompts=4, heldout=4)
    assert [row["step"] for row in trained] == [0, 1, 2]
    assert all(0 <= row["reward/mean"] <= 1 for row in trained[1:])


def test_the_notebook_has_no_outputs_and_no_magic() -> None:
    """Outputs are a reader's own; what the tests run is plain Python."""
    cells = [cell for cell in json.loads((ROOT / NOTEBOOK).read_text())["cells"] if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells)
    for cell in cells:
        compile("".join(cell["source"]), NOTEBOOK, "exec")


@pytest.mark.learns
@pytest.mark.timeout(7200)
def test_the_loop_learns(tmp_path: Path) -> None:
    greedy = [line[-1] for line in run_loop(tmp_path / "out", timeout_s=7000) if len(line) == 2]
    print("held out, greedy:", greedy)
    assert max(greedy) >= 0.75


@pytest.mark.learns
@pytest.mark.timeout(7200)
def test_the_notebook_learns(tmp_path: Path) -> None:
    run_notebook(tmp_path / "out", timeout_s=7000)
    assert max(greedy_accuracies(tmp_path / "out")) >= 0.85
