"""How ``tepo init`` asks: until the answer can be used, and never where an option has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import typer

T = TypeVar("T")


def ask(question: str, given: object, option: str, check: Callable[[str], T], *, default: str | None = None) -> T:
    """The checked value of an option, or of an answer, which is asked for until it can be used. Where nobody answers, the
    default; ValueError where there is none.
    """
    if given is not None:
        return check(str(given))
    while True:
        try:
            answer = typer.prompt(question, default=default)
        except typer.Abort:
            if default is None:
                raise ValueError(f"{option} is not given, and nobody answers; give it") from None
            return check(default)
        try:
            return check(answer)
        except ValueError as error:
            typer.echo(f"  {error}", err=True)
