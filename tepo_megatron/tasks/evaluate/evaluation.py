from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any

from tepo_megatron.config import RunConfig
from tepo_megatron.config.data import EvaluationSetConfig, SourceConfig
from tepo_megatron.core.problem import Problem, ResponseText
from tepo_megatron.core.rollout import Response
from tepo_megatron.sampler.sampling import truncation_of
from tepo_megatron.tasks.data.problems import encode_prompt
from tepo_megatron.tasks.data.rows import file_digest
from tepo_megatron.tasks.data.sources import Source
from tepo_megatron.tasks.data.tokenizer import Tokenizer
from tepo_megatron.tasks.evaluate.answers import Notion, Scored, Scorer, Tally, tally_answers
from tepo_megatron.tasks.evaluate.estimators import maj_at_k, pass_at_k
from tepo_megatron.tasks.protocol import Generate, RewardResult, Task
from tepo_megatron.tasks.reward.pool import RewardPool
from tepo_megatron.tasks.reward.verifiers import resolve_verifier

Pools = Mapping[str | None, Scorer]


@contextmanager
def verifier_pools(
    config: RunConfig, sets: Sequence[EvaluationSet], task: Task, heldout: Sequence[Problem] = (), train: Sequence[Problem] = ()
) -> Iterator[Mapping[str | None, Task]]:
    """Yields each verifier's scorer: the task (also for None) or a pool. Raises ValueError if one cannot score its problems, if
    it is open which component decides, or if prompts would lack tools.
    """
    data = config.data
    sources = (*data.train_sources, *data.heldout_sources, *config.evaluate.sets.values())
    # a plain prompt is then one message, and may show them
    wraps = data.chat_template or any(source.chat_template for source in sources)
    prompts = [problem for of in sets for problem in of.problems]
    prompts += heldout if config.environment is None else ()  # an environment may show them itself, as rollout.collect
    prompts += train if config.environment is None and config.rollout.collect is None else ()
    for problem in prompts:
        is_plain = wraps and [role for role, _ in problem.messages if role != "system"] == ["user"]
        if problem.messages and not is_plain and isinstance(tools := problem.metadata.get("tools"), list) and tools:
            raise ValueError(
                f"problem {problem.id!r} has tools beside its messages, and its prompt would not show them: use an agent or an "
                "environment, or describe them in the system message and rename the column"
            )
    pools: dict[str | None, Task] = {None: task, task.verifier: task}
    for problems in (train, heldout):
        task.rehearse(problems)
    for problem in heldout:
        RewardResult.check_component("evaluate.correct", config.evaluate.correct, task.components_of(problem))
    with ExitStack() as opened:
        for of in sets:
            try:
                if of.verifier not in pools:
                    other = config.reward.model_copy(update={"verifier": of.verifier, "kwargs": {}, "weights": None})
                    pools[of.verifier] = opened.enter_context(RewardPool(other))
                pools[of.verifier].rehearse(of.problems)
            except ValueError as error:
                raise ValueError(f"evaluate.sets.{of.name}: {error}") from error
            for problem in of.problems:
                RewardResult.check_component(of.correct_field, of.correct, pools[of.verifier].components_of(problem))
        yield pools


def evaluate_all(
    config: RunConfig,
    heldout: Sequence[Problem],
    sets: Sequence[EvaluationSet],
    *,
    generate: Generate,
    generate_heldout: Generate,
    tokenizer: Tokenizer,
    pools: Pools,
    seed: Callable[[str], int],
    step: int | None = None,
) -> EvaluationResult:
    """``seed``: purpose → seed. ``generate`` answers the sets. ``step``: only the sets due after it."""
    settings, last = config.evaluate, config.train.steps
    plain: SetResult | None = None
    if heldout and (step is None or settings.is_due(None, step, last)):
        like_a_set = EvaluationSetConfig(path="heldout", problems=settings.problems, majority="none")
        of = _evaluation_set(config, tokenizer, "", like_a_set, heldout)
        plain = _evaluate(of, generate_heldout, tokenizer, pools[None], seed("evaluate"))
    results = [
        _evaluate(of, generate, tokenizer, pools[of.verifier], seed(f"evaluate/{of.name}"))
        for of in sets
        if step is None or settings.is_due(of.name, step, last)
    ]
    everything = results if plain is None else [plain, *results]
    greedy = [] if plain is None else [problem.greedy for problem in plain.problems if problem.greedy is not None]
    errors = [error for result in everything for error in result.errors]
    return EvaluationResult(
        metrics={name: value for result in everything for name, value in result.metrics.items()},
        k=settings.samples if greedy else 0,
        num_problems=len(greedy),
        mean_response_len=fmean(response.model_tokens for response in greedy) if greedy else 0.0,
        failures=len(errors),
        samples=[row for result in everything for row in result.samples],
        first_failure=errors[0] if errors else None,
        sets=tuple(results),
        heldout=plain,
    )


@dataclass(frozen=True)
class EvaluationResult:
    """The result of an evaluation.

    ``metrics``: ``accuracy/greedy``; with ``k`` samples (0: greedy only), such as 4, ``accuracy/avg@4`` and
    ``accuracy/pass@4``; the mean rewards ``heldout/reward_greedy`` and ``heldout/reward_sampled``; and the metrics of ``sets``.
    ``mean_response_len``: the model's tokens in greedy responses, with the end token. ``failures``: responses that could not be
    scored and count as wrong; ``first_failure``: the first cause. ``samples``: rows of ``samples.jsonl``.
    """

    metrics: dict[str, float]
    k: int
    num_problems: int
    mean_response_len: float
    failures: int
    samples: list[dict[str, Any]]
    first_failure: str | None = None
    sets: tuple[SetResult, ...] = ()
    heldout: SetResult | None = None

    @property
    def warnings(self) -> list[str]:
        causes = {f"evaluation of {item.of.name}": item.errors for item in self.sets}
        causes = {"evaluation": [] if self.heldout is None else self.heldout.errors, **causes}
        return [
            f"{what}: {len(errors)} responses could not be scored; they count as wrong; the first: {errors[0]}"
            for what, errors in causes.items()
            if errors
        ]


@dataclass(frozen=True)
class EvaluationSet:
    """``name`` is empty for held-out problems. ``notion`` None: no maj@k. ``left_out``: problems with too long prompts."""

    name: str
    problems: tuple[Problem, ...]
    prompts: tuple[tuple[int, ...], ...]
    left_out: int
    verifier: str
    greedy: bool
    samples: int
    ks: tuple[int, ...]
    temperature: float
    max_new_tokens: int
    truncation: Mapping[str, Any]
    notion: Notion | None
    correct_at: float
    show: int
    correct: str | None = None

    @property
    def correct_field(self) -> str:
        return f"evaluate.sets.{self.name}.correct" if self.name else "evaluate.correct"

    def is_correct(self, result: RewardResult) -> bool:
        return result.is_correct(self.correct_at, self.correct)

    @classmethod
    def load_all(
        cls, config: RunConfig, tokenizer: Tokenizer, names: Iterable[str] | None = None, limit: float = inf
    ) -> list[EvaluationSet]:
        """``limit``: tokens that the model takes. Raises ValueError for unusable problems."""
        known = config.evaluate.sets
        chosen = list(known) if names is None else list(names)
        for name in chosen:
            if name not in known:
                raise ValueError(f"there is no set {name!r}; evaluate.sets has {', '.join(known) or 'none'}")
        sets = [_load_set(config, tokenizer, name) for name in chosen]
        for of in sets:
            sizes = [(len(prompt), problem.id) for prompt, problem in zip(of.prompts, of.problems, strict=True)]
            config.rollout.check_room(sizes, limit, of.max_new_tokens, f"evaluate.sets.{of.name}")
        return sets


@dataclass(frozen=True)
class _ProblemResult:
    """``figures``: ``greedy``, ``avg@n``, ``pass@k``, ``maj@k`` and others."""

    problem: Problem
    greedy: Scored | None
    sampled: Sequence[Scored]
    figures: dict[str, float]

    @property
    def responses(self) -> list[Scored]:
        return [*([] if self.greedy is None else [self.greedy]), *self.sampled]

    def row(self) -> dict[str, Any]:
        problem = self.problem
        return {
            "problem": problem.id,
            "prompt": problem.prompt,
            "answer": problem.answer,
            **({} if self.greedy is None else {"greedy": self.greedy.row()}),
            "sampled": [response.row() for response in self.sampled],
            **({"source": problem.source} if problem.source else {}),
            **({"metadata": dict(problem.metadata)} if problem.metadata else {}),
        }


@dataclass(frozen=True)
class SetResult:
    of: EvaluationSet
    problems: Sequence[_ProblemResult]

    @property
    def errors(self) -> list[str]:
        results = [response.result for problem in self.problems for response in problem.responses]
        return [result.error for result in results if result.error is not None]

    @property
    def samples(self) -> list[dict[str, Any]]:
        named = {"set": self.of.name} if self.of.name else {}
        return [{**named, **problem.row()} for problem in self.problems[: self.of.show]]

    @property
    def metrics(self) -> dict[str, float]:
        """``eval/NAME/…``: means over the problems that have the figure."""
        means = {name: fmean(values) for name, values in self.figures.items()}
        if self.of.name:
            return {f"eval/{self.of.name}/{name}": mean for name, mean in (means | {"failed": float(len(self.errors))}).items()}
        shown = {
            "accuracy/greedy": "greedy",
            "accuracy/avg@k": f"avg@{self.of.samples}",
            "accuracy/pass@k": f"pass@{self.of.samples}",
            "heldout/reward_greedy": "reward_greedy",
            "heldout/reward_sampled": "reward_sampled",
        }
        return {metric.replace("@k", f"@{self.of.samples}"): means[name] for metric, name in shown.items() if name in means}

    @property
    def figures(self) -> dict[str, list[float]]:
        names = dict.fromkeys(name for problem in self.problems for name in problem.figures)
        return {name: [problem.figures[name] for problem in self.problems if name in problem.figures] for name in names}


def _load_set(config: RunConfig, tokenizer: Tokenizer, name: str) -> EvaluationSet:
    settings = config.evaluate.sets[name]
    inherited = ("template", "system_prompt", "chat_template", "special_tokens", "fields", "split")
    prompts = {field: getattr(settings, field) for field in inherited}
    if settings.sha256 is not None and (digest := file_digest(Path(settings.path))) != settings.sha256:
        raise ValueError(
            f"evaluate.sets.{name}.sha256 = {settings.sha256}, but {settings.path} has {digest}: it was changed; restore it, "
            "or give its own digest"
        )
    try:
        source = Source.read(
            config.data, config.data.complete(SourceConfig(path=settings.path, **prompts), filtered=False), tokenizer
        )
    except ValueError as error:
        raise ValueError(f"evaluate.sets.{name}: {error}") from error
    if settings.verifier is not None:
        resolve_verifier(settings.verifier)
    return _evaluation_set(config, tokenizer, name, settings, source.used, source.left_out.total())


def _evaluation_set(
    config: RunConfig,
    tokenizer: Tokenizer,
    name: str,
    settings: EvaluationSetConfig,
    problems: Sequence[Problem],
    left_out: int = 0,
) -> EvaluationSet:
    defaults, sampling, training = config.evaluate, settings.sampling, config.rollout.sampling
    samples = defaults.samples if settings.samples is None else settings.samples
    verifier = settings.verifier or config.reward.verifier
    inherited = defaults.correct if verifier == config.reward.verifier else None
    return EvaluationSet(
        name=name,
        problems=tuple(problems[: settings.problems]),
        prompts=tuple(encode_prompt(tokenizer, problem) for problem in problems[: settings.problems]),
        left_out=left_out,
        verifier=verifier,
        greedy=settings.greedy,
        samples=samples,
        ks=tuple(sorted((samples,) if settings.k is None else settings.k)) if samples else (),
        temperature=training.temperature if sampling.temperature is None else sampling.temperature,
        max_new_tokens=sampling.max_new_tokens or training.max_new_tokens,
        truncation={**truncation_of(training), **sampling.truncation},
        notion=_notion_of(settings.majority, verifier),
        correct_at=defaults.correct_at if settings.correct_at is None else settings.correct_at,
        show=defaults.show if settings.show is None else settings.show,
        correct=inherited if settings.correct is None else settings.correct,
    )


def _notion_of(majority: str, verifier: str) -> Notion | None:
    if majority == "auto" and verifier in ("python_tests", "stack_machine"):
        return None  # programs with equal results rarely have equal texts
    if majority == "auto":
        return "verifier" if verifier in ("exact", "last_word", "last_number", "math") else "text"
    return None if majority == "none" else "verifier" if majority == "verifier" else "text"


def _evaluate(of: EvaluationSet, generate: Generate, tokenizer: Tokenizer, pool: Scorer, seed: int) -> SetResult:
    def answer(n: int, temperature: float, truncation: Mapping[str, Any]) -> list[list[Scored]]:
        sampling = {"temperature": temperature, "max_new_tokens": of.max_new_tokens, "seed": seed, **truncation}
        return _score_groups(of, generate(list(of.prompts), n=n, **sampling), n, tokenizer, pool)

    greedy: list[Scored | None] = [None] * len(of.problems)
    if of.greedy:
        greedy = [group[0] for group in answer(1, 0.0, {})]
    sampled = answer(of.samples, of.temperature, of.truncation) if of.samples else [[] for _ in of.problems]
    tallies: Sequence[Tally | None] = [None] * len(of.problems)
    if of.notion is not None and of.samples:
        tallies = tally_answers(
            of.problems, sampled, verifier=of.verifier, notion=of.notion, pool=pool, is_correct=of.is_correct
        )
    results = [
        _ProblemResult(problem, one, several, _figures(of, one, several, tally))
        for problem, one, several, tally in zip(of.problems, greedy, sampled, tallies, strict=True)
    ]
    return SetResult(of, results)


def _score_groups(
    of: EvaluationSet, groups: Sequence[Sequence[Response]], n: int, tokenizer: Tokenizer, pool: Scorer
) -> list[list[Scored]]:
    if len(groups) != len(of.problems) or any(len(group) != n for group in groups):
        counts = sorted({len(group) for group in groups})
        raise RuntimeError(
            f"{n} responses to each of {len(of.problems)} prompts were asked for, the sampler returned {counts} to "
            f"{len(groups)}"
        )
    responses = [response for group in groups for response in group]
    texts = [
        ResponseText(tokenizer.decode(response.response_ids.tolist()), response.response_ids, response.finish_reason)
        for response in responses
    ]
    numbers = [number for number in range(len(of.problems)) for _ in range(n)]
    results = pool.score([(of.problems[number], text) for number, text in zip(numbers, texts, strict=True)], numbers)
    for result in results:
        if result.error is None and result.parts:  # a number, as of another verifier, and an episode without a rating have none
            RewardResult.check_component(of.correct_field, of.correct, result.parts)
    scored = [
        Scored(
            text,
            len(response.response_ids),
            response.finish_reason,
            result,
            of.is_correct(result),
            response.turns(tokenizer.decode),
            response.model_tokens,
        )
        for text, response, result in zip(texts, responses, results, strict=True)
    ]
    return [scored[index : index + n] for index in range(0, len(scored), n)]


def _figures(of: EvaluationSet, greedy: Scored | None, sampled: Sequence[Scored], tally: Tally | None) -> dict[str, float]:
    results: dict[str, float] = {}
    if greedy is not None:
        results["greedy"] = float(greedy.correct)
    if sampled:
        right = sum(response.correct for response in sampled)
        results[f"avg@{of.samples}"] = right / of.samples
        results |= {f"pass@{k}": pass_at_k(of.samples, right, k) for k in of.ks}
        if tally is not None:
            results |= {f"maj@{k}": maj_at_k(tally, of.samples, k) for k in of.ks if k > 1}
    alone = [] if greedy is None else [greedy]
    for name, responses in (("reward_greedy", alone), ("reward_sampled", sampled)):
        judged = [response.result.reward for response in responses if response.result.error is None]
        if rewards := [reward for reward in judged if reward is not None]:
            results[name] = fmean(rewards)
    responses = sampled or alone
    results["response_len"] = fmean(response.model_tokens for response in responses)
    results["truncated"] = fmean(response.finish_reason == "length" for response in responses)
    return results
