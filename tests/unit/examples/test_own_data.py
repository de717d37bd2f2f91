"""The example with data of its own: two small steps on the reference backends; and whether it learns, which takes minutes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tepo_megatron.config.load import load_run
from tepo_megatron.tasks.data.problems import load_problems
from tests.support.example_runs import ROOT, SMALL_RUN, script, tepo
from tests.support.kills import rows
from tests.support.processes import assert_none_names
from tests.support.reference_runs import train_on_references

EXAMPLE = "examples/own_data"
SMALL = (*SMALL_RUN, "evaluate.problems=10", "evaluate.show=10", "rollout.record=true")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    script(ROOT / EXAMPLE / "make_model.py").write(folder)
    return folder


def test_its_files_are_those_that_the_script_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(ROOT / EXAMPLE / "make_data.py").write(tmp_path)
    monkeypatch.chdir(ROOT)
    data = load_run(f"{EXAMPLE}/run.yaml").data
    sources = [*data.train_sources, *data.heldout_sources]
    for source in sources:
        again = source.model_copy(update={"path": source.path.replace(EXAMPLE, str(tmp_path))})
        assert load_problems(again) == load_problems(source)
    training, held = ({each.prompt for source in some for each in load_problems(source)} for some in (sources[:2], sources[2:]))
    assert not {prompt.rstrip("=") for prompt in training} & {prompt.rstrip("=") for prompt in held}


@pytest.mark.slow
def test_a_run_trains_on_both_sources(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    trained = train_on_references(f"{EXAMPLE}/run.yaml", tmp_path / "out", f"model.path={model}", *SMALL)
    for row in trained[1:]:
        assert (row["source/sums/share"], row["source/talk/share"], row["reward/failed"]) == (0.75, 0.25, 0)
        weighed = 0.75 * row["source/sums/reward"] + 0.25 * row["source/talk/reward"]
        assert row["reward/mean"] == pytest.approx(weighed, abs=1e-6)
    recorded = (tmp_path / "out" / "rollouts" / "step_0000000.jsonl").read_text().splitlines()[1:]
    ids = [json.loads(line)["problem_id"] for line in recorded]
    assert [name.split(":")[0] for name in dict.fromkeys(ids)].count("sums") == 3
    shown = [json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()]
    assert {(row["problem"].split(":")[0], row["source"]) for row in shown} == {("sums", "sums")}  # the first 10 held-out
    assert all(row["prompt"].endswith("=") for row in shown)


@pytest.mark.learns
def test_it_learns_both_sources(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    tepo("train", f"{EXAMPLE}/run.yaml", f"output={out}", f"model.path={model}")
    assert_none_names(out)
    trained = rows(out)
    assert trained[-1]["accuracy/greedy"] > trained[0]["accuracy/greedy"] + 0.15
    for name in ("sums", "talk"):
        first, last = (sum(row[f"source/{name}/reward"] for row in some) / 5 for some in (trained[1:6], trained[-5:]))
        assert last > first + 0.15
