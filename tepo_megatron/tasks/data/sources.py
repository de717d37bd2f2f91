"""Reads, filters and orders a run's problems."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from hashlib import sha256
from typing import Any, Literal

from tepo_megatron.config.data import FILTERS, ORDERS, DataConfig, SourceConfig
from tepo_megatron.core.problem import Problem
from tepo_megatron.runtime.user_code import load_user_code
from tepo_megatron.tasks.data.problems import encode_prompt, load_problems
from tepo_megatron.tasks.data.tokenizer import Tokenizer

FILTER = "refused by the filter"
TOO_LONG = "longer than data.max_prompt_tokens"  # reasons; the filter's name follows FILTER


@dataclass(frozen=True)
class Prompt:
    """A filtered problem has 0 tokens."""

    problem: Problem
    tokens: int
    left_out: str | None = None


@dataclass(frozen=True)
class Source:
    """``name`` is empty for a plain path."""

    name: str
    path: str
    prompts: Sequence[Prompt]

    @property
    def used(self) -> list[Problem]:
        return [prompt.problem for prompt in self.prompts if prompt.left_out is None]

    @property
    def left_out(self) -> Counter[str]:
        return Counter(prompt.left_out for prompt in self.prompts if prompt.left_out is not None)

    @property
    def notices(self) -> list[str]:
        counts = self.left_out.most_common()
        return [f"{self.path}: {count} problem{'s'[: count > 1]} left out, {cause}" for cause, count in counts]


def read_sources(config: DataConfig, field: Literal["train", "heldout"], tokenizer: Tokenizer) -> list[Source]:
    """Encodes every prompt, to find errors early. Raises ValueError."""
    plain = isinstance(getattr(config, field), str)
    sources = []
    for source in config.train_sources if field == "train" else config.heldout_sources:
        sources.append(read_source(config, source, tokenizer, name="" if plain else source.called))
    _check_ids(sources)
    return sources


def read_source(config: DataConfig, source: SourceConfig, tokenizer: Tokenizer, *, name: str = "") -> Source:
    """``name`` becomes the problems' ``source``."""
    completed = Source(name, source.path, list(_prompts(config, source, name, tokenizer)))
    _check_some_are_left(config, completed)
    return completed


def _prompts(config: DataConfig, source: SourceConfig, name: str, tokenizer: Tokenizer) -> Iterator[Prompt]:
    filters, bound = load_filters(source.filter or ()), config.max_prompt_tokens
    for problem in load_problems(source):
        cause = _refused_by(filters, problem)
        if cause is not None:
            yield Prompt(replace(problem, source=name), 0, f"{FILTER} {cause}")
            continue
        tokens = len(encode_prompt(tokenizer, problem))
        too_long = bound is not None and tokens > bound
        yield Prompt(replace(problem, source=name), tokens, TOO_LONG if too_long else None)


def _check_some_are_left(config: DataConfig, source: Source) -> None:
    if source.used:
        return
    lengths = [prompt.tokens for prompt in source.prompts if prompt.left_out == TOO_LONG]
    if len(lengths) == len(source.prompts):
        raise ValueError(
            f"data.max_prompt_tokens = {config.max_prompt_tokens} leaves no problem of {source.path}: the shortest of "
            f"{len(lengths)} prompts has {min(lengths)} tokens; raise it"
        )
    causes = ", ".join(f"{count} {cause}" for cause, count in source.left_out.most_common())
    raise ValueError(f"none of the {len(source.prompts)} problems of {source.path} is left: {causes}; change data.filter")


def _check_ids(sources: Sequence[Source]) -> None:
    source_of: dict[str, Source] = {}
    for source in sources:
        for prompt in source.prompts:
            other = source_of.setdefault(prompt.problem.id, source)
            if other is not source:
                raise ValueError(
                    f"the id {prompt.problem.id!r} is in {other.path} and in {source.path}, and samples and rewards could not "
                    "be told apart; give the sources names (data.train[0].name and so on), which then begin their ids"
                )


Keeps = Callable[[Problem], Any]


def load_filters(names: Sequence[str]) -> dict[str, Keeps]:
    return {name.rpartition(":")[2]: _load_filter(name) for name in names}


def _refused_by(filters: Mapping[str, Keeps], problem: Problem) -> str | None:
    for name, keeps in filters.items():
        try:
            verdict = keeps(problem)
        except Exception as error:
            raise ValueError(
                f"the filter {name} (data.filter) raised {type(error).__name__} on problem {problem.id!r}: {error}"
            ) from error
        if not isinstance(verdict, bool):
            raise ValueError(
                f"the filter {name} (data.filter) returned {verdict!r} for problem {problem.id!r}; return True to keep it, or "
                "False"
            )
        if not verdict:
            return name
    return None


def _order_keys(name: str, problems: Sequence[Problem]) -> list[float] | None:
    """None: shuffled. Raises ValueError if the user's function fails."""
    if name == "shuffled":
        return None
    if name == "as_given":
        return [float(index) for index in range(len(problems))]
    if name == "shortest_first":
        return [float(len(problem.prompt)) for problem in problems]
    function = load_user_code(name, f"data.order: {name}")
    assert name not in ORDERS
    return [_key(function, name, problem) for problem in problems]


def _key(function: Callable[[Problem], Any], name: str, problem: Problem) -> float:
    try:
        key = float(function(problem))
    except Exception as error:
        raise ValueError(f"data.order = {name} raised {type(error).__name__} on problem {problem.id!r}: {error}") from error
    if not math.isfinite(key):
        raise ValueError(f"data.order = {name} returned {key} for problem {problem.id!r}; return a finite number")
    return key


def _load_filter(name: str) -> Keeps:
    if name not in FILTERS:
        result: Keeps = load_user_code(name, f"data.filter: {name}")
        return result
    return _Unique() if name == "unique" else _has_number


class _Unique:
    def __init__(self) -> None:
        self._seen: set[object] = set()

    def __call__(self, problem: Problem) -> bool:
        key = problem.messages or problem.prompt
        first = key not in self._seen
        self._seen.add(key)
        return first


def _has_number(problem: Problem) -> bool:
    return any(character.isdigit() for character in problem.answer)


def make_sampler(problems: Sequence[Problem], config: DataConfig, seed: int) -> ProblemOrder:
    if isinstance(config.train, str):
        return ProblemSampler(problems, seed, _order_keys(config.order, problems))
    samplers, weights = {}, {}
    for source in config.train_sources:
        own = [problem for problem in problems if problem.source == source.called]
        samplers[source.called] = ProblemSampler(own, _seed_of(source.called, seed), _order_keys(config.order, own))
        weights[source.called] = source.weight
    return MixedSampler(samplers, weights, seed)


class ProblemSampler:
    """Seed, epoch, number of problems and ``keys`` (ascending; ties are shuffled) determine the order: a small state restores
    it.
    """

    def __init__(self, problems: Sequence[Problem], seed: int, keys: Sequence[float] | None = None) -> None:
        if not problems:
            raise ValueError("a sampler needs at least one problem, and was given none")
        self._problems = tuple(problems)
        self._seed, self._keys = seed, keys
        self._digest = _digest(self._problems, keys)
        self._start_epoch(0)

    def next(self, n: int) -> list[Problem]:
        batch: list[Problem] = []
        while len(batch) < n:
            if self._position == len(self._problems):
                self._start_epoch(self._epoch + 1)
            chosen = self._order[self._position : self._position + n - len(batch)]
            batch.extend(self._problems[index] for index in chosen)
            self._position += len(chosen)
        return batch

    @property
    def drawn(self) -> int:
        return self._epoch * len(self._problems) + self._position

    def problem(self, number: int) -> Problem:
        """Does not change the state."""
        epoch, position = divmod(number, len(self._problems))
        order = self._order if epoch == self._epoch else self._order_of(epoch)
        return self._problems[order[position]]

    def state(self) -> dict[str, int | str]:
        return {"seed": self._seed, "epoch": self._epoch, "position": self._position, "problems": self._digest}

    def restore(self, state: Mapping[str, int | str]) -> None:
        """Raises ValueError if the seed or the problems differ."""
        if state["problems"] != self._digest:
            raise ValueError(
                "the training problems are not those of the checkpoint, so its data order cannot be continued; "
                "restore the data source, or start a new run from the checkpoint's weights"
            )
        if state["seed"] != self._seed:
            raise ValueError(f"the checkpoint's data order has seed {state['seed']}, this run has seed = {self._seed}; set it")
        self._start_epoch(int(state["epoch"]))
        self._position = int(state["position"])

    def seek(self, drawn: int) -> None:
        epoch, position = divmod(drawn, len(self._problems))
        self._start_epoch(epoch)
        self._position = position

    def _start_epoch(self, epoch: int) -> None:
        self._order = self._order_of(epoch)
        self._epoch = epoch
        self._position = 0

    def _order_of(self, epoch: int) -> list[int]:
        # Only string seeds and random() are stable across versions of Python.
        rng = random.Random(f"{self._seed}/{epoch}")
        shuffled = [rng.random() for _ in self._problems]
        keys = shuffled if self._keys is None else list(zip(self._keys, shuffled, strict=True))
        return sorted(range(len(keys)), key=keys.__getitem__)


class MixedSampler:
    """Quota method of Balinski and Young: after n draws, a source of share w has n·w of them, rounded up or down."""

    def __init__(self, samplers: Mapping[str, ProblemSampler], weights: Mapping[str, float], seed: int) -> None:
        self._samplers = list(samplers.values())
        self._weights = whole_weights(list(weights.values()))
        self._total = sum(self._weights)
        self._seed = seed
        described = [[name, weights[name], sampler.state()["problems"]] for name, sampler in samplers.items()]
        self._digest = sha256(repr(described).encode()).hexdigest()[:16]
        self._counts = [0] * len(self._samplers)

    def next(self, n: int) -> list[Problem]:
        return [self._samplers[self._advance(self._counts)].next(1)[0] for _ in range(n)]

    @property
    def drawn(self) -> int:
        return sum(self._counts)

    def problem(self, number: int) -> Problem:
        counts = self._counts_after(number)
        chosen = self._advance(counts)
        return self._samplers[chosen].problem(counts[chosen] - 1)

    def state(self) -> dict[str, int | str]:
        return {"seed": self._seed, "epoch": 0, "position": self.drawn, "problems": self._digest}

    def restore(self, state: Mapping[str, int | str]) -> None:
        if state["problems"] != self._digest:
            raise ValueError(
                "the sources of data.train (their problems, names, weights or order) are not those of the checkpoint, so its "
                "data order cannot be continued; restore them, or start a new run from the checkpoint's weights"
            )
        if state["seed"] != self._seed:
            raise ValueError(f"the checkpoint's data order has seed {state['seed']}, this run has seed = {self._seed}; set it")
        self._counts = self._counts_after(int(state["position"]))
        for sampler, count in zip(self._samplers, self._counts, strict=True):
            sampler.seek(count)

    def _counts_after(self, number: int) -> list[int]:
        rounds, rest = divmod(number, self._total)
        counts = [0] * len(self._weights)
        for _ in range(rest):
            self._advance(counts)
        return [rounds * weight + count for weight, count in zip(self._weights, counts, strict=True)]

    def _advance(self, counts: list[int]) -> int:
        drawn = sum(counts)
        # Of the sources below their share rounded up, take the one most below it (Jefferson's divisors).
        open_ = [index for index, count in enumerate(counts) if count * self._total < self._weights[index] * (drawn + 1)]
        chosen = max(open_, key=lambda at: (Fraction(self._weights[at], counts[at] + 1), -at))
        counts[chosen] += 1
        return chosen


ProblemOrder = ProblemSampler | MixedSampler


def whole_weights(weights: Sequence[float]) -> list[int]:
    """The smallest integers in the weights' ratio."""
    exact = [Fraction(repr(float(weight))) for weight in weights]
    scale = math.lcm(*(fraction.denominator for fraction in exact))
    whole = [int(fraction * scale) for fraction in exact]
    return [weight // math.gcd(*whole) for weight in whole]


def _seed_of(name: str, seed: int) -> int:
    """Sources of equal size need different orders."""
    return int.from_bytes(sha256(f"{seed}/{name}".encode()).digest()[:8])


def _digest(problems: Sequence[Problem], keys: Sequence[float] | None) -> str:
    digest = sha256()
    for problem in problems:
        # data.chat_template determines a prompt of one user message, as in states without messages.
        plain = not problem.source and problem.messages in ((), (("user", problem.prompt),))
        more = () if plain or not problem.messages else (problem.messages,)
        digest.update(repr((problem.id, problem.prompt, problem.answer, *more)).encode())
    if keys is not None:
        digest.update(repr([float(key) for key in keys]).encode())
    return digest.hexdigest()[:16]
