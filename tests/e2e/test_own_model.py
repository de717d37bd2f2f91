"""The example with a model of its own: `tepo init` and a short run on what transformers wrote; and whether it learns."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.support.example_runs import ROOT, SMALL_RUN, script, tepo
from tests.support.kills import rows
from tests.support.processes import assert_none_names

EXAMPLE = ROOT / "examples" / "own_model"
START = "out/own_model_start"
SMALL = (*SMALL_RUN, "evaluate.problems=4", "evaluate.show=4")


def init_as_the_readme_says(folder: Path) -> None:
    """The second command of its README; its file is the one that the example has."""
    command = re.search(r"^\.venv/bin/tepo (init (?:.*\\\n)*.*)$", (EXAMPLE / "README.md").read_text(), re.M)
    assert command is not None
    said = tepo(*shlex.split(command[1].replace("\\\n", " ")), cwd=folder).stdout
    assert "the model reads: ⟦<|user|>⟧Sort " in said
    assert (folder / "own.yaml").read_text() == (EXAMPLE / "run.yaml").read_text()


def test_a_model_of_transformers_with_a_tokenizer_of_its_own_is_trained(tmp_path: Path) -> None:
    """Not one line is written by hand. Trainer and server agree on every token, and what is shown is what the server read."""
    script(EXAMPLE / "make_model.py").make(tmp_path / START, until=0)
    init_as_the_readme_says(tmp_path)
    tepo("train", "own.yaml", *SMALL, cwd=tmp_path)
    out = tmp_path / "out" / "sorter"
    assert_none_names(out)
    assert [row["step"] for row in rows(out)] == [0, 1, 2]
    for row in rows(out)[1:]:
        assert row["canary/rollouts_max_gap"] < 1e-4
        assert row["reward/failed"] == 0
    shown = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert all(row["prompt"].startswith("Sort ") for row in shown)
    assert json.loads((out / "model" / "config.json").read_text())["model_type"] == "qwen2"
    read = {name: (tmp_path / START / "sorter" / name).read_bytes() for name in ("tokenizer.json", "chat_template.jinja")}
    assert {name: (out / "model" / name).read_bytes() for name in read} == read


@pytest.mark.learns
def test_it_learns_what_its_readme_says(tmp_path: Path) -> None:
    script(EXAMPLE / "make_model.py").make(tmp_path / START, until=0.8)
    init_as_the_readme_says(tmp_path)
    tepo("train", "own.yaml", "objective.preset=grpo", "optimizer.lr=1.0e-4", "train.steps=60", cwd=tmp_path)
    averages = [row["accuracy/avg@k"] for row in rows(tmp_path / "out" / "sorter") if row.get("accuracy/avg@k") is not None]
    assert 0.15 < averages[0] < 0.6
    assert averages[-1] > averages[0] + 0.25
