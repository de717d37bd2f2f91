"""How a verifier is called, whatever its form, and what it may return. Runs in the worker processes.

A verifier is a function ``(problem, response)``; or a function ``score_group(problem, responses)``; or a class with a method
``score`` or ``score_group`` of that form, which is made once a worker. Each may be ``async``. It returns a reward for the
response (a list of them for a group): a number, or components by name.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsFloat

from tepo_megatron.core.problem import Problem, ResponseText
from tepo_megatron.runtime.workers.failure import place_of, why_it_raised
from tepo_megatron.tasks.reward.verifiers import load_verifier

Value = float | dict[str, float]
Outcome = tuple[Value | None, str | None]
"""What one response got: its reward or components, or why it has none."""


@dataclass(frozen=True)
class Verifier:
    """A verifier that is ready to be called. ``setup``: the limits that it runs under, by their names in ``reward``."""

    function: Callable[..., Any]
    of_groups: bool
    setup: Mapping[str, Any]

    @property
    def concurrent(self) -> bool:
        """Whether several calls may be under way at once."""
        return inspect.iscoroutinefunction(self.function)

    def score(self, problem: Problem, responses: Sequence[ResponseText]) -> list[Outcome]:
        """One outcome for each response; nothing that the verifier does raises here."""
        try:
            return self._check(self.function(problem, self._argument(responses)), len(responses))
        # SystemExit too: a verifier that calls sys.exit() must not end the worker.
        except BaseException as error:
            return self._failed(why_it_raised(error, self.function, self.setup), len(responses))

    async def score_concurrently(self, problem: Problem, responses: Sequence[ResponseText]) -> list[Outcome]:
        """As ``score``, of an ``async`` verifier, within its limit of time."""
        timeout_s = self.setup["timeout_s"]
        try:
            async with asyncio.timeout(timeout_s) as limit:
                value = await self.function(problem, self._argument(responses))
            return self._check(value, len(responses))
        except BaseException as error:
            late = isinstance(error, TimeoutError) and limit.expired()
            why = took_too_long(timeout_s) if late else why_it_raised(error, self.function, self.setup)
            return self._failed(why, len(responses))

    def _argument(self, responses: Sequence[ResponseText]) -> Any:
        return list(responses) if self.of_groups else responses[0]

    def _failed(self, why: str, count: int) -> list[Outcome]:
        return [(None, why)] * count

    def _check(self, value: Any, count: int) -> list[Outcome]:
        if not self.of_groups:
            return [self._placed(check_value(value))]
        if isinstance(value, str | Mapping) or not hasattr(value, "__len__") or not hasattr(value, "__iter__"):
            return self._failed(f"the verifier's score_group returned {type(value).__name__}, not a list of rewards", count)
        if len(value) != count:
            what = f"{len(value)} rewards for a group of {count} responses"
            return self._failed(f"the verifier's score_group returned {what}{place_of(self.function)}", count)
        return [self._placed(check_value(each)) for each in value]

    def _placed(self, outcome: Outcome) -> Outcome:
        value, why = outcome
        return outcome if why is None else (value, f"{why}{place_of(self.function)}")


def make_verifier(name: str, kwargs: Mapping[str, Any], setup: Mapping[str, Any], given: Any = None) -> Verifier:
    """Imports a verifier, unless it is ``given``, and makes it, where it is a class.

    Raises:
        ValueError: it cannot be imported or made, with the line of its own file; it has no form that can be called; or it runs
            what a model writes without ``run_code``.
    """
    found = load_verifier(name) if given is None else given
    if getattr(found, "runs_code", False) and not setup["run_code"]:
        raise ValueError(
            f"the verifier {name!r} runs programs that the model writes; set reward.run_code = true if you mean it"
        )
    if inspect.isclass(found):
        try:
            found = found(**kwargs)
        except Exception as error:
            why = why_it_raised(error, found.__init__, setup).removeprefix("the verifier ")
            given = f"reward.kwargs {', '.join(kwargs)}" if kwargs else "no reward.kwargs"  # values may be private
            raise ValueError(f"the verifier {name!r} cannot be made with {given}: it {why}") from error
    elif kwargs:
        raise ValueError(f"reward.kwargs is for a verifier that is a class, and {name!r} is none; leave it out")
    if hasattr(found, "score_group"):
        return Verifier(found.score_group, of_groups=True, setup=setup)
    if hasattr(found, "score"):
        return Verifier(found.score, of_groups=False, setup=setup)
    if not callable(found) or inspect.isclass(found):
        raise ValueError(f"the verifier {name!r} has neither a method score nor score_group, and cannot be called itself")
    if not hasattr(found, "__code__") and inspect.iscoroutinefunction(getattr(found, "__call__", None)):  # noqa: B004
        found = found.__call__
    return Verifier(found, of_groups=getattr(found, "__name__", "") == "score_group", setup=setup)


def took_too_long(timeout_s: float) -> str:
    """The sentence for a limit of time."""
    return f"the verifier took longer than reward.timeout_s = {timeout_s:g} s"


def check_value(value: Any, *, what: str = "verifier") -> Outcome:
    """What a verifier returned for one response, as a number or numbers by name; or why it is neither. ``what`` returned it."""
    if not isinstance(value, Mapping):
        number, fault = _number(value)
        return number, fault and f"the {what} returned {fault}"
    if not value:
        return None, f"the {what} returned no component"
    parts: dict[str, float] = {}
    for name, given in value.items():
        number, fault = _number(given)
        if number is None:
            return None, f"the {what} returned for its component {str(name)[:60]!r} {fault}"
        parts[str(name)] = number
    return parts, None


def _number(value: Any) -> tuple[float | None, str | None]:
    if not isinstance(value, SupportsFloat):
        return None, f"{type(value).__name__}, not a number"
    number = float(value)
    return (number, None) if math.isfinite(number) else (None, f"{number}, not a finite number")
