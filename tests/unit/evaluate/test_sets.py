"""Evaluation sets: each with its own problems, verifier and sampling, its own metrics, and its own turn."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.config import EvaluateConfig, RunConfig
from tepo_megatron.config.load import ConfigError, dump_resolved, load_run
from tepo_megatron.core.problem import Problem
from tepo_megatron.core.rollout import Response, WeightsVersion
from tepo_megatron.tasks.data import addition
from tepo_megatron.tasks.evaluate.evaluation import (
    EvaluationSet,
    SampleGroups,
    SetResult,
    evaluate_all,
    load_sets,
    verifier_pools,
)
from tepo_megatron.tasks.reward.verifier_task import VerifierTask
from tests.unit.evaluate.test_evaluate import TOKENIZER, DirectScorer, response
from tests.unit.test_extending import section

PROBLEMS = addition.heldout_problems()[:4]


def as_set(problems: Sequence[Problem] = PROBLEMS, **changes: Any) -> EvaluationSet:
    scoring = {"verifier": "last_word", "greedy": True, "samples": 0, "ks": (), "notion": "verifier", "correct_at": 1.0}
    sampling = {"temperature": 0.6, "max_new_tokens": 24, "truncation": {}, "show": 9}
    prompts = tuple(tuple(TOKENIZER.prompt_ids(problem.prompt)) for problem in problems)
    values: dict[str, Any] = {**scoring, **sampling, **changes}
    return EvaluationSet(name="sums", problems=tuple(problems), prompts=prompts, left_out=0, **values)


def evaluate_set(of: EvaluationSet, generate: SampleGroups, failing: str = "") -> SetResult:
    result = evaluate_all(
        RunConfig(),
        (),
        [of],
        generate=generate,
        generate_heldout=generate,
        tokenizer=TOKENIZER,
        pools={of.verifier: DirectScorer(failing)},
        seed=len,
    )
    return result.sets[0]


class Answers:
    """Gives the texts of ``samples[problem]``, or greedily those of ``greedy``."""

    def __init__(self, greedy: Sequence[str], samples: Sequence[Sequence[str]]) -> None:
        self.greedy, self.samples = greedy, samples
        self.calls: list[dict[str, Any]] = []

    def __call__(self, prompts: list[tuple[int, ...]], **asked: Any) -> list[list[Response]]:
        self.calls.append(asked)
        groups = [[text] for text in self.greedy] if asked["temperature"] == 0 else self.samples
        return [[response(text) for text in group] for group in groups]


@given(data=st.data(), n=st.integers(1, 5))
def test_figures_are_means_over_the_problems(data: st.DataObject, n: int) -> None:
    """Of answers 1, 2 and none at all, against the right ones: a vote counted by hand."""
    of_one = st.lists(st.sampled_from(["right", "1", "2", ""]), min_size=n, max_size=n)
    drawn = data.draw(st.lists(of_one, min_size=len(PROBLEMS), max_size=len(PROBLEMS)))
    samples = [
        [problem.answer if text == "right" else text for text in group] for problem, group in zip(PROBLEMS, drawn, strict=True)
    ]
    greedy = [group[0] for group in samples]
    k = data.draw(st.integers(1, n))
    generate = Answers(greedy, samples)
    of = as_set(samples=n, ks=(k,) if k == n else (k, n))
    result = evaluate_set(of, generate)
    right = [[text == problem.answer for text in group] for problem, group in zip(PROBLEMS, samples, strict=True)]
    found = {name.removeprefix("eval/sums/"): value for name, value in result.metrics.items()}
    assert found["greedy"] == found["reward_greedy"] == fmean(group[0] for group in right)
    assert found[f"avg@{n}"] == found["reward_sampled"] == pytest.approx(fmean(map(fmean, right)))
    assert found[f"pass@{n}"] == fmean(map(any, right))
    assert found["pass@1" if k == 1 else f"avg@{n}"] == pytest.approx(fmean(map(fmean, right)))
    assert ("maj@1" in found) is False, "a vote of one"
    assert n == 1 or found[f"maj@{n}"] == pytest.approx(fmean(map(vote, samples, PROBLEMS)))
    assert found["response_len"] == pytest.approx(fmean(fmean(len(text) + 1 for text in group) for group in samples))
    assert (found["truncated"], found["failed"]) == (0.0, 0.0)
    assert [(call["n"], call["temperature"]) for call in generate.calls] == [(1, 0.0), (n, 0.6)]
    assert [row["set"] for row in result.samples] == ["sums"] * len(PROBLEMS)


def vote(texts: Sequence[str], problem: Problem) -> float:
    said = [text for text in texts if text]
    most = max((said.count(text) for text in said), default=0)
    winners = {text for text in said if said.count(text) == most}
    return fmean(text == problem.answer for text in winners) if winners else 0.0


def test_samples_are_drawn_from_the_sets_own_distribution() -> None:
    sampling = {"top_p": 0.9, "top_k": 0}
    given = EvaluateConfig.model_validate({"sets": {"a": {"path": "a", "sampling": sampling}}}).sets["a"].sampling
    generate = Answers(["1"] * 4, [["1"]] * 4)
    of = as_set(samples=1, ks=(1,), truncation=given.truncation)
    evaluate_set(of, generate)
    greedy, sampled = generate.calls
    assert "top_p" not in greedy
    assert (sampled["top_p"], sampled["top_k"]) == (0.9, None), "0 is all"
    assert "min_p" not in sampled, "what is not given is the run's"


def test_cut_responses_and_failures_are_counted() -> None:
    def generate(prompts: list[tuple[int, ...]], **_asked: Any) -> list[list[Response]]:
        cut = Response((3, 4), (0.0, 0.0), "length", WeightsVersion(0))
        return [[cut, response("1")] for _ in prompts]

    of = as_set(greedy=False, samples=2, ks=(2,), notion=None)
    result = evaluate_set(of, generate, PROBLEMS[0].id)
    assert (result.metrics["eval/sums/truncated"], result.metrics["eval/sums/failed"]) == (0.5, 2.0)
    assert (result.failures, result.first_failure) == (2, "problem: no")
    assert not any("greedy" in name or "maj" in name for name in result.metrics)
    assert "greedy" not in result.samples[0]
    assert json.loads(json.dumps(result.samples)) == result.samples


def test_every_metric_of_a_set_is_in_the_one_table() -> None:
    of = as_set(samples=2, ks=(1, 2))
    texts = [["1", problem.answer] for problem in PROBLEMS]
    result = evaluate_set(of, Answers(["1"] * 4, texts))
    named = set(re.findall(r"`(eval/[^`]+)`", section("docs/reference/metrics.md", "Every metric")))
    written = {re.sub(r"@\d+", "@k", name).replace("/sums/", "/NAME/") for name in result.metrics}
    assert written == named


# -- in a run


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., RunConfig]:
    """A run with two sets beside its held-out problems: sums, scored by the run's verifier, and words, by another."""
    for name, problems in {"sums": PROBLEMS, "words": PROBLEMS[:2]}.items():
        lines = [json.dumps({"id": each.id, "prompt": each.prompt, "answer": each.answer}) for each in problems]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    sums = {"path": str(tmp_path / "sums.jsonl"), "samples": 2, "sampling": {"temperature": 0.3, "max_new_tokens": 7}}
    words = {"path": str(tmp_path / "words.jsonl"), "verifier": "exact", "every": 3, "greedy": False, "problems": 1}

    def make(**evaluate: Any) -> RunConfig:
        given = {"every": 2, "samples": 1, "problems": 2, "sets": {"sums": sums, "words": words}, **evaluate}
        return RunConfig.model_validate({"train": {"steps": 7}, "evaluate": given})

    return make


def test_what_a_set_does_not_say_is_as_in_the_run(make_config: Callable[..., RunConfig]) -> None:
    sums, words = load_sets(make_config(), TOKENIZER)
    assert (sums.temperature, sums.max_new_tokens, sums.samples, sums.ks, sums.greedy) == (0.3, 7, 2, (2,), True)
    assert (words.temperature, words.max_new_tokens, words.samples, words.ks, words.greedy) == (1.0, 512, 1, (1,), False)
    assert ([each.verifier for each in (sums, words)], len(sums.problems), len(words.problems)) == (
        ["last_word", "exact"],
        4,
        1,
    )
    assert [each.name for each in load_sets(make_config(), TOKENIZER, ["words"])] == ["words"]
    with pytest.raises(ValueError, match=r"there is no set 'other'; evaluate\.sets has sums, words"):
        load_sets(make_config(), TOKENIZER, ["other"])


@pytest.mark.parametrize(
    ("majority", "verifier", "notion"),
    [
        ("auto", "math", "verifier"),
        ("auto", "last_word", "verifier"),
        ("auto", "judge", "text"),
        ("auto", "mine.py:f", "text"),
        ("verifier", "mine.py:f", "verifier"),
        ("text", "math", "text"),
        ("none", "math", None),
        ("auto", "python_tests", None),
        ("auto", "stack_machine", None),
        ("text", "stack_machine", "text"),
    ],
)
def test_how_answers_of_a_set_are_compared(majority: str, verifier: str, notion: str | None, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def f(problem, response):\n    return 1.0\n")
    verifier = str(tmp_path / verifier) if "mine" in verifier else verifier
    words = {"path": "builtin:addition-heldout", "majority": majority, "verifier": verifier}
    config = RunConfig.model_validate({"evaluate": {"sets": {"words": words}}, "reward": {"run_code": True}})
    assert load_sets(config, TOKENIZER)[0].notion == notion


def test_a_file_of_another_digest_is_refused(make_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    path = tmp_path / "sums.jsonl"
    given = {"path": str(path), "sha256": sha256(path.read_bytes()).hexdigest()}
    assert len(load_sets(make_config(sets={"sums": given}), TOKENIZER)[0].problems) == 4
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(ValueError, match=r"evaluate\.sets\.sums\.sha256 = .* it was changed"):
        load_sets(make_config(sets={"sums": given}), TOKENIZER)


def test_each_set_has_its_turn_and_its_verifier(make_config: Callable[..., RunConfig]) -> None:
    config = make_config()
    sets = load_sets(config, TOKENIZER)
    calls: list[dict[str, Any]] = []

    def generate(prompts: list[tuple[int, ...]], **asked: Any) -> list[list[Response]]:
        calls.append(asked)
        by_prompt = dict(zip(sets[0].prompts, sets[0].problems, strict=True))
        return [[response(f"so {by_prompt[prompt].answer}")] * asked["n"] for prompt in prompts]

    seen = {}
    with VerifierTask({"": config.reward}) as task, verifier_pools(config, sets, task) as pools:
        for step in range(8):
            done = evaluate_all(
                config,
                PROBLEMS,
                sets,
                step=step,
                generate=generate,
                generate_heldout=generate,
                tokenizer=TOKENIZER,
                pools=pools,
                seed=lambda purpose: len(purpose),
            )
            seen[step] = done.metrics
            assert config.evaluate.any_due(step, 7) == bool(done.metrics)
    assert {step for step, row in seen.items() if "accuracy/greedy" in row} == {0, 2, 4, 6, 7}
    assert {step for step, row in seen.items() if "eval/sums/greedy" in row} == {0, 2, 4, 6, 7}
    assert {step for step, row in seen.items() if "eval/words/avg@1" in row} == {0, 3, 6, 7}
    assert seen[0]["eval/sums/maj@2"] == 1.0
    assert seen[0]["eval/words/avg@1"] == 0.0, "'so 95' is not exactly '95'"
    assert len({call["seed"] for call in calls}) == 3
    assert done.warnings == []


def test_a_verifier_that_cannot_score_a_set_is_found_at_the_start(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    (tmp_path / "bad.py").write_text("def fails(problem, response):\n    raise RuntimeError('no judge')\n")
    wrong = {"path": str(tmp_path / "sums.jsonl"), "verifier": f"{tmp_path / 'bad.py'}:fails"}
    config = make_config(sets={"sums": wrong})
    cause = r"evaluate\.sets\.sums: .*cannot score the first 4"
    sets = load_sets(config, TOKENIZER)
    with (
        VerifierTask({"": config.reward}) as task,
        pytest.raises(ValueError, match=cause),
        verifier_pools(config, sets, task),
    ):
        pass


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"sets": {"a b": {"path": "x"}}}, "'a b' cannot name a set"),
        ({"sets": {"a": {}}}, "evaluate.sets.a.path: missing"),
        ({"sets": {"a": {"path": "x", "tempreature": 1}}}, "evaluate.sets.a.tempreature: unknown key"),
        ({"sets": {"a": {"path": "x", "sampling": {"temprature": 1}}}}, "did you mean evaluate.sets.a.sampling.temperature"),
        ({"sets": {"a": {"path": "x", "greedy": False, "samples": 0}}}, "leaves nothing to answer"),
        ({"samples": 0, "sets": {"a": {"path": "x", "greedy": False}}}, "leaves nothing to answer"),
        ({"samples": 4, "sets": {"a": {"path": "x", "k": [1, 8]}}}, "evaluate.sets.a.k = 8 cannot be estimated from 4 samples"),
        ({"sets": {"a": {"path": "x", "k": [2, 2]}}}, "k names a number twice"),
    ],
)
def test_what_cannot_be_meant_is_refused(wrong: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps({"evaluate": wrong}))
    with pytest.raises(ConfigError) as caught:
        load_run(path)
    assert said in str(caught.value)


def test_sets_are_enough_to_evaluate_on(tmp_path: Path) -> None:
    given = ["data.train=mine.jsonl", "evaluate.sets.aime.path=aime.jsonl", "evaluate.sets.aime.every=5"]
    config = load_run(None, given)
    assert (config.data.heldout, config.evaluate.every) == (None, 10)
    path = tmp_path / "resolved.yaml"
    path.write_text(dump_resolved(config))
    assert load_run(path) == config
    assert load_run(None, [*given, "train.save_every=5", "train.keep_best.metric=eval/aime/greedy"]).train.keep_best
    for metric, why in {"eval/other/greedy": "is not given", "accuracy/greedy": "data.heldout, which is not given"}.items():
        with pytest.raises(ConfigError, match=why):
            load_run(None, [*given, "train.save_every=5", f"train.keep_best.metric={metric}"])
