"""The worker process of ``RewardPool``, which imports no torch (``runtime.worker_child``).

A call is ``[number, problem, responses]``, as their ``to_json``. An answer is a list of outcomes: ``[reward or components,
null]`` or ``[null, error]``.
"""

import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, SupportsFloat

from tepo_megatron.core.problem import Problem, ResponseText, reward_fault
from tepo_megatron.runtime.worker_child import WorkerLimits, place_of, serve, time_limit
from tepo_megatron.tasks.reward.verifiers import load_verifier

Value = float | dict[str, float]
ScoreOutcome = tuple[Value | None, str | None]  # the value, or the reason for its absence


def serve_verifier(custom: Any = None) -> None:
    """``custom`` is the verifier as an object, in a fork."""
    serve(lambda setup: _Verifier(setup, custom), "verifier")


class _Verifier:
    busy = worn = False

    def __init__(self, setup: Mapping[str, Any], custom: Any) -> None:
        self._limits = WorkerLimits.of("verifier", "reward", setup)
        self._function, self._of_groups = _scoring(setup, self._limits, custom)
        self.concurrent = inspect.iscoroutinefunction(self._function)
        self.facts = {"of_groups": self._of_groups}

    async def answer(self, problem: list[Any], responses: Sequence[list[Any]]) -> list[ScoreOutcome]:
        texts = [ResponseText.from_json(*response) for response in responses]
        score = partial(self._function, Problem.from_json(*problem), texts if self._of_groups else texts[0])
        limit = None
        try:
            if not self.concurrent:
                return self._check(score(), len(texts))
            async with time_limit(self._limits.timeout_s) as limit:
                return self._check(await score(), len(texts))
        # SystemExit too: a verifier that calls sys.exit() must not end the worker.
        except BaseException as error:
            late = isinstance(error, TimeoutError) and limit is not None and limit.expired()
            why = self._limits.took_too_long() if late else self._limits.raised(error, self._function)
            if isinstance(error, TypeError) and error.__traceback__ is not None and error.__traceback__.tb_next is None:
                why += f"; a reward takes (problem, {'responses' if self._of_groups else 'response'})"  # the call itself failed
            return [(None, why)] * len(texts)

    def run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Runs without an event loop, since a verifier may have its own."""
        with suppress(StopIteration):
            coroutine.send(None)

    def _check(self, value: Any, count: int) -> list[ScoreOutcome]:
        if not self._of_groups:
            return [self._placed(check_value(value))]
        if isinstance(value, str | Mapping) or not hasattr(value, "__len__") or not hasattr(value, "__iter__"):
            return [(None, f"the verifier's score_group returned {type(value).__name__}, not a list of rewards")] * count
        if len(value) != count:
            what = f"{len(value)} rewards for a group of {count} responses"
            return [self._placed((None, f"the verifier's score_group returned {what}"))] * count
        return [self._placed(check_value(item)) for item in value]

    def _placed(self, outcome: ScoreOutcome) -> ScoreOutcome:
        value, why = outcome
        return outcome if why is None else (value, f"{why}{place_of(self._function)}")


def _scoring(setup: Mapping[str, Any], limits: WorkerLimits, custom: Any) -> tuple[Callable[..., Any], bool]:
    name, kwargs = setup["verifier"], setup["kwargs"]
    verifier = load_verifier(name) if custom is None else custom
    if getattr(verifier, "runs_code", False) and not setup["run_code"]:
        raise ValueError(
            f"the verifier {name!r} runs programs that the model writes; set reward.run_code = true if you mean it"
        )
    if inspect.isclass(verifier):
        try:
            verifier = verifier(**kwargs)
        except (Exception, SystemExit) as error:
            why = limits.raised(error, verifier.__init__).removeprefix("the verifier ")
            arguments = f"kwargs {', '.join(kwargs)}" if kwargs else "no kwargs"  # values may be private
            raise ValueError(f"the verifier {name!r} cannot be made with {arguments}: it {why}") from error
    elif kwargs:
        raise ValueError(f"the verifier {name!r} is no class, and takes no kwargs ({', '.join(kwargs)}); leave them out")
    if hasattr(verifier, "score_group"):
        return verifier.score_group, True
    if hasattr(verifier, "score"):
        return verifier.score, False
    if not callable(verifier) or inspect.isclass(verifier):
        several = "; give one function that returns {name: value}, and reward.weights weighs them"
        raise ValueError(
            f"the verifier {name!r} has neither a method score nor score_group, and cannot be called itself"
            f"{several if isinstance(verifier, list | tuple) else ''}"
        )
    if not hasattr(verifier, "__code__") and inspect.iscoroutinefunction(getattr(verifier, "__call__", None)):  # noqa: B004
        verifier = verifier.__call__
    return verifier, getattr(verifier, "__name__", "") == "score_group"


def check_value(value: Any, *, what: str = "verifier") -> ScoreOutcome:
    if not isinstance(value, Mapping):
        number, fault = _number(value)
        return number, fault and f"the {what} returned {fault}"
    if not value:
        return None, f"the {what} returned no component"
    parts: dict[str, float] = {}
    for name, component in value.items():
        number, fault = _number(component)
        if number is None:
            return None, f"the {what} returned for its component {str(name)[:60]!r} {fault}"
        parts[str(name)] = number
    return parts, None


def _number(value: Any) -> tuple[float | None, str | None]:
    if not isinstance(value, SupportsFloat):
        return None, f"{type(value).__name__}, not a number"
    try:
        number = float(value)
    except Exception as error:  # here, so that it fails one response of a group
        return None, f"{type(value).__name__}, whose number cannot be taken ({type(error).__name__})"
    fault = reward_fault(number)
    return (None if fault else number), fault


if __name__ == "__main__":
    serve_verifier()
