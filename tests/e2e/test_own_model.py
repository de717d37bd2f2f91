"""The example with a model of its own: `tepo init` and a short run on what transformers wrote; and whether it learns."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.processes import assert_none_names
from tests.support.programs import TIMEOUT_S
from tests.support.small_run import SMALL_RUN

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "own_model"
START = "out/own_model_start"
SMALL = (*SMALL_RUN, "evaluate.problems=4", "evaluate.show=4")


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("own_model_make_model", EXAMPLE / "make_model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tepo(folder: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tepo_megatron", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def init_as_the_readme_says(folder: Path) -> None:
    """The second command of its README; its file is the one that the example has."""
    command = re.search(r"^\.venv/bin/tepo (init (?:.*\\\n)*.*)$", (EXAMPLE / "README.md").read_text(), re.M)
    assert command is not None
    said = tepo(folder, *shlex.split(command[1].replace("\\\n", " ")))
    assert "the model reads: ⟦<|user|>⟧Sort " in said
    assert (folder / "own.yaml").read_text() == (EXAMPLE / "run.yaml").read_text()


def rows(out: Path) -> list[dict[str, Any]]:
    assert_none_names(out)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_a_model_of_transformers_with_a_tokenizer_of_its_own_is_trained(tmp_path: Path) -> None:
    """Not one line is written by hand. Trainer and server agree on every token, and what is shown is what the server read."""
    script().make(tmp_path / START, until=0)
    init_as_the_readme_says(tmp_path)
    tepo(tmp_path, "train", "own.yaml", *SMALL)
    out = tmp_path / "out" / "sorter"
    found = rows(out)
    assert [row["step"] for row in found] == [0, 1, 2]
    for row in found[1:]:
        assert row["canary/rollouts_max_gap"] < 1e-4
        assert row["reward/failed"] == 0
    shown = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert all(row["prompt"].startswith("Sort ") for row in shown)
    assert json.loads((out / "model" / "config.json").read_text())["model_type"] == "qwen2"
    read = {name: (tmp_path / START / "sorter" / name).read_bytes() for name in ("tokenizer.json", "chat_template.jinja")}
    assert {name: (out / "model" / name).read_bytes() for name in read} == read


@pytest.mark.learns
def test_it_learns_what_its_readme_says(tmp_path: Path) -> None:
    script().make(tmp_path / START, until=0.8)
    init_as_the_readme_says(tmp_path)
    tepo(tmp_path, "train", "own.yaml", "objective.preset=grpo", "optimizer.lr=1.0e-4", "train.steps=60")
    found = [row["accuracy/avg@k"] for row in rows(tmp_path / "out" / "sorter") if row.get("accuracy/avg@k") is not None]
    assert 0.15 < found[0] < 0.6
    assert found[-1] > found[0] + 0.25
