"""Held-out problems and evaluation sets: figures against verdicts that are drawn, settings, turns, and refusals."""

import json
import math
import re
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from hashlib import sha256
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.config import RunConfig
from tepo_megatron.config.data import EvaluationSetConfig
from tepo_megatron.config.load import ConfigError, dump_resolved, load_run
from tepo_megatron.config.paths import absolute
from tepo_megatron.core.problem import Problem
from tepo_megatron.core.rollout import Response, WeightsVersion
from tepo_megatron.runtime.run_lock import RunLock
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.tasks.data.problems import load_problems
from tepo_megatron.tasks.data.tokenizer import load_tokenizer
from tepo_megatron.tasks.evaluate.evaluation import EvaluationResult, EvaluationSet, evaluate_all, verifier_pools
from tepo_megatron.tasks.evaluate.standalone import evaluate_model
from tepo_megatron.tasks.protocol import RewardResult
from tepo_megatron.tasks.reward.verifier_task import VerifierTask
from tepo_megatron.tasks.reward.verifiers import last_word
from tests.support.data_files import write_jsonl
from tests.unit.evaluate.test_estimators import accuracy_of_the_vote
from tests.unit.test_extending import section

TOKENIZER = load_tokenizer(resolve_model_path("builtin:tiny"))
PROBLEMS = load_problems("builtin:addition-heldout")[:4]


def response(text: str) -> Response:
    ids = (*TOKENIZER.encode(text), 2)
    return Response(ids, (0.0,) * len(ids), "stop", WeightsVersion(0))


class Answers:
    """Gives the texts of ``groups[problem]``: greedily the first, sampled the others."""

    def __init__(self, groups: Sequence[Sequence[str]]) -> None:
        self.groups = groups
        self.calls: list[dict[str, Any]] = []

    def __call__(self, prompts: list[tuple[int, ...]], **asked: Any) -> list[list[Response]]:
        self.calls.append(asked)
        chosen = slice(1) if asked["temperature"] == 0 else slice(1, None)
        return [[response(text) for text in group[chosen]] for group in self.groups[: len(prompts)]]


class DirectScorer:
    """No verdict on one problem, whatever reward its failure has."""

    def __init__(self, failing: str = "", rewards: Sequence[float] = (0.0, 1.0), failed: float | None = 2.0) -> None:
        self.failing, self.rewards, self.failed = failing, rewards, failed

    def score(self, items: Sequence[tuple[Problem, str]], groups: Sequence[Hashable]) -> list[RewardResult]:
        failed = RewardResult(self.failed, "problem: no")
        return [failed if p.id == self.failing else RewardResult(self.rewards[bool(last_word(p, text))]) for p, text in items]


def as_set(problems: Sequence[Problem] = PROBLEMS, **changes: Any) -> EvaluationSet:
    scoring = {"verifier": "last_word", "greedy": True, "samples": 0, "ks": (), "notion": "verifier", "correct_at": 1.0}
    sampling = {"temperature": 0.6, "max_new_tokens": 24, "truncation": {}, "show": 9}
    prompts = tuple(tuple(TOKENIZER.prompt_ids(problem.prompt)) for problem in problems)
    values: dict[str, Any] = {**scoring, **sampling, **changes}
    return EvaluationSet(name="sums", problems=tuple(problems), prompts=prompts, left_out=0, **values)


def evaluate(
    generate: Any,
    sets: Sequence[EvaluationSet] = (),
    scorer: DirectScorer | None = None,
    heldout: Sequence[Problem] = (),
    **settings: Any,
) -> EvaluationResult:
    config = {"evaluate": settings, "rollout": {"sampling": {"temperature": 0.7, "max_new_tokens": 24}}}
    pools = dict.fromkeys((None, "last_word"), scorer or DirectScorer())
    return evaluate_both(RunConfig.model_validate(config), heldout, sets, generate, pools=pools)


def evaluate_both(
    config: RunConfig, heldout: Sequence[Problem], sets: Sequence[EvaluationSet], generate: Any, **options: Any
) -> EvaluationResult:
    """Held-out problems and sets, answered in the same way."""
    answers = {"generate": generate, "generate_heldout": generate}
    return evaluate_all(config, heldout, sets, tokenizer=TOKENIZER, seed=len, **answers, **options)


@given(data=st.data(), size=st.integers(2, 4), n=st.integers(0, 4), fails=st.booleans(), graded=st.booleans())
def test_figures_are_means_over_the_problems(data: st.DataObject, size: int, n: int, fails: bool, graded: bool) -> None:
    """A response is correct from ``correct_at`` on; a failed one is wrong and counts in no mean reward."""
    problems = PROBLEMS[:size]
    of_one = st.lists(st.sampled_from(["right", "1", "2", ""]), min_size=n + 1, max_size=n + 1)
    drawn = data.draw(st.lists(of_one, min_size=size, max_size=size))
    texts = [[p.answer if text == "right" else text for text in group] for p, group in zip(problems, drawn, strict=True)]
    correct_at, k = data.draw(st.sampled_from([0.2, 0.4, 0.5, 1.0])), data.draw(st.integers(1, max(1, n)))
    rewards = (0.25, 0.5) if graded else (0.0, 1.0)
    scorer = DirectScorer(problems[0].id if fails else "", rewards, None if graded else 2.0)
    generate = Answers(texts)
    of = as_set(problems, samples=n, ks=sorted({k, n}) if n else (), notion="text", correct_at=correct_at, show=3)
    result = evaluate(generate, [of], scorer, problems, samples=n, correct_at=correct_at, show=3)

    scored = range(fails, size)
    reward = [[rewards[text == p.answer] for text in group] for p, group in zip(problems, texts, strict=True)]
    correct = [[number in scored and value >= correct_at for value in reward[number]] for number in range(size)]
    lengths = [[len(text) + 1 for text in group] for group in texts]
    expected = {
        "greedy": fmean(group[0] for group in correct),
        "reward_greedy": fmean(reward[number][0] for number in scored),
        "response_len": fmean(fmean(group[1:] or group) for group in lengths),
        "truncated": 0.0,
        "failed": fails * (n + 1),
    }
    if n:
        expected["reward_sampled"] = fmean(fmean(reward[number][1:]) for number in scored)
        expected[f"avg@{n}"] = fmean(fmean(group[1:]) for group in correct)
        for some in of.ks:
            expected[f"pass@{some}"] = fmean(fmean(map(any, combinations(group[1:], some))) for group in correct)
            if some > 1:
                answers = [[text or None for text in group[1:]] for group in texts]
                votes = [zip(group, right[1:], strict=True) for group, right in zip(answers, correct, strict=True)]
                expected[f"maj@{some}"] = fmean(fmean(map(accuracy_of_the_vote, combinations(group, some))) for group in votes)
    names = {"greedy": "accuracy/greedy", f"avg@{n}": f"accuracy/avg@{n}", f"pass@{n}": f"accuracy/pass@{n}"}
    names |= {name: f"heldout/{name}" for name in ("reward_greedy", "reward_sampled")}
    of_heldout = {names[name]: value for name, value in expected.items() if name in names}
    assert result.metrics == pytest.approx(of_heldout | {f"eval/sums/{name}": value for name, value in expected.items()})
    calls = [(1, 0.0, 8), (n, 0.7, 8), (1, 0.0, 13), (n, 0.6, 13)]  # the seeds are lengths of "evaluate" and "evaluate/sums"
    asked = [(call["n"], call["temperature"], call["seed"]) for call in generate.calls]
    assert asked == [call for call in calls if call[0]]
    assert (result.k, result.num_problems, result.failures) == (n, size, 2 * fails * (n + 1))
    assert result.mean_response_len == pytest.approx(fmean(group[0] for group in lengths))
    assert json.loads(json.dumps(result.samples)) == result.samples
    shown, of_set = result.samples[: min(3, size)], result.samples[min(3, size) :]
    assert of_set == [{"set": "sums", **row} for row in shown]
    for number, row in enumerate(shown):
        assert (row["prompt"], row["answer"]) == (problems[number].prompt, problems[number].answer)
        assert (row["greedy"]["response"], row["greedy"]["correct"]) == (texts[number][0], correct[number][0])
        assert ("error" in row["greedy"]) == (number not in scored)
        assert number not in scored or [sample["reward"] for sample in row["sampled"]] == reward[number][1:]


def test_the_first_problems_are_used_and_without_any_verdict_there_is_no_mean_reward() -> None:
    scorer = DirectScorer(PROBLEMS[0].id, failed=None)
    result = evaluate(Answers([["1", "1"]] * 4), scorer=scorer, heldout=PROBLEMS, problems=1, samples=1)
    assert result.num_problems == 1
    assert set(result.metrics) == {"accuracy/greedy", "accuracy/avg@1", "accuracy/pass@1"}
    assert result.warnings == ["evaluation: 2 responses could not be scored; they count as wrong; the first: problem: no"]


def test_missing_responses_are_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"4 responses to each of 2 prompts were asked for, .* \[3\] to 2"):
        evaluate(Answers([["1"] * 4] * 2), heldout=PROBLEMS[:2], samples=4)


def test_samples_are_drawn_from_the_sets_own_distribution() -> None:
    generate = Answers([["1", "1"]] * 4)
    settings = EvaluationSetConfig.model_validate({"path": "x", "sampling": {"top_p": 0.9, "top_k": 0}})
    evaluate(generate, [as_set(samples=1, ks=(1,), truncation=settings.sampling.truncation)])
    greedy, sampled = generate.calls
    assert "top_p" not in greedy
    assert (sampled["top_p"], sampled["top_k"]) == (0.9, None), "0 is all"
    assert "min_p" not in sampled, "what is not given is the run's"


def test_cut_responses_and_failures_are_counted() -> None:
    def generate(prompts: list[tuple[int, ...]], **_asked: Any) -> list[list[Response]]:
        cut = Response((3, 4), (0.0, 0.0), "length", WeightsVersion(0))
        return [[cut, response("1")] for _ in prompts]

    (result,) = evaluate(generate, [as_set(greedy=False, samples=2, ks=(2,), notion=None)], DirectScorer(PROBLEMS[0].id)).sets
    assert (result.metrics["eval/sums/truncated"], result.metrics["eval/sums/failed"]) == (0.5, 2.0)
    assert result.errors == ["problem: no"] * 2
    assert not any("greedy" in name or "maj" in name for name in result.metrics)
    assert "greedy" not in result.samples[0]


def test_a_held_out_episode_says_who_wrote_what_and_is_as_long_as_its_models_part() -> None:
    ids = (*TOKENIZER.encode("7high"), *TOKENIZER.encode("5"))
    mask = [True, *[False] * (len(ids) - 2), True]

    def generate(prompts: list[tuple[int, ...]], **_asked: Any) -> list[list[Response]]:
        return [[Response(ids, (0.0,) * len(ids), "stop", WeightsVersion(0), loss_mask=mask)] for _ in prompts]

    result = evaluate(generate, [as_set(PROBLEMS[:1])], heldout=PROBLEMS[:1], samples=0)
    row = result.samples[-1]
    assert row["greedy"]["turns"] == [
        {"by": "model", "text": "7"},
        {"by": "environment", "text": "high"},
        {"by": "model", "text": "5"},
    ]
    assert (row["greedy"]["model_tokens"], row["greedy"]["tokens"]) == (2, len(ids))
    assert (result.mean_response_len, result.metrics["eval/sums/response_len"]) == (2, 2), "as in training"


def test_every_metric_of_a_set_is_in_the_one_table() -> None:
    result = evaluate(Answers([["1", "1", problem.answer] for problem in PROBLEMS]), [as_set(samples=2, ks=(1, 2))])
    named = set(re.findall(r"`(eval/[^`]+)`", section("docs/reference/metrics.md", "Every metric")))
    assert {re.sub(r"@\d+", "@k", name).replace("/sums/", "/NAME/") for name in result.metrics} == named


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., RunConfig]:
    """A run with two sets beside its held-out problems: sums, scored by the run's verifier, and words, by another."""
    for name, problems in {"sums": PROBLEMS, "words": PROBLEMS[:2]}.items():
        rows = [{"id": each.id, "prompt": each.prompt, "answer": each.answer} for each in problems]
        write_jsonl(tmp_path / f"{name}.jsonl", rows)
    sums = {"path": str(tmp_path / "sums.jsonl"), "samples": 2, "sampling": {"temperature": 0.3, "max_new_tokens": 7}}
    words = {"path": str(tmp_path / "words.jsonl"), "verifier": "exact", "every": 3, "greedy": False, "problems": 1}

    def make(**evaluate: Any) -> RunConfig:
        given = {"every": 2, "samples": 1, "problems": 2, "sets": {"sums": sums, "words": words}, **evaluate}
        return RunConfig.model_validate({"train": {"steps": 7}, "evaluate": given})

    return make


def test_a_set_takes_a_function_that_the_run_was_given(make_config: Callable[..., RunConfig]) -> None:
    config = make_config()
    reward = config.reward.model_copy(update={"verifier": "(python):score"})
    sums, _ = EvaluationSet.load_all(config.model_copy(update={"reward": reward}), TOKENIZER)
    assert sums.verifier == "(python):score"


class Fleet(nullcontext[None]):
    def generate(
        self, prompts: list[Any], *, on_group: Callable[..., object], on_progress: Callable[..., object], n: int, **_: Any
    ) -> None:
        for index in range(len(prompts)):
            on_group(index, [response("7")] * n)
            on_progress(index + 1, len(prompts))


@pytest.fixture
def config_of_eval(make_config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.setattr("tepo_megatron.tasks.evaluate.standalone.make_sampler", lambda *_, **__: Fleet())
    return make_config().model_copy(update={"output": tmp_path / "out"})


def test_a_model_is_evaluated_with_the_function_that_its_run_was_given(config_of_eval: RunConfig) -> None:
    changes = {"reward": {"verifier": "exact"}, "rollout": {"sampling": {"max_new_tokens": 8}}}
    config = RunConfig.model_validate({**config_of_eval.model_dump(exclude_unset=True), **changes})

    def score(problem: Problem, answer: str) -> float:
        return 1.0

    for reward, greedy in ((score, 1.0), (lambda problem, answer: 1.0 * (answer == problem.answer), 0.0)):
        result = evaluate_model(config, "builtin:tiny", table=False, reward=reward)
        assert result.metrics["eval/sums/greedy"] == greedy
        assert result.metrics["eval/words/avg@1"] == 0.0, "by its own verifier, exact"
        assert [(of.of.verifier, of.of.notion) for of in result.sets] == [
            (f"(python):{'score' if greedy else 'lambda'}", "text"),
            ("exact", "verifier"),
        ]
    config = config.model_copy(update={"reward": config.reward.model_copy(update={"verifier": "(python):score"})})
    with pytest.raises(ValueError, match=r"give it again, .* or evaluate_model\(…, reward=score\)"):
        evaluate_model(config, "builtin:tiny", sets=["sums"], table=False)


@pytest.mark.parametrize(
    ("sets", "changes", "message"),
    [
        (["words"], {}, r"evaluate\.sets\.words\.sampling\.max_new_tokens = 512 exceed the 256 tokens that the model takes;"),
        (["sums"], {"rollout": {"server": {"max_model_len": 12}}}, r"\.sums\..* the 12 .*\(rollout\.server\.max_model_len\);"),
        (None, {"data": {"heldout": "builtin:addition-heldout"}}, r"and rollout\.sampling\.max_new_tokens = 512 exceed"),
    ],
)
def test_an_evaluation_must_fit_the_model(
    sets: list[str] | None, changes: dict[str, Any], message: str, config_of_eval: RunConfig
) -> None:
    config = RunConfig.model_validate({**config_of_eval.model_dump(exclude_unset=True), **changes})
    with pytest.raises(ValueError, match=message):
        evaluate_model(config, "builtin:tiny", sets=sets, table=False)


def test_answers_that_another_evaluation_stores_are_left_alone(config_of_eval: RunConfig) -> None:
    folder = config_of_eval.output / "eval"
    lock = RunLock(folder)
    lock.take()
    (folder / "responses.jsonl").write_text('{"key": "not who')
    for resume in (False, True):
        with pytest.raises(ValueError, match=r"eval is in use by process \d+ .* give another folder \(output=…\)"):
            evaluate_model(config_of_eval, "builtin:tiny", sets=["sums"], table=False, resume=resume)
        assert (folder / "responses.jsonl").read_text() == '{"key": "not who'
    lock.release()
    evaluate_model(config_of_eval, "builtin:tiny", sets=["sums"], table=False)
    assert sorted(path.name for path in folder.iterdir()) == ["metrics.json", "results", "samples.jsonl"]
    settings = json.loads((folder / "results" / "sums.json").read_text())["settings"]
    assert settings | {"head_dtype": "model", "quantization": "none", "speculative": None, "extra_args": []} == settings
    assert settings["dtype"] in ("float32", "bfloat16"), "not auto"


def test_an_evaluation_says_how_far_it_is(
    config_of_eval: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lines() -> list[str]:
        evaluate_model(config_of_eval, "builtin:tiny", sets=["sums"], table=False)
        said = capsys.readouterr()
        assert said.out == "", "tools read it"
        return said.err.splitlines()

    monkeypatch.setattr("tepo_megatron.tasks.evaluate.standalone._PROGRESS_S", math.inf)
    assert [line.partition(";")[0] for line in lines()] == ["evaluates builtin:tiny on 4 problems"]
    monkeypatch.setattr("tepo_megatron.tasks.evaluate.standalone._PROGRESS_S", 0.0)
    (config_of_eval.output / "eval" / "responses.jsonl").write_text("{}\n")
    removes, _, *progress = lines()
    assert "responses.jsonl has answers of an interrupted evaluation (1 prompts), which are removed" in removes
    assert progress == [f"answered {done} of 4 prompts" for done in (1, 2, 3, 4)] * 2, "greedy, then samples"


def test_what_a_set_does_not_say_is_as_in_the_run(make_config: Callable[..., RunConfig]) -> None:
    sums, words = EvaluationSet.load_all(make_config(), TOKENIZER)
    assert (sums.temperature, sums.max_new_tokens, sums.samples, sums.ks, sums.greedy) == (0.3, 7, 2, (2,), True)
    assert (words.temperature, words.max_new_tokens, words.samples, words.ks, words.greedy) == (1.0, 512, 1, (1,), False)
    assert [(each.verifier, len(each.problems)) for each in (sums, words)] == [("last_word", 4), ("exact", 1)]
    assert [each.name for each in EvaluationSet.load_all(make_config(), TOKENIZER, ["words"])] == ["words"]
    with pytest.raises(ValueError, match=r"there is no set 'other'; evaluate\.sets has sums, words"):
        EvaluationSet.load_all(make_config(), TOKENIZER, ["other"])


def test_how_answers_of_a_set_are_compared() -> None:
    cases = [
        *(("auto", verifier, "verifier") for verifier in ("exact", "last_word", "last_number", "math")),
        *(("auto", verifier, None) for verifier in ("python_tests", "stack_machine")),
        *(("auto", verifier, "text") for verifier in ("judge", f"{__file__}:vote")),
        *((majority, "stack_machine", majority) for majority in ("verifier", "text")),
        ("none", "math", None),
    ]
    common = {"path": "builtin:addition-heldout", "problems": 1}
    sets = {f"s{at}": {**common, "majority": item[0], "verifier": item[1]} for at, item in enumerate(cases)}
    config = RunConfig.model_validate({"evaluate": {"sets": sets}, "reward": {"run_code": True}})
    assert [of.notion for of in EvaluationSet.load_all(config, TOKENIZER)] == [notion for _, _, notion in cases]


def test_a_file_of_another_digest_is_refused(make_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    path = tmp_path / "sums.jsonl"
    given = {"path": str(path), "sha256": sha256(path.read_bytes()).hexdigest()}
    assert len(EvaluationSet.load_all(make_config(sets={"sums": given}), TOKENIZER)[0].problems) == 4
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(ValueError, match=r"evaluate\.sets\.sums\.sha256 = .* it was changed"):
        EvaluationSet.load_all(make_config(sets={"sums": given}), TOKENIZER)
    with pytest.raises(ValueError, match=r"evaluate\.sets\.sums: the data file none\.jsonl does not exist"):
        EvaluationSet.load_all(make_config(sets={"sums": {"path": "none.jsonl"}}), TOKENIZER)


def test_each_set_has_its_turn_and_its_verifier(make_config: Callable[..., RunConfig]) -> None:
    config = make_config()
    sets = EvaluationSet.load_all(config, TOKENIZER)
    calls: list[dict[str, Any]] = []

    def generate(prompts: list[tuple[int, ...]], **asked: Any) -> list[list[Response]]:
        calls.append(asked)
        by_prompt = dict(zip(sets[0].prompts, sets[0].problems, strict=True))
        return [[response(f"so {by_prompt[prompt].answer}")] * asked["n"] for prompt in prompts]

    seen = {}
    with VerifierTask(config.reward, config.data) as task, verifier_pools(config, sets, task) as pools:
        for step in range(8):
            done = evaluate_both(config, PROBLEMS, sets, generate, step=step, pools=pools)
            seen[step] = done.metrics
            assert config.evaluate.any_due(step, 7, heldout=True) == bool(done.metrics)
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
    with VerifierTask(config.reward, config.data) as task:
        pools = verifier_pools(config, EvaluationSet.load_all(config, TOKENIZER), task)
        with pytest.raises(ValueError, match=r"evaluate\.sets\.sums: .*cannot score the first 4"), pools:
            pass


def test_answers_that_no_response_reaches_are_refused_in_sets_and_held_out_problems(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """``last_word`` gives no response 1 if all answers have spaces."""
    write_jsonl(tmp_path / "words.jsonl", [{"prompt": "1+1=", "answer": "is 2"}])
    config, words = make_config(), {"path": str(tmp_path / "words.jsonl"), "verifier": "last_word"}
    sets = EvaluationSet.load_all(make_config(sets={"sums": words}), TOKENIZER)
    for verifier, chosen, heldout in (("last_word", sets, []), ("exact", sets, []), ("last_word", [], sets[0].problems)):
        reward = config.reward.model_copy(update={"verifier": verifier})
        whose = "evaluate.sets.sums: " if chosen else ""
        refused = pytest.raises(ValueError, match=f"^{whose}the verifier last_word can give no .* 'is 2' of problem")
        with VerifierTask(reward, config.data) as task, refused, verifier_pools(config, chosen, task, heldout, PROBLEMS):
            pass
    with VerifierTask(config.reward, config.data, custom=last_word) as task, verifier_pools(config, sets, task):
        pass


def test_tools_that_no_prompt_shows_are_refused_without_an_environment() -> None:
    problem = Problem("p", "1+1=", "2", {"tools": [{"name": "add"}]}, (("user", "1+1="),))
    others = [replace(problem, messages=()), replace(problem, metadata={"tools": []})]
    config, game = RunConfig(), RunConfig.model_validate({"environment": {"name": "guess_number"}})
    wrapped = RunConfig.model_validate({"data": {"chat_template": True}})
    refused = pytest.raises(ValueError, match="problem 'p' has tools beside its messages, and its prompt would not show them")
    with VerifierTask(config.reward, config.data) as task:
        for run, chosen, heldout in ((config, [], [problem]), (game, [as_set([problem])], [])):
            with refused, verifier_pools(run, chosen, task, heldout):
                pass
        for run, heldout in ((config, others), (game, [problem]), (wrapped, [problem])):
            with verifier_pools(run, [], task, heldout):
                pass


def test_the_named_component_decides_and_one_must_be_named(tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text(
        "def parts(problem, response):\n    return {'right': response == problem.answer, 'form': 1}\n"
    )
    run = RunConfig.model_validate({"reward": {"verifier": f"{tmp_path / 'parts.py'}:parts"}})
    own = {"path": "builtin:addition-heldout", "problems": 2, "samples": 2, "verifier": "exact"}
    generate = Answers([["", problem.answer, "1"] for problem in PROBLEMS[:2]])
    with VerifierTask(run.reward, run.data) as task:
        task.rehearse(PROBLEMS)
        for correct, of_own, why in [
            (None, None, r"evaluate\.correct = null names no component .* has right, form"),
            ("rihgt", None, r"evaluate\.correct = rihgt names no component .* has right, form"),
            ("right", "right", r"evaluate\.sets\.own\.correct = right, but the verifier returns a number"),
            ("right", None, None),
            ("ok, right", None, None),
        ]:
            sets = {"sums": {**own, "verifier": None, "majority": "verifier"}, "own": {**own, "correct": of_own}}
            evaluate = {"correct": correct, "problems": 2, "samples": 2, "sets": sets}
            config = RunConfig.model_validate({"reward": run.reward, "evaluate": evaluate})
            chosen = EvaluationSet.load_all(config, TOKENIZER)
            refused = pytest.raises(ValueError, match=why) if why else nullcontext()
            with refused, verifier_pools(config, chosen, task, PROBLEMS) as pools:
                result = evaluate_both(config, PROBLEMS, chosen, generate, pools=pools)
                assert (result.metrics["accuracy/greedy"], result.metrics["accuracy/avg@2"]) == (0.0, 0.5)
                assert (result.metrics["eval/sums/avg@2"], result.metrics["eval/sums/maj@2"]) == (0.5, 0.5)
            with pytest.raises(ValueError, match=why) if why and not of_own else nullcontext():
                evaluate_both(config, PROBLEMS, [], generate, pools={None: task})


def test_every_verifier_is_tried_and_has_the_component(tmp_path: Path) -> None:
    """Those of held-out sources too, and ``reward.verifier`` where only a set has it."""
    (tmp_path / "parts.py").write_text(
        "def right(problem, response):\n    return {'right': 1, 'form': 1}\n"
        "def style(problem, response):\n    return {'ok': 1, 'style': 1}\n"
        "def fails(problem, response):\n    raise RuntimeError('no judge')\n"
    )
    (tmp_path / "own.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    names = ("right", "style", "fails")
    verifiers = {name: f"{tmp_path}/parts.py:{name}" for name in names}
    sources = [{"path": f"{tmp_path}/own.jsonl", "name": name, "verifier": of} for name, of in verifiers.items()]
    evaluate = {"correct": "right", "sets": {"sums": {"path": f"{tmp_path}/own.jsonl"}}}
    data, reward = {"train": sources[:1], "heldout": sources[1:]}, {"verifier": verifiers["fails"]}
    config = RunConfig.model_validate({"data": data, "reward": reward, "evaluate": evaluate})
    right, style, fails = ([Problem(name, "1+1=", "2", source=name)] for name in names)
    for sets, heldout, says in (
        ([], style, "correct = right names no component of the reward, which has ok, style"),
        ([], fails, "cannot score the first 1 problems.* no judge"),
        (EvaluationSet.load_all(config, TOKENIZER), right, "cannot score the first 1 problems.* no judge"),
        ([], right, None),
    ):
        refused = pytest.raises(ValueError, match=says) if says else nullcontext()
        with VerifierTask(config.reward, config.data) as task, refused, verifier_pools(config, sets, task, heldout, right):
            pass


def test_sets_are_enough_to_evaluate_on(tmp_path: Path) -> None:
    given = ["data.train=mine.jsonl", "evaluate.sets.aime.path=aime.jsonl", "evaluate.sets.aime.every=5"]
    config = load_run(None, given)
    assert (config.data.heldout, config.evaluate.every) == (None, 10)
    path = tmp_path / "resolved.yaml"
    path.write_text(dump_resolved(config))
    assert load_run(path) == absolute(config)
    assert load_run(None, [*given, "train.save_every=5", "train.keep_best.metric=eval/aime/greedy"]).train.keep_best
    for metric, why in {"eval/other/greedy": "is not given", "accuracy/greedy": "data.heldout, which is not given"}.items():
        with pytest.raises(ConfigError, match=why):
            load_run(None, [*given, "train.save_every=5", f"train.keep_best.metric={metric}"])
