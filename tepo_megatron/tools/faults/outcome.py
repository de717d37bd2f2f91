"""What became of an injected fault, and the form that every class of faults has."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, ClassVar, Literal, Self

from tepo_megatron.tools.faults.workshop import Workshop

Result = Literal["survived", "refused", "lost"]


@dataclass(frozen=True)
class Outcome:
    """``survived``: the work went on, or was resumed, and nothing is missing. ``refused``: it stopped, or did not begin, with
    a sentence (``said``), and nothing is damaged. ``lost``: anything else; ``said`` is what. ``recovery_s``: seconds from the
    fault until the work went on, where that can be said. ``details``: figures for a table of the class' own.
    """

    fault: str
    result: Result
    said: str = ""
    recovery_s: float | None = None
    details: Mapping[str, Any] = field(default_factory=dict)


class FaultClass(ABC):
    """Faults of one kind, numbered from 0. A context manager: what several faults share (servers, a long run) lives in it.

    ``name`` is what ``--only`` takes; ``whole`` and ``quick`` say how many are injected; ``folder`` is the class' own; what
    classes share with each other is in the workshop.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    whole: ClassVar[int]
    quick: ClassVar[int]

    def __init__(self, workshop: Workshop) -> None:
        self.workshop = workshop
        self.folder = workshop.folder / self.name
        self.folder.mkdir(parents=True, exist_ok=True)

    @classmethod
    def count(cls, *, quick: bool) -> int:
        return cls.quick if quick else cls.whole

    @abstractmethod
    def inject(self, number: int, rng: random.Random) -> Outcome:
        """Inject fault ``number`` and wait until its end is known. All that is random comes from ``rng``."""

    def close(self) -> None:  # noqa: B027  # not every class has something to end
        """End what the faults shared."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def fault_rng(seed: int, name: str, number: int) -> random.Random:
    """The random numbers of one fault: the same in a rerun, whatever was injected before it."""
    return random.Random(f"{seed}/{name}/{number}")
