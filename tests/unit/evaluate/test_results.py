"""Results on a disk, two of them compared problem by problem, and an evaluation that continues with the responses it has."""

import json
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import Mock

import pytest

from tepo_megatron.core.problem import Problem
from tepo_megatron.core.rollout import Response, WeightsVersion
from tepo_megatron.tasks.data.problems import load_problems
from tepo_megatron.tasks.evaluate.results import compare_results, model_state, read_results, write_results
from tepo_megatron.tasks.evaluate.standalone import StoredResponses
from tests.support.cli import invoke
from tests.support.processes import files_of_at_most
from tests.unit.evaluate.test_evaluate import Answers, as_set, evaluate

PROBLEMS = load_problems("builtin:addition-heldout")[:20]


def write(folder: Path, solved: int, *, problems: list[Problem] = PROBLEMS, temperature: float = 0.6, **served: str) -> None:
    """A model that solves the first ``solved`` problems, in one sample of two and greedily."""
    of = as_set(problems, samples=2, ks=(2,), temperature=temperature)
    right = [problem.answer if number < solved else "no" for number, problem in enumerate(problems)]
    (result,) = evaluate(Answers([[text, text, "no"] for text in right]), [of]).sets
    write_results(folder / "eval" / "results", result, model=folder.name, state="x", seed=0, served=served)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write(tmp_path, 5)
    for folder in (tmp_path, tmp_path / "eval", tmp_path / "eval" / "results"):
        found = read_results(folder)["sums"]
        assert (list(found.problems), found.settings["samples"]) == ([problem.id for problem in PROBLEMS], 2)
        assert fmean(figures["greedy"] for _, figures in found.problems.values()) == 0.25
    summary = json.loads((tmp_path / "eval" / "results" / "sums.json").read_text())
    assert summary["figures"]["avg@2"]["mean"] == 0.125
    assert 0 < summary["figures"]["greedy"]["low"] < 0.25 < summary["figures"]["greedy"]["high"] < 0.6


def test_a_death_while_results_are_written_again_pairs_no_old_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 5)
    monkeypatch.setattr("tepo_megatron.tasks.evaluate.results.interval", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, 6, temperature=1.0)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="has no results of an evaluation"):
        read_results(tmp_path)
    write(tmp_path, 6, temperature=1.0)
    assert read_results(tmp_path)["sums"].settings["temperature"] == 1


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
    write(tmp_path / "a", 4, quantization="none", dtype="float32")
    write(tmp_path / "b", 10, problems=changed, temperature=1.0, quantization="fp8_per_block")  # without dtype, as once
    said = invoke("compare", tmp_path / "a", tmp_path / "b").output
    assert "sums: 15 problems; 5 left out" in said
    assert "temperature differs: 0.6 in A, 1.0 in B" in said
    assert "quantization differs: none in A, fp8_per_block in B" in said
    assert "dtype differs" not in said
    shown = json.loads(invoke("compare", tmp_path / "a", tmp_path / "b", "--json").output)
    assert shown[0]["figures"]["greedy"]["difference"]["mean"] == pytest.approx(6 / 15)


def test_held_out_problems_are_compared_as_a_set(tmp_path: Path) -> None:
    for name, solved in {"a": 4, "b": 10}.items():
        texts = [problem.answer if number < solved else "no" for number, problem in enumerate(PROBLEMS)]
        result = evaluate(Answers([[text, text] for text in texts]), heldout=PROBLEMS, samples=1).heldout
        write_results(tmp_path / name / "eval" / "results", result, model=name, state="x", seed=0, served={})
    (found,) = json.loads(invoke("compare", tmp_path / "a", tmp_path / "b", "--json").output)
    assert (found["name"], found["problems"]) == ("data.heldout", 20)
    assert found["figures"]["avg@1"]["difference"]["mean"] == pytest.approx(0.3)


def test_a_run_is_no_model_and_an_evaluation_may_cut_as_a_trainer_may_not(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("data: {heldout: x.jsonl}\n")
    said = " ".join(invoke("eval", tmp_path / "run.yaml", code=1).output.split())
    assert "run.yaml is a file; tepo eval takes a model's folder" in said
    data = ("data.train=x.jsonl", "data.heldout=x.jsonl")
    refused = invoke("eval", "none", *data, "rollout.sampling.top_p=0.9", "train.keep_best.metric=accuracy/avg@9", code=1)
    assert "the model folder none does not exist" in " ".join(refused.output.split())
    refused = invoke("eval", "none", *data, "rollout.sampling.min_p=0.1", "rollout.server.speculative={}", code=1)
    assert "rollout.sampling.min_p = 0.1, which vLLM refuses with" in " ".join(refused.output.split())


def test_sets_of_several_models_in_one_folder_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a", 4)
    folder = tmp_path / "a" / "eval" / "results"
    for kind in ("json", "jsonl"):
        (folder / f"others.{kind}").write_text((folder / f"sums.{kind}").read_text())
    assert set(read_results(tmp_path / "a")) == {"sums", "others"}
    summary = json.loads((folder / "others.json").read_text())
    summary["settings"]["model"] = "another"
    (folder / "others.json").write_text(json.dumps(summary))
    with pytest.raises(ValueError, match=r"results of several models \(others of another, sums of .*\); evaluate each into"):
        read_results(tmp_path / "a")
    summary["settings"] |= {"model": "a", "model_state": "y"}
    (folder / "others.json").write_text(json.dumps(summary))
    with pytest.raises(ValueError, match=r"the files of a changed between the results in .* \(others, sums\); evaluate all"):
        read_results(tmp_path / "a")
    del summary["settings"]["model_state"]  # of an earlier version
    (folder / "others.json").write_text(json.dumps(summary))
    assert set(read_results(tmp_path / "a")) == {"sums", "others"}


def test_what_cannot_be_compared_is_a_sentence(tmp_path: Path) -> None:
    write(tmp_path / "a", 4)
    write(tmp_path / "b", 4, problems=[Problem("x", "1+1=", "2")])
    for other, said in {"b": "no set with a problem that is in both", "none": "has no results of an evaluation"}.items():
        assert said in " ".join(invoke("compare", tmp_path / "a", tmp_path / other, code=1).output.split())
    path = tmp_path / "a" / "eval" / "results" / "sums.jsonl"
    path.write_text(path.read_text() + "{}\n")
    with pytest.raises(ValueError, match=r"sums\.jsonl:21: not a result"):
        read_results(tmp_path / "a")


PROMPTS: list[tuple[int, ...]] = [(3, number) for number in range(6)]


class Sampler:
    """Draws ids of a prompt's number and the seed, and ends after some prompts as a killed process would."""

    def __init__(self, ends_after: int = 100) -> None:
        self.ends_after = ends_after
        self.asked: list[tuple[int, ...]] = []

    def __call__(self, prompts: list[tuple[int, ...]], **settings: Any) -> list[list[Response]]:
        for index in reversed(range(len(prompts))):  # in no order
            if len(self.asked) == self.ends_after:
                raise KeyboardInterrupt
            self.asked.append(prompts[index])
            number = settings["numbers"][index]
            ids = [(number, settings["seed"], sample) for sample in range(settings["n"])]
            reason: Any = "length" if number == 2 else "stop"
            settings["on_group"](index, [Response(item, (0.0,) * 3, reason, WeightsVersion(0)) for item in ids])
        return []


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"one")
    return folder


def ask(
    path: Path, sampler: Sampler, model: Path, n: int = 2, seed: int = 5, **served: Any
) -> list[list[tuple[list[int], str]]]:
    groups = StoredResponses(path, sampler, model_state(model), served)(
        PROMPTS, n=n, temperature=0.5, max_new_tokens=8, seed=seed
    )
    return [[(item.response_ids.tolist(), item.finish_reason) for item in group] for group in groups]


def test_an_interrupted_evaluation_asks_only_for_the_rest(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = ask(tmp_path / "whole", Sampler(), model)
    assert whole[2][1] == ([2, 5, 1], "length")
    path = tmp_path / "responses.jsonl"
    with pytest.raises(KeyboardInterrupt):
        ask(path, Sampler(ends_after=4), model)
    with path.open("a") as file:
        file.write('{"key": "cut o')  # by the kill
    with files_of_at_most(10):  # a full disk takes nothing of what is there
        StoredResponses(path, Sampler(), model_state(model), {})
    capsys.readouterr()
    for missing in (PROMPTS[:2], []):
        sampler = Sampler()
        assert ask(path, sampler, model) == whole
        assert sorted(sampler.asked) == missing
        assert capsys.readouterr().err == f"{6 - len(missing)} of 6 prompts are taken from {path}\n"


def test_an_interrupted_evaluation_is_not_removed_in_silence(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "responses.jsonl"
    with pytest.raises(KeyboardInterrupt):
        ask(path, Sampler(ends_after=4), model)
    before = path.read_bytes()
    capsys.readouterr()
    anew = StoredResponses(path, Sampler(), model_state(model), {}, resume=False)
    assert f"{path} has answers of an interrupted evaluation (4 prompts)" in capsys.readouterr().err
    assert path.read_bytes() == before, "until the servers have started"
    for seed in (5, 6):  # as greedy and sampled
        anew(PROMPTS, n=2, temperature=0.5, max_new_tokens=8, seed=seed)
    assert len(path.read_bytes().splitlines()) == 2 * len(PROMPTS)
    assert capsys.readouterr().err == ""


def test_other_settings_and_models_are_asked_again(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "responses.jsonl"
    ask(path, Sampler(), model)
    for n, seed, weights in ((1, 5, b"one"), (2, 6, b"one"), (2, 5, b"other")):
        (model / "model.safetensors").write_bytes(weights)
        sampler = Sampler()
        ask(path, sampler, model, n, seed)
        assert len(sampler.asked) == len(PROMPTS)
    for quantization, asked in (("fp8", len(PROMPTS)), ("fp8", 0), (None, len(PROMPTS))):
        sampler = Sampler()
        ask(path, sampler, model, quantization=quantization)
        assert len(sampler.asked) == asked
    path.write_text("{}\n")
    with pytest.raises(ValueError, match=r"responses\.jsonl:1: no responses"):
        ask(path, Sampler(), model)
