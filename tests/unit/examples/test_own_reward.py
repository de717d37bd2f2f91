"""The example with a reward of its own: two small steps on the reference backends, and its verifier by itself."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tepo_megatron.tasks.data.addition import solution
from tepo_megatron.tasks.data.problems import load_problems
from tests.support.example_runs import ROOT, SMALL_RUN, tepo
from tests.support.reference_runs import train_on_references

EXAMPLE = "examples/own_reward"
COMPONENTS = ("correct", "carry", "brief")
SMALL = (
    *SMALL_RUN,
    "evaluate.problems=4",
    "evaluate.samples=2",
    "rollout.record=true",
    "objective.preset=gdpo",
    "objective.advantage.weights=[1.0,0.2,0.1]",
)


@pytest.fixture(scope="module")
def judge() -> Iterator[str]:
    """The judge of the README, on a free port; its base URL."""
    command = [sys.executable, f"{EXAMPLE}/judge_server.py", "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
        process.kill()


def test_its_files_are_those_that_the_script_writes() -> None:
    problems = load_problems(str(ROOT / EXAMPLE / "problems.jsonl"))
    heldout = load_problems(str(ROOT / EXAMPLE / "heldout.jsonl"))
    assert not {problem.id for problem in problems} & {problem.id for problem in heldout}
    for problem in (*problems, *heldout):
        assert f"+{problem.metadata['carry']}=" in solution(problem)
        assert solution(problem).endswith(f" {problem.answer}")


@pytest.mark.slow
def test_its_verifier_by_itself(judge: str, tmp_path: Path) -> None:
    """`tepo reward try`: components, a failure where nobody answers, and a table of them."""
    line = {"prompt": "37+58=", "answer": "95", "carry": 1, "responses": ["7+8=15 3+5+1=9 95", "7+8=15 3+5+0=8 85", "95"]}
    (tmp_path / "mine.jsonl").write_text(json.dumps(line) + "\n")
    arguments = ("reward", "try", str(tmp_path / "mine.jsonl"), "--run", f"{EXAMPLE}/run.yaml")
    done = tepo(*arguments, f"reward.kwargs.base_url={judge}", "--json")
    shown = json.loads(done.stdout)
    assert [row["components"] for row in shown["responses"]] == [
        {"correct": 1.0, "carry": 1.0, "brief": 1.0},
        {"correct": 0.0, "carry": 0.0, "brief": 1.0},
        {"correct": 1.0, "carry": 0.0, "brief": 1.0},
    ]
    assert [row["reward"] for row in shown["responses"]] == pytest.approx([1.3, 0.1, 1.1])
    assert (shown["failed"], shown["mean"]) == (0, pytest.approx(2.5 / 3))
    outage = tepo(*arguments, "reward.kwargs.base_url=http://127.0.0.1:9/v1", "reward.kwargs.retries=0", code=1)
    assert "failed: problem 'mine:1': the verifier raised JudgeError: the judge at http://127.0.0.1:9/v1" in outage.stdout
    assert "3 responses, 3 failed" in outage.stdout


@pytest.mark.slow
def test_a_run_trains_on_its_components(judge: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    monkeypatch.chdir(ROOT)
    trained = train_on_references(f"{EXAMPLE}/run.yaml", out, f"reward.kwargs.base_url={judge}", *SMALL)
    for row in trained[1:]:
        weighed = sum(weight * row[f"reward/{name}"] for name, weight in zip(COMPONENTS, (1.0, 0.2, 0.1), strict=True))
        assert row["reward/mean"] == pytest.approx(weighed, abs=1e-6)
        assert row["reward/failed"] == 0
    sample = json.loads((out / "samples.jsonl").read_text().splitlines()[0])
    assert set(sample["greedy"]["components"]) == set(COMPONENTS)
    assert set(sample["metadata"]) == {"carry"}
    again = tepo("reward", "try", str(out / "samples.jsonl"), "--run", f"{EXAMPLE}/run.yaml", f"reward.kwargs.base_url={judge}")
    assert all(name in again.stdout for name in COMPONENTS)
