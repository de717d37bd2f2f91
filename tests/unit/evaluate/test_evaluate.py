import json
import random
from collections.abc import Hashable, Sequence
from importlib.resources import files
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.config.data import EvaluateConfig
from tepo_megatron.config.rollout import SamplingConfig, ServerConfig
from tepo_megatron.core.problem import Problem
from tepo_megatron.core.rollout import Response, WeightsVersion
from tepo_megatron.tasks.data import addition
from tepo_megatron.tasks.data.tokenizer import load_tokenizer
from tepo_megatron.tasks.evaluate.evaluation import EvaluationResult, evaluate
from tepo_megatron.tasks.evaluate.standalone import without_trainer
from tepo_megatron.tasks.protocol import RewardResult
from tepo_megatron.tasks.reward.verifiers import last_word

TOKENIZER = load_tokenizer(Path(str(files("tepo_megatron.tasks.data").joinpath("builtin", "tiny"))))
SAMPLING = SamplingConfig(temperature=0.7, max_new_tokens=24)


def response(text: str) -> Response:
    ids = (*TOKENIZER.encode(text), 2)
    return Response(ids, (0.0,) * len(ids), "stop", WeightsVersion(0))


class FakeSampler:
    """Answers ``verdicts[problem][sample]`` rightly or wrongly; greedy is right where ``greedy[problem]`` says so."""

    def __init__(self, problems: list[Problem], greedy: list[bool], verdicts: list[list[bool]]) -> None:
        self.by_prompt = {
            tuple(TOKENIZER.prompt_ids(p.prompt)): (p, g, v) for p, g, v in zip(problems, greedy, verdicts, strict=True)
        }
        self.calls: list[tuple[int, float, int, int]] = []

    def __call__(
        self, prompts: list[tuple[int, ...]], *, n: int, temperature: float, max_new_tokens: int, seed: int
    ) -> list[list[Response]]:
        self.calls.append((n, temperature, max_new_tokens, seed))
        return [self._group(prompt, n, temperature) for prompt in prompts]

    def _group(self, prompt: tuple[int, ...], n: int, temperature: float) -> list[Response]:
        problem, greedy, verdicts = self.by_prompt[prompt]
        rights = [greedy] if temperature == 0 else verdicts[:n]
        texts = [f"so {problem.answer if right else '1' + problem.answer}" for right in rights]
        return [response(text) for text in texts]


class DirectScorer:
    def __init__(self, failing: str = "") -> None:
        self.failing = failing

    def score(self, items: Sequence[tuple[Problem, str]], groups: Sequence[Hashable]) -> list[RewardResult]:
        return [
            RewardResult(2.0, "problem: no") if p.id == self.failing else RewardResult(last_word(p, text)) for p, text in items
        ]


class GradedScorer:
    """0.5 for a right answer, 0.25 for a wrong one, and no verdict on one problem."""

    def __init__(self, failing: str = "") -> None:
        self.failing = failing

    def score(self, items: Sequence[tuple[Problem, str]], groups: Sequence[Hashable]) -> list[RewardResult]:
        return [
            RewardResult(None, "problem: no") if p.id == self.failing else RewardResult(0.25 + 0.25 * last_word(p, text))
            for p, text in items
        ]


@given(data=st.data(), size=st.integers(1, 6), k=st.integers(0, 4))
def test_accuracies_against_the_verdicts(data: st.DataObject, size: int, k: int) -> None:
    problems = addition.heldout_problems()[:size]
    greedy = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    verdicts = data.draw(st.lists(st.lists(st.booleans(), min_size=k, max_size=k), min_size=size, max_size=size))
    sampler = FakeSampler(problems, greedy, verdicts)
    result = evaluate(
        problems,
        generate=sampler,
        tokenizer=TOKENIZER,
        pool=DirectScorer(),
        config=EvaluateConfig(samples=k, show=2),
        sampling=SAMPLING,
        seed=5,
    )
    expected = {"accuracy/greedy": fmean(greedy), "heldout/reward_greedy": fmean(greedy)}
    if k:
        expected["heldout/reward_sampled"] = fmean(fmean(group) for group in verdicts)
        expected["accuracy/avg@k"] = fmean(fmean(group) for group in verdicts)
        expected["accuracy/pass@k"] = fmean(any(group) for group in verdicts)
    assert result.metrics == pytest.approx(expected)
    assert sampler.calls == [(1, 0.0, 24, 5)] + ([(k, 0.7, 24, 5)] if k else [])
    assert (result.k, result.num_problems, result.failures) == (k, size, 0)
    lengths = [len(f"so {p.answer}") + (not right) + 1 for p, right in zip(problems, greedy, strict=True)]
    assert result.mean_response_len == pytest.approx(fmean(lengths))
    assert len(result.samples) == min(2, size)
    for row, problem, right, group in zip(result.samples, problems, greedy, verdicts, strict=False):
        assert (row["prompt"], row["answer"], row["problem"]) == (problem.prompt, problem.answer, problem.id)
        assert row["greedy"]["response"] == f"so {problem.answer if right else '1' + problem.answer}"
        assert [sample["reward"] for sample in row["sampled"]] == [float(v) for v in group]
    assert json.loads(json.dumps(result.samples)) == result.samples


def _run(
    problems: list[Problem], config: EvaluateConfig, scorer: DirectScorer | GradedScorer | None = None, drop: int = 0
) -> EvaluationResult:
    sampler = FakeSampler(problems, [True] * len(problems), [[True] * (config.samples - drop)] * len(problems))
    return evaluate(
        problems,
        generate=sampler,
        tokenizer=TOKENIZER,
        pool=scorer or DirectScorer(),
        config=config,
        sampling=SAMPLING,
        seed=0,
    )


def test_the_first_problems_are_used() -> None:
    problems = random.Random(0).sample(addition.heldout_problems(), 8)
    result = _run(problems, EvaluateConfig(problems=3, samples=1))
    assert [row["problem"] for row in result.samples] == [p.id for p in problems[:3]]
    assert result.num_problems == 3


def test_failed_verdicts_are_counted_and_not_correct() -> None:
    """Whatever reward a failure is given."""
    problems = addition.heldout_problems()[:4]
    result = _run(problems, EvaluateConfig(samples=2), DirectScorer(failing=problems[1].id))
    assert result.failures == 3
    accuracies = {"accuracy/greedy": 0.75, "accuracy/avg@k": 0.75, "accuracy/pass@k": 0.75}
    assert result.metrics == accuracies | {"heldout/reward_greedy": 1.0, "heldout/reward_sampled": 1.0}
    assert result.samples[1]["greedy"]["error"] == "problem: no"
    assert "error" not in result.samples[0]["greedy"]


@given(data=st.data(), size=st.integers(2, 6), k=st.integers(0, 4), fails=st.booleans())
def test_graded_rewards_show_as_means_and_count_from_the_bound_on(data: st.DataObject, size: int, k: int, fails: bool) -> None:
    problems = addition.heldout_problems()[:size]
    greedy = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    verdicts = data.draw(st.lists(st.lists(st.booleans(), min_size=k, max_size=k), min_size=size, max_size=size))
    correct_at = data.draw(st.sampled_from([0.2, 0.4, 0.5, 1.0]))
    result = evaluate(
        problems,
        generate=FakeSampler(problems, greedy, verdicts),
        tokenizer=TOKENIZER,
        pool=GradedScorer(problems[0].id if fails else ""),
        config=EvaluateConfig(samples=k, correct_at=correct_at),
        sampling=SAMPLING,
        seed=5,
    )
    scored = range(fails, size)
    reward = {True: 0.5, False: 0.25}
    assert result.metrics["heldout/reward_greedy"] == pytest.approx(fmean(reward[greedy[at]] for at in scored))
    assert result.metrics["accuracy/greedy"] == pytest.approx(sum(reward[greedy[at]] >= correct_at for at in scored) / size)
    assert ("heldout/reward_sampled" in result.metrics) == (k > 0)
    if k:
        mean = fmean(fmean(reward[right] for right in verdicts[at]) for at in scored)
        assert result.metrics["heldout/reward_sampled"] == pytest.approx(mean)
    judged = [row["greedy"]["correct"] for row in result.samples]
    assert judged == [at in scored and reward[greedy[at]] >= correct_at for at in range(size)]


def test_where_nothing_could_be_scored_there_is_no_mean_reward() -> None:
    problem = addition.heldout_problems()[0]
    result = _run([problem], EvaluateConfig(samples=1), GradedScorer(problem.id))
    assert set(result.metrics) == {"accuracy/greedy", "accuracy/avg@k", "accuracy/pass@k"}


def test_missing_responses_are_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"4 responses to each of 2 prompts were asked for, .* \[3\] to 2"):
        _run(addition.heldout_problems()[:2], EvaluateConfig(samples=4), drop=1)


def test_no_problem() -> None:
    with pytest.raises(ValueError, match="no held-out problem"):
        _run([], EvaluateConfig())


def test_servers_without_a_trainer_share_their_gpus_with_nobody() -> None:
    for placement in ("local", "colocated"):
        server = ServerConfig(placement=placement, tp=2)
        assert without_trainer(server) == ServerConfig(tp=2)
    external = ServerConfig(placement="external", registry=Path("/r"))
    assert without_trainer(external) is external
