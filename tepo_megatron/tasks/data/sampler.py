"""The order in which the problems of one source are trained on."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from hashlib import sha256

from tepo_megatron.core.types import Problem


class ProblemSampler:
    """Draws problems in shuffled epochs: each problem once in an epoch, every epoch in an order of its own.

    The order depends on the seed, the epoch, the number of problems and ``keys`` alone, so ``state`` is small and restores
    exactly. ``keys``: a number for each problem; those with smaller ones come first, and equal ones are shuffled.

    Raises:
        ValueError: there is no problem.
    """

    def __init__(self, problems: Sequence[Problem], seed: int, keys: Sequence[float] | None = None) -> None:
        if not problems:
            raise ValueError("a sampler needs at least one problem, and was given none")
        self._problems = tuple(problems)
        self._seed, self._keys = seed, keys
        self._digest = _digest(self._problems, keys)
        self._start_epoch(0)

    def next(self, n: int) -> list[Problem]:
        """Returns the next ``n`` problems; at the end of an epoch the next one begins."""
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
        """How many problems were drawn since the start of the first epoch: the number of the next one."""
        return self._epoch * len(self._problems) + self._position

    def problem(self, number: int) -> Problem:
        """The problem that is drawn, or was, as number ``number`` (from 0); nothing is drawn by it."""
        epoch, position = divmod(number, len(self._problems))
        order = self._order if epoch == self._epoch else self._order_of(epoch)
        return self._problems[order[position]]

    def state(self) -> dict[str, int | str]:
        """Returns the state for a checkpoint as JSON values: the epoch, from 0, and how many of its problems were drawn."""
        return {"seed": self._seed, "epoch": self._epoch, "position": self._position, "problems": self._digest}

    def restore(self, state: Mapping[str, int | str]) -> None:
        """Continues exactly where the sampler that returned ``state`` was.

        Raises:
            ValueError: the state was taken with another seed or other problems.
        """
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
        """Goes on as if so many problems had been drawn."""
        epoch, position = divmod(drawn, len(self._problems))
        self._start_epoch(epoch)
        self._position = position

    def _start_epoch(self, epoch: int) -> None:
        self._order = self._order_of(epoch)
        self._epoch = epoch
        self._position = 0

    def _order_of(self, epoch: int) -> list[int]:
        # Only seeding by a string and random() are promised to stay the same between versions of Python.
        rng = random.Random(f"{self._seed}/{epoch}")
        shuffled = [rng.random() for _ in self._problems]
        keys = shuffled if self._keys is None else list(zip(self._keys, shuffled, strict=True))
        return sorted(range(len(keys)), key=keys.__getitem__)


def _digest(problems: Sequence[Problem], keys: Sequence[float] | None) -> str:
    digest = sha256()
    for problem in problems:
        # A prompt that is one user message is told by data.chat_template, and was so before there were messages.
        plain = not problem.source and problem.messages in ((), (("user", problem.prompt),))
        more = () if plain or not problem.messages else (problem.messages,)
        digest.update(repr((problem.id, problem.prompt, problem.answer, *more)).encode())
    if keys is not None:
        digest.update(repr([float(key) for key in keys]).encode())
    return digest.hexdigest()[:16]
