"""The user's own code beside a run: it is told of rollouts, evaluations, checkpoints and rows of metrics, and may end the run.

Rank 0 only, in its main thread. What a callback raises ends the run in an orderly way: what was trained is saved first.
"""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tepo_megatron.config import RunConfig
from tepo_megatron.config.train import CallbackConfig
from tepo_megatron.runtime.user_code import load_user_code, locate_user_code
from tepo_megatron.trainer.checkpoints.folder import checkpoint_name

if TYPE_CHECKING:
    from tepo_megatron.core.rollout import Rollout
    from tepo_megatron.tasks.evaluate.evaluation import EvaluationResult


class Callback:
    """What a callback may have; each method does nothing here. Any object with some of these methods is one.

    Rank 0 calls them in its main thread, and waits: what takes long belongs into a thread of its own. Values must not be
    changed. Each may raise ``Stop``, and the run then ends as after its last step. Anything else that it raises ends the run
    with an error, once what was trained is saved. After a rollback (``train.rollback``) steps come again.
    """

    def on_run_begin(self, run: RunInfo) -> None:
        """Before the first step, also of a resumed run: servers may still be starting. What is raised here ends the run at
        once; ``Stop`` has no place here.
        """

    def on_rollouts(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """The rollouts that step ``step`` (from 1) trains on, with the rewards that it trains on; before its updates."""

    def on_evaluation(self, step: int, result: EvaluationResult) -> None:
        """The evaluation after ``step`` completed steps; 0: before the first."""

    def on_checkpoint(self, step: int, folder: Path) -> None:
        """The checkpoint of ``step`` completed steps is whole, in ``folder``; with ``train.async_save`` some steps later."""

    def on_step_end(self, step: int, metrics: Mapping[str, Any]) -> None:
        """The step's row, as ``metrics.jsonl`` has it, evaluation included. Step 0: the row before the first step."""

    def on_run_end(self, step: int) -> None:
        """After a run that ended well, with the model exported; ``step``: completed steps. Not after a failure or a signal."""


HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))


@dataclass
class Callbacks:
    """Those of a run, in the order in which they are called. ``say`` shows a sentence in the run's progress."""

    callbacks: Sequence[object]
    say: Callable[[str], None] = lambda text: None
    stopped: str | None = None
    """Which callback asked the run to end, and why."""
    failure: RuntimeError | None = field(default=None, repr=False)
    """What a callback raised; no callback is called afterwards."""

    @property
    def go_on(self) -> bool:
        """Whether none asked the run to end, and none failed."""
        return self.stopped is None and self.failure is None

    def tell(self, hook: str, step: int, *arguments: Any) -> None:
        """Calls the method ``hook`` of all of them with ``arguments``; ``step`` is what is said where one raises."""
        for callback in self.callbacks:
            method = getattr(callback, hook, None)
            if method is None or self.failure is not None:
                continue
            try:
                method(*arguments)
            except Stop as stop:
                reason = str(stop) or "it gave no reason"
                self.stopped = self.stopped or f"{name_of(callback)} ended the run at step {step}: {reason}"
                self.say(self.stopped)
            except (Exception, SystemExit) as error:
                what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
                self.failure = RuntimeError(
                    f"the callback {name_of(callback)} raised {what} in {hook} at step {step}{_place(error)}"
                )
                self.failure.__cause__ = error

    def begin(self, run: RunInfo) -> None:
        """Raises RuntimeError where a callback raised: nothing is trained then."""
        self.tell("on_run_begin", run.step, run)
        if self.stopped is not None:
            raise RuntimeError(f"{self.stopped}; Stop ends a run that has begun: raise it in another method")
        self.raise_failure(saved_step=run.step)

    def raise_failure(self, *, saved_step: int) -> None:
        """Raises what a callback has raised, if one has, as a RuntimeError with one sentence. ``saved_step``: steps in the
        newest checkpoint.
        """
        if self.failure is not None:
            saved = f"the newest checkpoint is {checkpoint_name(saved_step)}: continue with --resume"
            raise RuntimeError(f"{self.failure}; {saved if saved_step else 'nothing was trained'}") from self.failure.__cause__


def check_callbacks(config: RunConfig) -> None:
    """ValueError for a name in ``train.callbacks`` that can be no callback; imports none of them."""
    for each in config.train.callbacks:
        _locate(_described(each))


def make_callbacks(config: RunConfig, given: Sequence[object] = ()) -> list[object]:
    """The callbacks that ``train.callbacks`` names, then ``given``: objects, or classes that take no arguments.

    Raises ValueError for one that cannot be imported or made, or that has none of the methods of :class:`Callback`.
    """
    made = [_make(_described(each)) for each in config.train.callbacks]
    made += [each() if inspect.isclass(each) else each for each in given]
    for callback in made:
        _check_hooks(callback)
    return made


def name_of(callback: object) -> str:
    """The name of its class."""
    return type(callback).__qualname__


def _described(each: str | CallbackConfig) -> CallbackConfig:
    return CallbackConfig(callback=each) if isinstance(each, str) else each


def _locate(described: CallbackConfig) -> str:
    name = described.callback
    if ":" in name:
        return locate_user_code(name, f"the callback {name!r}")
    if name not in BUILT_IN:
        raise ValueError(
            f"unknown callback {name!r}; known: {', '.join(BUILT_IN)}, or your own as path/file.py:Class or "
            "package.module:Class"
        )
    return name


def _make(described: CallbackConfig) -> object:
    name, kwargs = _locate(described), described.kwargs
    found = BUILT_IN[name] if name in BUILT_IN else load_user_code(name, f"the callback {described.callback!r}")
    if not inspect.isclass(found):
        if kwargs:
            raise ValueError(f"the callback {described.callback!r} takes kwargs only where it is a class; leave them out")
        return found
    try:
        return found(**kwargs)
    except Exception as error:
        given = f"kwargs {', '.join(kwargs)}" if kwargs else "no kwargs"
        raise ValueError(
            f"the callback {described.callback!r} cannot be made with {given}: {type(error).__name__}: {error}{_place(error)}"
        ) from error


def _check_hooks(callback: object) -> None:
    found = [name for name in dir(callback) if name.startswith("on_") and callable(getattr(callback, name))]
    for name in found:
        if name not in HOOKS:
            near = get_close_matches(name, HOOKS, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(HOOKS)}"
            raise ValueError(f"the callback {name_of(callback)} has a method {name}, which nothing calls{hint}")
        if inspect.iscoroutinefunction(getattr(callback, name)):
            raise ValueError(f"the callback {name_of(callback)} has an async method {name}, and nothing awaits it; use def")
    if not found:
        raise ValueError(f"{name_of(callback)} is no callback: it has none of the methods {', '.join(HOOKS)}")


def _place(error: BaseException) -> str:
    """The last line of code outside of this file that the error went through."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""


class Stop(Exception):  # noqa: N818
    """Raised by a callback: the run ends after the step under way as after its last one, with a checkpoint and the model.

    Its text is the reason, which the run shows. ``--resume`` goes on from there.
    """


@dataclass(frozen=True)
class RunInfo:
    """A run as it begins, or goes on: ``step`` completed steps, and the rows of metrics so far, oldest first."""

    config: RunConfig
    step: int
    rows: Sequence[Mapping[str, Any]]


class EarlyStopping:
    """Ends the run once ``metric`` has not been better than its best by more than ``min_delta`` for ``patience`` rows that have
    it. ``mode``: whether better is larger or smaller.

    ``accuracy/greedy`` is in the rows of evaluations alone, so that patience counts evaluations. A resumed run goes on
    counting, from its rows.
    """

    def __init__(
        self,
        metric: str = "accuracy/greedy",
        patience: int = 5,
        mode: Literal["max", "min"] = "max",
        min_delta: float = 0.0,
    ) -> None:
        """Raises ValueError for a patience below 1, another mode, or a negative ``min_delta``."""
        if patience < 1 or mode not in ("max", "min") or not 0 <= min_delta < math.inf:
            raise ValueError(
                f"patience = {patience} must be 1 or more, mode = {mode!r} max or min, min_delta = {min_delta:g} 0 or more"
            )
        self.metric, self.patience, self.mode, self.min_delta = metric, patience, mode, min_delta
        self._begin()

    def _begin(self) -> None:
        self.best, self.best_step, self.waited = -math.inf, 0, 0

    def on_run_begin(self, run: RunInfo) -> None:
        """Raises ValueError where the run never evaluates, and the metric is one of evaluations."""
        if self.metric.startswith(("accuracy/", "heldout/")) and not run.config.evaluate.every:
            raise ValueError(
                f"early stopping looks at {self.metric}, and this run never evaluates; set evaluate.every, or name "
                "another metric"
            )
        self._begin()
        for row in run.rows:
            self._see(row)

    def on_step_end(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Raises Stop when patience is over."""
        if self._see({"step": step, **metrics}) and self.waited >= self.patience:
            best = self.best if self.mode == "max" else -self.best
            raise Stop(f"{self.metric} was {best:.4g} at step {self.best_step}, and not better since")

    def _see(self, row: Mapping[str, Any]) -> bool:
        """Whether the row has the metric."""
        value = row.get(self.metric)
        if value is None or math.isnan(value):
            return False
        value = value if self.mode == "max" else -value
        if value > self.best + self.min_delta:
            self.best, self.best_step, self.waited = value, row["step"], 0
        else:
            self.waited += 1
        return True


BUILT_IN: Mapping[str, type] = {"early_stopping": EarlyStopping}
"""Callbacks by name, as ``train.callbacks`` names them."""
