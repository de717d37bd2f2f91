"""Held-out problems: accuracies and rewards against verdicts that are drawn."""

import json
from collections.abc import Hashable, Sequence
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.config import RunConfig
from tepo_megatron.core.problem import Problem
from tepo_megatron.core.rollout import Response, WeightsVersion
from tepo_megatron.tasks.data import addition
from tepo_megatron.tasks.data.tokenizer import load_tokenizer
from tepo_megatron.tasks.evaluate.evaluation import EvaluationResult, evaluate_all
from tepo_megatron.tasks.protocol import RewardResult
from tepo_megatron.tasks.reward.verifiers import last_word

TOKENIZER = load_tokenizer(Path(str(files("tepo_megatron.tasks.data").joinpath("builtin", "tiny"))))
PROBLEMS = addition.heldout_problems()[:6]


def response(text: str) -> Response:
    ids = (*TOKENIZER.encode(text), 2)
    return Response(ids, (0.0,) * len(ids), "stop", WeightsVersion(0))


class FakeSampler:
    """Answers ``verdicts[problem][sample]`` rightly or wrongly; greedy is right if ``greedy[problem]`` says so."""

    def __init__(self, greedy: Sequence[bool], verdicts: Sequence[Sequence[bool]]) -> None:
        prompts = [tuple(TOKENIZER.prompt_ids(problem.prompt)) for problem in PROBLEMS]
        self.by_prompt = dict(zip(prompts, zip(PROBLEMS, greedy, verdicts, strict=False), strict=False))
        self.calls: list[tuple[int, float, int, int]] = []

    def __call__(
        self, prompts: list[tuple[int, ...]], *, n: int, temperature: float, max_new_tokens: int, seed: int
    ) -> list[list[Response]]:
        self.calls.append((n, temperature, max_new_tokens, seed))
        groups = []
        for problem, greedy, verdicts in (self.by_prompt[prompt] for prompt in prompts):
            rights = [greedy] if temperature == 0 else verdicts[:n]
            groups.append([response(f"so {problem.answer if right else '1' + problem.answer}") for right in rights])
        return groups


class DirectScorer:
    """No verdict on one problem, whatever reward its failure has."""

    def __init__(self, failing: str = "", wrong: float = 0.0, right: float = 1.0, failed: float | None = 2.0) -> None:
        self.failing, self.reward, self.failed = failing, {0.0: wrong, 1.0: right}, failed

    def score(self, items: Sequence[tuple[Problem, str]], groups: Sequence[Hashable]) -> list[RewardResult]:
        failed = RewardResult(self.failed, "problem: no")
        return [failed if p.id == self.failing else RewardResult(self.reward[last_word(p, text)]) for p, text in items]


def evaluate(size: int, sampler: FakeSampler, scorer: DirectScorer, **settings: Any) -> EvaluationResult:
    sampling = {"temperature": 0.7, "max_new_tokens": 24}
    config = RunConfig.model_validate({"evaluate": settings, "rollout": {"sampling": sampling}})
    return evaluate_all(
        config,
        PROBLEMS[:size],
        (),
        generate=sampler,
        generate_heldout=sampler,
        tokenizer=TOKENIZER,
        pools={None: scorer},
        seed=len,
    )


@given(data=st.data(), size=st.integers(2, 6), k=st.integers(0, 4), fails=st.booleans(), graded=st.booleans())
def test_figures_against_the_verdicts(data: st.DataObject, size: int, k: int, fails: bool, graded: bool) -> None:
    """A response is correct from ``correct_at`` on; a failed one is wrong and counts in no mean reward."""
    greedy = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    verdicts = data.draw(st.lists(st.lists(st.booleans(), min_size=k, max_size=k), min_size=size, max_size=size))
    correct_at = data.draw(st.sampled_from([0.2, 0.4, 0.5, 1.0]))
    reward = {True: 0.5, False: 0.25} if graded else {True: 1.0, False: 0.0}
    failing = PROBLEMS[0].id if fails else ""
    scorer = DirectScorer(failing, reward[False], reward[True], None if graded else 2.0)
    sampler = FakeSampler(greedy, verdicts)
    result = evaluate(size, sampler, scorer, samples=k, correct_at=correct_at, show=3)

    scored = range(fails, size)
    correct = {right: reward[right] >= correct_at for right in (True, False)}
    expected = {
        "accuracy/greedy": sum(correct[greedy[i]] for i in scored) / size,
        "heldout/reward_greedy": fmean(reward[greedy[i]] for i in scored),
    }
    if k:
        expected["heldout/reward_sampled"] = fmean(fmean(reward[right] for right in verdicts[i]) for i in scored)
        expected["accuracy/avg@k"] = sum(fmean(correct[right] for right in verdicts[i]) for i in scored) / size
        expected["accuracy/pass@k"] = sum(any(correct[right] for right in verdicts[i]) for i in scored) / size
    assert result.metrics == pytest.approx(expected)
    assert sampler.calls == [(1, 0.0, 24, 8)] + ([(k, 0.7, 24, 8)] if k else [])
    assert (result.k, result.num_problems, result.failures) == (k, size, fails * (k + 1))
    lengths = [len(f"so {p.answer}") + (not right) + 1 for p, right in zip(PROBLEMS, greedy, strict=False)]
    assert result.mean_response_len == pytest.approx(fmean(lengths))
    assert len(result.samples) == min(3, size)
    for index, row in enumerate(result.samples):
        problem, right = PROBLEMS[index], greedy[index]
        assert (row["prompt"], row["answer"], row["problem"]) == (problem.prompt, problem.answer, problem.id)
        assert row["greedy"]["response"] == f"so {problem.answer if right else '1' + problem.answer}"
        assert row["greedy"]["correct"] == (index in scored and correct[right])
        assert ("error" in row["greedy"]) == (index not in scored)
        assert index not in scored or [sample["reward"] for sample in row["sampled"]] == [reward[v] for v in verdicts[index]]
    assert json.loads(json.dumps(result.samples)) == result.samples


def test_the_first_problems_are_used() -> None:
    result = evaluate(6, FakeSampler([True] * 6, [[True]] * 6), DirectScorer(), problems=3, samples=1)
    assert [row["problem"] for row in result.samples] == [problem.id for problem in PROBLEMS[:3]]
    assert result.num_problems == 3


def test_without_any_verdict_there_is_no_mean_reward() -> None:
    result = evaluate(1, FakeSampler([True], [[True]]), DirectScorer(PROBLEMS[0].id, failed=None), samples=1)
    assert set(result.metrics) == {"accuracy/greedy", "accuracy/avg@k", "accuracy/pass@k"}
    assert result.warnings == ["evaluation: 2 responses could not be scored; they count as wrong; the first: problem: no"]


def test_missing_responses_are_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"4 responses to each of 2 prompts were asked for, .* \[3\] to 2"):
        evaluate(2, FakeSampler([True] * 2, [[True] * 3] * 2), DirectScorer(), samples=4)
