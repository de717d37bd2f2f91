"""Problems of several sources in one order, each source with its share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from hashlib import sha256

from tepo_megatron.config.data import DataConfig
from tepo_megatron.core.types import Problem
from tepo_megatron.tasks.data.sampler import ProblemSampler
from tepo_megatron.tasks.data.select import order_keys


def make_sampler(problems: Sequence[Problem], config: DataConfig, seed: int) -> Sampler:
    """The order in which ``config.train``'s problems are drawn; ``problems``: all of them, each with its source's name."""
    if isinstance(config.train, str):
        return ProblemSampler(problems, seed, order_keys(config.order, problems))
    samplers, weights = {}, {}
    for source in config.train_sources:
        own = [problem for problem in problems if problem.source == source.called]
        samplers[source.called] = ProblemSampler(own, _seed_of(source.called, seed), order_keys(config.order, own))
        weights[source.called] = source.weight
    return MixedSampler(samplers, weights, seed)


class MixedSampler:
    """Draws from several samplers, by the quota method of Balinski and Young: after any n draws a source with the share w has
    given n·w of them, rounded down or up. So where ``prompts_per_step`` times each share is a whole number, every step has
    exactly its shares.

    Which source is next depends on the weights and on n alone. ``state`` is as small as a single sampler's, and the methods are
    the same.
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
        """Returns the next ``n`` problems."""
        return [self._samplers[self._advance(self._counts)].next(1)[0] for _ in range(n)]

    @property
    def drawn(self) -> int:
        """How many problems were drawn: the number of the next one."""
        return sum(self._counts)

    def problem(self, number: int) -> Problem:
        """The problem that is drawn, or was, as number ``number`` (from 0); nothing is drawn by it."""
        counts = self._counts_after(number)
        chosen = self._advance(counts)
        return self._samplers[chosen].problem(counts[chosen] - 1)

    def state(self) -> dict[str, int | str]:
        """Returns the state for a checkpoint as JSON values: how many were drawn decides the rest."""
        return {"seed": self._seed, "epoch": 0, "position": self.drawn, "problems": self._digest}

    def restore(self, state: Mapping[str, int | str]) -> None:
        """Continues exactly where the sampler that returned ``state`` was.

        Raises:
            ValueError: the state was taken with another seed, or other sources, weights or problems.
        """
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
        """How many each source has given after so many draws. The choices repeat after ``self._total`` of them."""
        rounds, rest = divmod(number, self._total)
        counts = [0] * len(self._weights)
        for _ in range(rest):
            self._advance(counts)
        return [rounds * weight + count for weight, count in zip(self._weights, counts, strict=True)]

    def _advance(self, counts: list[int]) -> int:
        """Counts one more draw; returns the source that gives it."""
        drawn = sum(counts)
        # Whoever would stay within its share rounded up; of these the one that is furthest behind (Jefferson's divisors).
        open_ = [at for at, count in enumerate(counts) if count * self._total < self._weights[at] * (drawn + 1)]
        chosen = max(open_, key=lambda at: (Fraction(self._weights[at], counts[at] + 1), -at))
        counts[chosen] += 1
        return chosen


Sampler = ProblemSampler | MixedSampler
"""The order in which a run's problems are drawn."""


def whole_weights(weights: Sequence[float]) -> list[int]:
    """The smallest whole numbers in the ratio of the weights, as they are written: 0.1 is a tenth."""
    exact = [Fraction(repr(float(weight))) for weight in weights]
    scale = math.lcm(*(each.denominator for each in exact))
    whole = [int(each * scale) for each in exact]
    return [each // math.gcd(*whole) for each in whole]


def _seed_of(name: str, seed: int) -> int:
    """A source's own seed, so that two of the same size are not shuffled alike."""
    return int.from_bytes(sha256(f"{seed}/{name}".encode()).digest()[:8])
