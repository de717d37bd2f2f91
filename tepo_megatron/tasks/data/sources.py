from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from hashlib import sha256
from typing import Any, Literal

from tepo_megatron.config.data import DataConfig, SourceConfig
from tepo_megatron.core.problem import Problem
from tepo_megatron.runtime.user_code import line_of, load_user_code, plain
from tepo_megatron.tasks.data.problems import encode_prompt, load_problems
from tepo_megatron.tasks.data.tokenizer import Tokenizer

FILTER = "refused by the filter"
TOO_LONG = "longer than data.max_prompt_tokens"  # reasons; the filter's name follows FILTER


@dataclass(frozen=True)
class _Prompt:
    """A filtered problem has 0 tokens."""

    problem: Problem
    tokens: int
    left_out: str | None = None


@dataclass(frozen=True)
class Source:
    """``name`` is empty for a plain path."""

    name: str
    path: str
    prompts: Sequence[_Prompt]

    @property
    def used(self) -> list[Problem]:
        return [prompt.problem for prompt in self.prompts if prompt.left_out is None]

    @property
    def sizes(self) -> list[tuple[int, str]]:
        """Returns (tokens, id) per prompt."""
        return [(prompt.tokens, prompt.problem.id) for prompt in self.prompts if prompt.left_out is None]

    @property
    def left_out(self) -> Counter[str]:
        return Counter(prompt.left_out for prompt in self.prompts if prompt.left_out is not None)

    @property
    def notices(self) -> list[str]:
        counts = self.left_out.most_common()
        return [f"{self.path}: {count} problem{'s'[: count > 1]} left out, {cause}" for cause, count in counts]

    @classmethod
    def read_all(cls, config: DataConfig, field: Literal["train", "heldout"], tokenizer: Tokenizer) -> list[Source]:
        """Encodes every prompt, to find errors early. Raises ValueError."""
        plain = isinstance(getattr(config, field), str)
        sources = [
            cls.read(config, source, tokenizer, name="" if plain else source.called)
            for source in (config.train_sources if field == "train" else config.heldout_sources)
        ]
        _check_ids(sources)
        return sources

    @classmethod
    def read(cls, config: DataConfig, source: SourceConfig, tokenizer: Tokenizer, *, name: str = "") -> Source:
        """``name`` becomes the problems' ``source``."""
        filters, bound = _load_filters(source.filter or ()), config.max_prompt_tokens
        prompts = []
        for problem in load_problems(source):
            cause = next((f"{FILTER} {called}" for called, keeps in filters.items() if not keeps(problem)), None)
            tokens = len(encode_prompt(tokenizer, problem)) if cause is None else 0
            if bound is not None and tokens > bound:
                cause = TOO_LONG
            prompts.append(_Prompt(replace(problem, source=name), tokens, cause))
        completed = cls(name, source.path, prompts)
        if completed.left_out.get(TOO_LONG) == len(prompts):
            raise ValueError(
                f"data.max_prompt_tokens = {bound} leaves no problem of {source.path}: the shortest of {len(prompts)} prompts "
                f"has {min(prompt.tokens for prompt in prompts)} tokens; raise it"
            )
        if not completed.used:
            causes = ", ".join(f"{count} {cause}" for cause, count in completed.left_out.most_common())
            raise ValueError(f"none of the {len(prompts)} problems of {source.path} is left: {causes}; change data.filter")
        return completed


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


_OfProblem = Callable[[Problem], Any]


def _load_filters(names: Sequence[str]) -> dict[str, _OfProblem]:
    seen: set[object] = set()

    def unique(problem: Problem) -> bool:
        known = len(seen)
        seen.add(problem.messages or problem.prompt)
        return len(seen) > known

    builtin = {"unique": unique, "number": lambda problem: any(character.isdigit() for character in problem.answer)}
    return {name.rpartition(":")[2]: builtin.get(name) or _load_filter(name) for name in names}


def _load_filter(name: str) -> _OfProblem:
    keeps, what = load_user_code(name, f"data.filter: {name}"), f"the filter {name.rpartition(':')[2]} (data.filter)"

    def checked(problem: Problem) -> bool:
        verdict = _call(keeps, what, problem)
        if not isinstance(verdict, bool):
            raise ValueError(f"{what} returned {verdict!r} for problem {problem.id!r}; return True to keep it, or False")
        return verdict

    return checked


def _call(function: _OfProblem, what: str, problem: Problem) -> Any:
    try:
        return plain(function(problem))
    except (Exception, SystemExit) as error:
        place = line_of(error, function)
        raise ValueError(f"{what} raised {type(error).__name__} on problem {problem.id!r}: {error}{place}") from error


def _order_keys(name: str, problems: Sequence[Problem]) -> list[float] | None:
    """None: shuffled. Raises ValueError if the user's function fails."""
    if name == "shuffled":
        return None
    if name == "as_given":
        return [float(index) for index in range(len(problems))]
    if name == "shortest_first":
        return [float(len(problem.prompt)) for problem in problems]
    function = load_user_code(name, f"data.order: {name}")
    keys = [_call(lambda item: float(function(item)), f"data.order = {name}", problem) for problem in problems]
    for problem, key in zip(problems, keys, strict=True):
        if not math.isfinite(key):
            raise ValueError(f"data.order = {name} returned {key} for problem {problem.id!r}; return a finite number")
    return keys


class ProblemSampler:
    """Problems, ``keys`` (ascending; ties are shuffled), seed and the number of draws determine the order."""

    _what = "training problems are"
    _remedy = "restore the data source"

    @classmethod
    def of(cls, problems: Sequence[Problem], config: DataConfig, seed: int) -> ProblemSampler:
        if isinstance(config.train, str):
            return cls(problems, seed, _order_keys(config.order, problems))
        samplers = {}
        for source in config.train_sources:
            own = [problem for problem in problems if problem.source == source.called]
            # Sources of equal size need different orders.
            own_seed = int.from_bytes(sha256(f"{seed}/{source.called}".encode()).digest()[:8])
            samplers[source.called] = cls(own, own_seed, _order_keys(config.order, own))
        return _MixedSampler(samplers, {source.called: source.weight for source in config.train_sources}, seed)

    def __init__(self, problems: Sequence[Problem], seed: int, keys: Sequence[float] | None = None) -> None:
        if not problems:
            raise ValueError("a sampler needs at least one problem, and was given none")
        self._problems, self._keys = tuple(problems), keys
        self._seed, self._digest = seed, _digest(self._problems, keys)
        self._order_of = lru_cache(maxsize=2)(self._sorted)
        self.drawn = 0

    def next(self, n: int) -> list[Problem]:
        self.drawn += n
        return [self.problem(number) for number in range(self.drawn - n, self.drawn)]

    def problem(self, number: int) -> Problem:
        """Does not change the state."""
        epoch, position = divmod(number, len(self._problems))
        return self._problems[self._order_of(epoch)[position]]

    def state(self) -> dict[str, int | str]:
        epoch, position = divmod(self.drawn, len(self._problems))
        return {"seed": self._seed, "epoch": epoch, "position": position, "problems": self._digest}

    def restore(self, state: Mapping[str, int | str]) -> None:
        """Raises ValueError if the seed or the problems differ."""
        if state["problems"] != self._digest:
            raise ValueError(
                f"the {self._what} not those of the checkpoint, so its data order cannot be continued; {self._remedy}, or "
                "have the problems drawn from the beginning: train.allow_change=[data.train]"
            )
        if state["seed"] != self._seed:
            raise ValueError(f"the checkpoint's data order has seed {state['seed']}, this run has seed = {self._seed}; set it")
        self.drawn = int(state["epoch"]) * len(self._problems) + int(state["position"])

    def _sorted(self, epoch: int) -> list[int]:
        # Only string seeds and random() are stable across versions of Python.
        rng = random.Random(f"{self._seed}/{epoch}")
        shuffled = [rng.random() for _ in self._problems]
        keys = shuffled if self._keys is None else list(zip(self._keys, shuffled, strict=True))
        return sorted(range(len(keys)), key=keys.__getitem__)


class _MixedSampler(ProblemSampler):
    """Quota method of Balinski and Young: n draws have n·w of a source of share w, rounded up or down."""

    _what = "sources of data.train (their problems, names, weights or order) are"
    _remedy = "restore them"

    def __init__(self, samplers: Mapping[str, ProblemSampler], weights: Mapping[str, float], seed: int) -> None:
        super().__init__([problem for sampler in samplers.values() for problem in sampler._problems], seed)
        self._samplers = list(samplers.values())
        exact = [Fraction(repr(float(weight))) for weight in weights.values()]
        scale = math.lcm(*(fraction.denominator for fraction in exact))
        whole = [int(fraction * scale) for fraction in exact]
        self._weights = [weight // math.gcd(*whole) for weight in whole]
        described = [[name, weights[name], sampler._digest] for name, sampler in samplers.items()]
        self._digest = sha256(repr(described).encode()).hexdigest()[:16]
        self._counts = [0] * len(self._samplers)  # draws of each source, of the order's first sum(_counts)

    def problem(self, number: int) -> Problem:
        rounds, rest = divmod(number, sum(self._weights))
        ahead = number - sum(self._counts)
        if not 0 <= ahead <= rest:  # nearer from the beginning of its round, where every source has its exact share
            self._counts, ahead = [rounds * weight for weight in self._weights], rest
        for _ in range(ahead):
            self._advance()
        chosen = self._advance()
        return self._samplers[chosen].problem(self._counts[chosen] - 1)

    def state(self) -> dict[str, int | str]:
        return {"seed": self._seed, "epoch": 0, "position": self.drawn, "problems": self._digest}

    def _advance(self) -> int:
        total, counts = sum(self._weights), self._counts
        drawn = sum(counts)
        # Of the sources below their share rounded up, take the one most below it (Jefferson's divisors).
        below = [index for index, count in enumerate(counts) if count * total < self._weights[index] * (drawn + 1)]
        chosen = max(below, key=lambda index: (Fraction(self._weights[index], counts[index] + 1), -index))
        counts[chosen] += 1
        return chosen


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
