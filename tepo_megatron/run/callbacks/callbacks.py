"""The user's code in a run: it receives rollouts, evaluations, checkpoints and rows, and may end the run."""

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
    """Methods that a callback may have. Any object with some of these methods is a callback.

    Rank 0 calls them in its main thread, and waits: run slow work in another thread. Values must not be changed. Each method
    may raise ``Stop``: the run then ends as after its last step. Any other error ends the run with an error, after what was
    trained is saved. After a rollback (``train.rollback``) steps come again.
    """

    def on_run_begin(self, run: RunInfo) -> None:
        """Called before the first step, also of a resumed run: servers may still be starting. Errors end the run at once; do
        not raise ``Stop`` here.
        """

    def on_rollouts(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """Called before the updates of ``step`` (from 1), with its rollouts and the rewards that it trains on."""

    def on_evaluation(self, step: int, result: EvaluationResult) -> None:
        """Called after the evaluation that follows ``step`` completed steps; 0: before the first."""

    def on_checkpoint(self, step: int, folder: Path) -> None:
        """Called when the checkpoint of ``step`` completed steps is complete in ``folder``; with ``train.async_save`` some
        steps later.
        """

    def on_step_end(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Called with the step's row of ``metrics.jsonl``, evaluation included. Step 0: the row before the first step."""

    def on_run_end(self, step: int) -> None:
        """Called after a successful run, with the model exported; ``step``: completed steps. Not called after a failure or a
        signal.
        """


HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))


@dataclass
class Callbacks:
    callbacks: Sequence[object]
    say: Callable[[str], None] = lambda text: None
    stopped: str | None = None
    """Which callback asked the run to end, and why."""
    failure: RuntimeError | None = field(default=None, repr=False)
    """What a callback raised; no callback is called afterwards."""

    @property
    def go_on(self) -> bool:
        return self.stopped is None and self.failure is None

    def tell(self, hook: str, step: int, *arguments: Any) -> None:
        """Calls the method ``hook`` of all callbacks; error messages name ``step``."""
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
        """Raises RuntimeError if a callback raised."""
        self.tell("on_run_begin", run.step, run)
        if self.stopped is not None:
            raise RuntimeError(f"{self.stopped}; Stop ends a run that has begun: raise it in another method")
        self.raise_failure(saved_step=run.step)

    def raise_failure(self, *, saved_step: int) -> None:
        """Raises a callback's error, if any, as a RuntimeError. ``saved_step``: steps in the newest checkpoint."""
        if self.failure is not None:
            saved = f"the newest checkpoint is {checkpoint_name(saved_step)}: continue with --resume"
            raise RuntimeError(f"{self.failure}; {saved if saved_step else 'nothing was trained'}") from self.failure.__cause__


def check_callbacks(config: RunConfig) -> None:
    """Raises ValueError for an impossible name in ``train.callbacks``; imports none."""
    for each in config.train.callbacks:
        _locate(_described(each))


def make_callbacks(config: RunConfig, given: Sequence[object] = ()) -> list[object]:
    """The callbacks of ``train.callbacks``, then ``given``: objects, or classes without arguments.

    Raises ValueError for one that cannot be imported or created, or has no method of :class:`Callback`.
    """
    made = [_make(_described(each)) for each in config.train.callbacks]
    made += [each() if inspect.isclass(each) else each for each in given]
    for callback in made:
        _check_hooks(callback)
    return made


def name_of(callback: object) -> str:
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
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""


class Stop(Exception):  # noqa: N818
    """Raised by a callback: the run ends after the current step as after its last one, with a checkpoint and the model.

    The run shows its text as the reason. ``--resume`` continues the run.
    """


@dataclass(frozen=True)
class RunInfo:
    """A run at its start, new or resumed: ``step`` completed steps, and the rows of metrics so far, oldest first."""

    config: RunConfig
    step: int
    rows: Sequence[Mapping[str, Any]]


class EarlyStopping:
    """Ends the run when ``metric`` has not improved on its best by more than ``min_delta`` for ``patience`` rows that have it.
    ``mode``: whether larger or smaller is better.

    Only rows of evaluations have ``accuracy/greedy``, so that patience counts evaluations. A resumed run continues the count
    from its rows.
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
        """Raises ValueError if the run never evaluates, and the metric is one of evaluations."""
        if self.metric.startswith(("accuracy/", "heldout/")) and not run.config.evaluate.every:
            raise ValueError(
                f"early stopping looks at {self.metric}, and this run never evaluates; set evaluate.every, or name "
                "another metric"
            )
        self._begin()
        for row in run.rows:
            self._see(row)

    def on_step_end(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Raises Stop when patience is exhausted."""
        if self._see({"step": step, **metrics}) and self.waited >= self.patience:
            best = self.best if self.mode == "max" else -self.best
            raise Stop(f"{self.metric} was {best:.4g} at step {self.best_step}, and not better since")

    def _see(self, row: Mapping[str, Any]) -> bool:
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
"""The names for ``train.callbacks``."""
