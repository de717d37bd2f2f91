"""Results on a disk, and two of them compared problem by problem."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest
from typer.testing import CliRunner

from tepo_megatron.cli.main import app
from tepo_megatron.core.problem import Problem
from tepo_megatron.tasks.data import addition
from tepo_megatron.tasks.evaluate.results import compare_results, read_results, write_results
from tests.unit.evaluate.test_evaluate import Answers, as_set, evaluate

PROBLEMS = addition.heldout_problems()[:20]


def write(folder: Path, solved: int, *, problems: list[Problem] = PROBLEMS, temperature: float = 0.6) -> None:
    """A model that solves the first ``solved`` problems, in one sample of two and greedily."""
    of = as_set(problems, samples=2, ks=(2,), temperature=temperature)
    right = [problem.answer if number < solved else "no" for number, problem in enumerate(problems)]
    (result,) = evaluate(Answers([[text, text, "no"] for text in right]), [of]).sets
    write_results(folder / "eval" / "results", result, model=folder.name, seed=0)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write(tmp_path, 5)
    for folder in (tmp_path, tmp_path / "eval", tmp_path / "eval" / "results"):
        found = read_results(folder)["sums"]
        assert (list(found.problems), found.settings["samples"]) == ([problem.id for problem in PROBLEMS], 2)
        assert fmean(figures["greedy"] for _, figures in found.problems.values()) == 0.25
    summary = json.loads((tmp_path / "eval" / "results" / "sums.json").read_text())
    assert summary["figures"]["avg@2"]["mean"] == 0.125
    assert 0 < summary["figures"]["greedy"]["low"] < 0.25 < summary["figures"]["greedy"]["high"] < 0.6


def test_differences_are_paired(tmp_path: Path) -> None:
    """B solves 10 problems of 20 that A solves 4 of: the difference is narrower than the two are apart."""
    write(tmp_path / "a", 4)
    write(tmp_path / "b", 10)
    (found,) = compare_results(tmp_path / "a", tmp_path / "b")
    greedy = found.figures["greedy"]
    assert (found.problems, found.left_out, dict(found.settings)) == (20, 0, {})
    assert (greedy.first.mean, greedy.second.mean) == (0.2, 0.5)
    assert greedy.difference.mean == pytest.approx(0.3)
    assert greedy.difference.excludes_zero
    assert greedy.second.low < greedy.first.high, "their own intervals overlap"
    same = compare_results(tmp_path / "a", tmp_path / "a")[0].figures["greedy"].difference
    assert (same.low, same.mean, same.high) == (0, 0, 0)


def test_only_the_same_problems_are_compared_and_other_settings_are_said(tmp_path: Path) -> None:
    changed = [*PROBLEMS[:15], Problem(PROBLEMS[15].id, PROBLEMS[15].prompt, "other")]
    write(tmp_path / "a", 4)
    write(tmp_path / "b", 10, problems=changed, temperature=1.0)
    result = CliRunner().invoke(app, ["compare", str(tmp_path / "a"), str(tmp_path / "b")])
    assert result.exit_code == 0, result.output
    assert "sums: 15 problems; 5 left out" in result.output
    assert "temperature differs: 0.6 in A, 1.0 in B" in result.output
    shown = json.loads(CliRunner().invoke(app, ["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]).output)
    assert shown[0]["figures"]["greedy"]["difference"]["mean"] == pytest.approx(6 / 15)


def test_what_cannot_be_compared_is_a_sentence(tmp_path: Path) -> None:
    write(tmp_path / "a", 4)
    write(tmp_path / "b", 4, problems=[Problem("x", "1+1=", "2")])
    for other, said in {"b": "no set with a problem that is in both", "none": "has no results of evaluation sets"}.items():
        result = CliRunner().invoke(app, ["compare", str(tmp_path / "a"), str(tmp_path / other)])
        assert result.exit_code != 0
        assert said in " ".join(result.output.split())
    path = tmp_path / "a" / "eval" / "results" / "sums.jsonl"
    path.write_text(path.read_text() + "{}\n")
    with pytest.raises(ValueError, match=r"sums\.jsonl:21: not a result"):
        read_results(tmp_path / "a")
