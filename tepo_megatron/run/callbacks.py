from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tepo_megatron.config import RunConfig
from tepo_megatron.run.metrics import value_in
from tepo_megatron.runtime.preemption import CONTINUE
from tepo_megatron.runtime.user_code import line_of, load_user_code, locate_user_code, unknown
from tepo_megatron.trainer.checkpoint_folder import checkpoint_name

if TYPE_CHECKING:
    from tepo_megatron.core.rollout import Rollout
    from tepo_megatron.tasks.evaluate.evaluation import EvaluationResult


class Callback:
    """Methods that a callback may have. Any object with some of these methods is a callback.

    Rank 0 calls them in its main thread and waits: do slow work in another thread. Do not change the values. Each method may
    raise ``Stop``. Any other error ends the run with an error, once the training so far is saved. After a rollback
    (``train.rollback``) steps are repeated.
    """

    def on_run_begin(self, run: RunInfo) -> None:
        """Called before the first step, also of a resumed run. Errors end the run at once; do not raise ``Stop`` here."""

    def on_rollouts(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """Called before the updates of ``step`` (from 1), with the rewards that it trains on."""

    def on_evaluation(self, step: int, result: EvaluationResult) -> None:
        """Called after the evaluation that follows ``step`` completed steps; 0: before the first."""

    def on_checkpoint(self, step: int, folder: Path) -> None:
        """Called when a checkpoint is complete; with ``train.async_save`` some steps later."""

    def on_step_end(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Called with the step's row of ``metrics.jsonl``. Step 0: the row before the first step."""

    def on_run_end(self, step: int) -> None:
        """Called after a successful run, with the model exported, but not after a failure or a signal."""


_HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))


@dataclass
class Callbacks:
    callbacks: Sequence[object]
    say: Callable[[str], None] = lambda text: None
    stopped: str | None = None  # the callback that asked the run to end, and why
    failure: RuntimeError | None = field(default=None, repr=False)  # raised by a callback; none is called afterwards

    @staticmethod
    def check(config: RunConfig) -> None:
        """Imports nothing. Raises ValueError."""
        for callback in config.train.callbacks:
            _locate(callback if isinstance(callback, str) else callback.callback)

    @classmethod
    def of(cls, config: RunConfig, objects: Sequence[object] = ()) -> Callbacks:
        """``objects``: instances, or classes without arguments. Raises ValueError if one cannot be imported or made,
        has no method of ``Callback``, or waits for a metric that no row has.
        """
        named = [(item, {}) if isinstance(item, str) else (item.callback, item.kwargs) for item in config.train.callbacks]
        made = [_make(name, kwargs) for name, kwargs in named]
        made += [thing() if inspect.isclass(thing) else thing for thing in objects]
        for callback in made:
            _check_hooks(callback)
            if isinstance(callback, EarlyStopping):
                _check_metric(callback, config)
        return cls(made)

    @property
    def go_on(self) -> bool:
        return self.stopped is None and self.failure is None

    def tell(self, hook: str, step: int, *arguments: Any) -> None:
        for callback in self.callbacks:
            method = getattr(callback, hook, None)
            if method is None or self.failure is not None:
                continue
            try:
                method(*arguments)
            except Stop as stop:
                reason = str(stop) or "it gave no reason"
                self.stopped = self.stopped or f"{_name_of(callback)} ended the run at step {step}: {reason}"
                self.say(self.stopped)
            except (Exception, SystemExit) as error:
                what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
                self.failure = RuntimeError(
                    f"the callback {_name_of(callback)} raised {what} in {hook} at step {step}{line_of(error, method)}"
                )
                self.failure.__cause__ = error

    def begin(self, run: RunInfo) -> None:
        self.tell("on_run_begin", run.step, run)
        if self.stopped is not None and not run.restarted:
            raise RuntimeError(f"{self.stopped}; Stop ends a run that has begun: raise it in another method")
        self.raise_failure(saved_step=run.step)

    def raise_failure(self, *, saved_step: int, complete: Path | None = None) -> None:
        """``complete``: a complete run's folder."""
        if self.failure is not None:
            if complete is not None:
                raise RuntimeError(f"{self.failure}; the run is complete in {complete}") from self.failure.__cause__
            saved = f"the newest checkpoint is {checkpoint_name(saved_step)}: {CONTINUE}"
            raise RuntimeError(f"{self.failure}; {saved if saved_step else 'nothing was trained'}") from self.failure.__cause__


def _name_of(callback: object) -> str:
    return type(callback).__qualname__


def _locate(name: str) -> str:
    if ":" in name:
        return locate_user_code(name, f"the callback {name!r}")
    if name not in _BUILT_IN:
        raise unknown("callback", name, _BUILT_IN, form="Class")
    return name


def _make(name: str, kwargs: Mapping[str, Any]) -> object:
    what = f"the callback {name!r}"
    loaded = _BUILT_IN.get(_locate(name)) or load_user_code(name, what)
    if not inspect.isclass(loaded):
        if kwargs:
            raise ValueError(f"{what} takes kwargs only where it is a class; leave them out")
        return loaded
    try:
        return loaded(**kwargs)
    except (Exception, SystemExit) as error:
        arguments = f"kwargs {', '.join(kwargs)}" if kwargs else "no kwargs"
        reason = f"{type(error).__name__}: {error}{line_of(error, loaded)}"
        raise ValueError(f"{what} cannot be made with {arguments}: {reason}") from error


def _check_hooks(callback: object) -> None:
    methods = [name for name in dir(callback) if name.startswith("on_") and callable(getattr(callback, name))]
    for name in methods:
        if name not in _HOOKS:
            near = get_close_matches(name, _HOOKS, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(_HOOKS)}"
            raise ValueError(f"the callback {_name_of(callback)} has a method {name}, which nothing calls{hint}")
        if inspect.iscoroutinefunction(getattr(callback, name)):
            raise ValueError(f"the callback {_name_of(callback)} has an async method {name}, and nothing awaits it; use def")
    if not methods:
        raise ValueError(f"{_name_of(callback)} is no callback: it has none of the methods {', '.join(_HOOKS)}")


def _check_metric(stopping: EarlyStopping, config: RunConfig) -> None:
    if fault := next(config.metric_faults("the metric of early stopping", stopping.metric), None):
        raise ValueError(fault)


class Stop(Exception):  # noqa: N818
    """Raised by a callback: the run ends after the current step, and shows the text as the reason. No evaluation is added."""


@dataclass(frozen=True)
class RunInfo:
    """``step``: completed. ``rows``: metrics so far, oldest first. ``restarted``: by itself, from its job's checkpoint."""

    config: RunConfig
    step: int
    rows: Sequence[Mapping[str, Any]]
    restarted: bool = False


class EarlyStopping:
    """Ends the run when ``metric`` has not improved on its best by more than ``min_delta`` for ``patience`` rows.

    Only rows with the metric count: ``accuracy/greedy`` is in rows of evaluations. A resumed run continues the count.
    """

    def __init__(
        self, metric: str = "accuracy/greedy", patience: int = 5, mode: Literal["max", "min"] = "max", min_delta: float = 0.0
    ) -> None:
        if patience < 1 or mode not in ("max", "min") or not 0 <= min_delta < math.inf:
            raise ValueError(
                f"patience = {patience} must be 1 or more, mode = {mode!r} max or min, min_delta = {min_delta:g} 0 or more"
            )
        self.metric, self.patience, self.mode, self.min_delta = metric, patience, mode, min_delta
        self._seen: list[tuple[int, float, int, int]] = []  # step, and best (the largest), best_step and waited after it
        self.best, self.best_step, self.waited = -math.inf, 0, 0

    def on_run_begin(self, run: RunInfo) -> None:
        _check_metric(self, run.config)
        self._seen = []
        for row in run.rows:
            self._see(row["step"], row)
        if run.restarted and self._seen and self._seen[-1][0] == run.step:  # the ranks may have been lost after the stop
            self._stop_if_due()

    def on_step_end(self, step: int, metrics: Mapping[str, Any]) -> None:
        if self._see(step, metrics):
            self._stop_if_due()

    def _stop_if_due(self) -> None:
        if self.waited >= self.patience:
            best = self.best if self.mode == "max" else -self.best
            raise Stop(f"{self.metric} was {best:.4g} at step {self.best_step}, and not better since")

    def _see(self, step: int, row: Mapping[str, Any]) -> bool:
        value = value_in(row, self.metric)
        if value is None or math.isnan(value):
            return False
        while self._seen and self._seen[-1][0] >= step:  # train.rollback undid them
            self._seen.pop()
        _, best, best_step, waited = self._seen[-1] if self._seen else (0, -math.inf, 0, 0)
        level = value if self.mode == "max" else -value
        improved = level > best + self.min_delta
        self.best, self.best_step, self.waited = (level, step, 0) if improved else (best, best_step, waited + 1)
        self._seen.append((step, self.best, self.best_step, self.waited))
        return True


_BUILT_IN: Mapping[str, type] = {"early_stopping": EarlyStopping}


@dataclass(frozen=True)
class Extensions:
    """Rank 0's objects, besides the config's. Others cannot import ``reward`` and ``collect``."""

    callbacks: Sequence[object] = ()
    reward: Any = None
    collect: Any = None


NO_EXTENSIONS = Extensions()
