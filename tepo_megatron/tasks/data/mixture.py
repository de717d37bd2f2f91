"""The order in which problems are drawn."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from fractions import Fraction
from hashlib import sha256

from tepo_megatron.config.data import DataConfig
from tepo_megatron.core.problem import Problem
from tepo_megatron.tasks.data.sources import order_keys


def make_sampler(problems: Sequence[Problem], config: DataConfig, seed: int) -> ProblemOrder:
    if isinstance(config.train, str):
        return ProblemSampler(problems, seed, order_keys(config.order, problems))
    samplers, weights = {}, {}
    for source in config.train_sources:
        own = [problem for problem in problems if problem.source == source.called]
        samplers[source.called] = ProblemSampler(own, _seed_of(source.called, seed), order_keys(config.order, own))
        weights[source.called] = source.weight
    return MixedSampler(samplers, weights, seed)


class ProblemSampler:
    """The order depends only on the seed, the epoch, the number of problems and ``keys``: a small state restores it exactly.
    Problems with smaller keys come first; equal keys are shuffled. Raises ValueError without problems.
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
        """Counts from 0; the state does not change."""
        epoch, position = divmod(number, len(self._problems))
        order = self._order if epoch == self._epoch else self._order_of(epoch)
        return self._problems[order[position]]

    def state(self) -> dict[str, int | str]:
        return {"seed": self._seed, "epoch": self._epoch, "position": self._position, "problems": self._digest}

    def restore(self, state: Mapping[str, int | str]) -> None:
        """Continues from a :meth:`state`. Raises ValueError if the seed or the problems differ."""
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
        # Python only guarantees that seeding by a string and random() stay the same between versions.
        rng = random.Random(f"{self._seed}/{epoch}")
        shuffled = [rng.random() for _ in self._problems]
        keys = shuffled if self._keys is None else list(zip(self._keys, shuffled, strict=True))
        return sorted(range(len(keys)), key=keys.__getitem__)


class MixedSampler:
    """The quota method of Balinski and Young: after n draws a source with share w has been drawn n·w times, rounded down or
    up.
    """

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
        """The number of draws determines the rest."""
        return {"seed": self._seed, "epoch": 0, "position": self.drawn, "problems": self._digest}

    def restore(self, state: Mapping[str, int | str]) -> None:
        """As ``ProblemSampler.restore``."""
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
        """The choices have period ``self._total``."""
        rounds, rest = divmod(number, self._total)
        counts = [0] * len(self._weights)
        for _ in range(rest):
            self._advance(counts)
        return [rounds * weight + count for weight, count in zip(self._weights, counts, strict=True)]

    def _advance(self, counts: list[int]) -> int:
        drawn = sum(counts)
        # Of the sources that stay within their share rounded up, take the one most below it (Jefferson's divisors).
        open_ = [index for index, count in enumerate(counts) if count * self._total < self._weights[index] * (drawn + 1)]
        chosen = max(open_, key=lambda at: (Fraction(self._weights[at], counts[at] + 1), -at))
        counts[chosen] += 1
        return chosen


ProblemOrder = ProblemSampler | MixedSampler


def whole_weights(weights: Sequence[float]) -> list[int]:
    """The smallest integers in the ratio of the weights, whose decimal notation is exact: 0.1 is a tenth."""
    exact = [Fraction(repr(float(weight))) for weight in weights]
    scale = math.lcm(*(fraction.denominator for fraction in exact))
    whole = [int(fraction * scale) for fraction in exact]
    return [weight // math.gcd(*whole) for weight in whole]


def _seed_of(name: str, seed: int) -> int:
    """Two sources of equal size must not be shuffled equally."""
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
