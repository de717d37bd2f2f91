"""Checks of several commands: one stops at the first problem, another reports all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

Subject = TypeVar("Subject")


@dataclass(frozen=True)
class NamedCheck(Generic[Subject]):
    """``needs`` names requirements, such as "model"."""

    name: str
    verify: Callable[[Subject], object]
    """Raises ValueError with a sentence for the user."""
    needs: frozenset[str] = frozenset()
    applies: Callable[[Subject], bool] = lambda _: True

    def problem(self, subject: Subject) -> str | None:
        try:
            self.verify(subject)
        except ValueError as error:
            return str(error)
        return None

    @staticmethod
    def verify_all(checks: Iterable[NamedCheck[Subject]], subject: Subject) -> None:
        for check in checks:
            if check.applies(subject):
                check.verify(subject)
