"""``tepo samples``: what was answered, and why it got its reward."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from tepo_megatron.cli.main import app
from tepo_megatron.core.problem import Problem
from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.run.output.token_samples import train_samples

runner = CliRunner()


def response(text: str, reward: float | None, **more: Any) -> dict[str, Any]:
    correct = reward is not None and reward >= 1
    return {"response": text, "reward": reward, "correct": correct, "tokens": 7, "finish_reason": "stop", **more}


def row(step: int, problem: str, greedy: dict[str, Any], *sampled: dict[str, Any]) -> dict[str, Any]:
    return {"step": step, "problem": problem, "prompt": "1+1=", "answer": "2", "greedy": greedy, "sampled": [*sampled]}


ROWS = [
    row(0, "a", response("3", 0.0)),
    row(10, "a", response("so 2", 1.0, components={"right": 1.0, "short": 0.25}), response("so\n2", 1.0)),
    row(10, "b", response("2", 1.0), response("1 1", 0.25, finish_reason="length"), response("x", None, error="it raised: no")),
]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return path


def run(*words: str) -> str:
    done = runner.invoke(app, ["samples", *words])
    assert done.exit_code == 0, done.stderr
    return done.stdout


def test_the_newest_evaluation_says_what_was_answered_and_why(tmp_path: Path) -> None:
    write(tmp_path / "samples.jsonl", ROWS)
    said = run(str(tmp_path))
    assert "step 0" not in said
    for part in (
        "step 10 · problem b · answer 2",
        "    1+1=",
        "greedy: reward 1 · correct · 7 tokens",
        "    so\n    2",
        "greedy: reward 1 (right 1, short 0.25) · correct",
        "sample 1: reward 0.25 · wrong · 7 tokens · cut at rollout.sampling.max_new_tokens",
        "sample 2: no reward · wrong · 7 tokens · failed: it raised: no",
    ):
        assert part in said


def test_rows_are_chosen_by_step_problem_and_verdict(tmp_path: Path) -> None:
    path = write(tmp_path / "eval" / "samples.jsonl", ROWS)

    def problems(*words: str) -> list[tuple[int, str]]:
        return [(each["step"], each["problem"]) for each in json.loads(run(str(tmp_path), "--json", *words))]

    assert problems() == [(10, "a"), (10, "b")]
    assert problems("--step", "0") == [(0, "a")]
    assert problems("--wrong") == [(10, "b")]
    write(tmp_path / "sets" / "samples.jsonl", [*ROWS, {"set": "aime", **row(10, "c", response("2", 1.0))}])
    assert "step 10 · aime · problem c" in run(str(tmp_path / "sets"), "--set", "aime")
    assert "problem a" not in run(str(tmp_path / "sets"), "--set", "aime")
    refused = runner.invoke(app, ["samples", str(tmp_path / "sets"), "--set", "amc"])
    assert "has no set 'amc'; it has aime" in " ".join(refused.stderr.split())
    assert problems("--problem", "a") == [(0, "a"), (10, "a")]
    assert json.loads(run(str(path), "--json")) == ROWS[1:]


def test_training_responses_are_read_too(tmp_path: Path) -> None:
    step = {"step": 3, "problem": "a", "prompt": "1+1=", "answer": "2", "response": "so 3", "reward": 0.0, "tokens": 5}
    write(tmp_path / "train_samples.jsonl", [step])
    assert "response: reward 0 · 5 tokens\n    so 3" in run(str(tmp_path), "--train")


def test_a_training_response_says_which_source_its_problem_is_of(tmp_path: Path) -> None:
    rollout = Rollout("talk:3", 0, [1], [5], [-1], "stop", WeightsVersion(0), "5", 1.0)
    problem = Problem("talk:3", "2+3=", "5", source="talk")
    (named,) = train_samples([rollout], {"talk:3": problem}, 1, str)
    assert named["source"] == "talk"
    write(tmp_path / "train_samples.jsonl", [{"step": 1, **named}, {"step": 1, **named, "problem": "17"}])
    heads = [line for line in run(str(tmp_path), "--train").splitlines() if "step 1" in line]
    assert heads == ["── step 1 · problem talk:3 · answer 5", "── step 1 · talk · problem 17 · answer 5"]


def test_a_response_of_several_turns_says_who_wrote_what(tmp_path: Path) -> None:
    rollout = Rollout("a", 0, [1], [5, 6, 7, 8], [-1, 0, 0, -1], "stop", WeightsVersion(0), "5 6 7 8", 1.0)
    rollout = replace(rollout, loss_mask=np.array([True, False, False, True]))
    rows = train_samples([rollout], {}, 1, lambda ids: " ".join(map(str, ids)))
    write(tmp_path / "train_samples.jsonl", [{"step": 1, **rows[0]}])
    said = run(str(tmp_path), "--train")
    assert "4 tokens, 2 of them the model's\n  model:\n    5\n  environment:\n    6 7\n  model:\n    8" in said


@pytest.mark.parametrize(
    ("left", "words", "message"),
    [
        (None, [], "has no samples.jsonl; a run writes it at its first evaluation"),
        (None, ["--train"], "has no train_samples.jsonl; set log.train_samples"),
        (ROWS, ["--step", "5"], "has no step 5; it has 0, 10"),
        (ROWS, ["--problem", "z"], "has no problem 'z'; it has a, b"),
        ([], [], "has no sample yet"),
    ],
)
def test_what_is_not_there_is_a_sentence(left: Any, words: list[str], message: str, tmp_path: Path) -> None:
    if left is not None:
        write(tmp_path / "samples.jsonl", left)
    done = runner.invoke(app, ["samples", str(tmp_path), *words])
    assert (done.exit_code, message in done.stderr) == (1, True), done.stderr
