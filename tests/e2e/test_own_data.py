"""The example with data of its own: its README's commands for two small steps; and whether it learns, which takes minutes."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tepo_megatron.config.loading.load import load_run
from tepo_megatron.tasks.data.problems import load_problems
from tests.support.processes import assert_none_names
from tests.support.programs import TIMEOUT_S
from tests.support.small_run import SMALL_RUN

ROOT = Path(__file__).parents[2]
EXAMPLE = "examples/own_data"
SMALL = (*SMALL_RUN, "evaluate.problems=40", "evaluate.show=40", "rollout.record=true")


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"own_data_{name}", ROOT / EXAMPLE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    script("make_model").write(folder)
    return folder


def train(model: Path, out: Path, *settings: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tepo_megatron", "train", f"{EXAMPLE}/run.yaml", f"output={out}", f"model.path={model}"]
    done = subprocess.run([*command, *settings], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    assert_none_names(out)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_its_files_are_those_that_the_script_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script("make_data").write(tmp_path)
    monkeypatch.chdir(ROOT)
    data = load_run(f"{EXAMPLE}/run.yaml").data
    sources = [*data.train_sources, *data.heldout_sources]
    for source in sources:
        again = source.model_copy(update={"path": source.path.replace(EXAMPLE, str(tmp_path))})
        assert load_problems(again) == load_problems(source)
    trained, held = ({each.prompt for source in some for each in load_problems(source)} for some in (sources[:2], sources[2:]))
    assert not {prompt.rstrip("=") for prompt in trained} & {prompt.rstrip("=") for prompt in held}


def test_a_run_trains_on_both_sources(model: Path, tmp_path: Path) -> None:
    rows = train(model, tmp_path / "out", *SMALL)
    for row in rows[1:]:
        assert (row["source/sums/share"], row["source/talk/share"], row["reward/failed"]) == (0.75, 0.25, 0)
        weighed = 0.75 * row["source/sums/reward"] + 0.25 * row["source/talk/reward"]
        assert row["reward/mean"] == pytest.approx(weighed, abs=1e-6)
    recorded = (tmp_path / "out" / "rollouts" / "step_0000000.jsonl").read_text().splitlines()[1:]
    ids = [json.loads(line)["problem_id"] for line in recorded]
    assert [name.split(":")[0] for name in dict.fromkeys(ids)].count("sums") == 3
    shown = [json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()]
    assert {(row["problem"].split(":")[0], row["source"]) for row in shown} == {("sums", "sums")}  # the first 40 held-out
    assert all(row["prompt"].endswith("=") for row in shown)


@pytest.mark.learns
def test_it_learns_both_sources(model: Path, tmp_path: Path) -> None:
    rows = train(model, tmp_path / "out")
    assert rows[-1]["accuracy/greedy"] > rows[0]["accuracy/greedy"] + 0.15
    for name in ("sums", "talk"):
        first, last = (sum(row[f"source/{name}/reward"] for row in some) / 5 for some in (rows[1:6], rows[-5:]))
        assert last > first + 0.15
