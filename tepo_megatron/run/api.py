"""``tepo_megatron.train(…)``: a run from a script or a notebook.

Under torchrun this process is one rank; a world of one rank is this process; a larger world gets its own processes, which know
functions by name only.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tepo_megatron.config import RunConfig
from tepo_megatron.config.loading.load import dump_resolved
from tepo_megatron.run.metrics.metrics import read_metrics
from tepo_megatron.run.python_args import Brought, bring
from tepo_megatron.run.start import prepare_run, start_ranks, train_as_rank
from tepo_megatron.runtime.preemption import INTERRUPTED, PREEMPTED, StopRequested, borrowed_stop_signals
from tepo_megatron.runtime.rank import under_torchrun

if TYPE_CHECKING:
    from tepo_megatron.config import ObjectiveConfig


def train(
    config: RunConfig | str | Path | Mapping[str, Any] | None = None,
    *,
    reward: str | Mapping[str, Any] | Callable[..., Any] | object | None = None,
    objective: str | Mapping[str, Any] | ObjectiveConfig | None = None,
    env: str | type | Mapping[str, Any] | None = None,
    callbacks: Sequence[object] = (),
    collect: str | Callable[..., Any] | None = None,
    resume: bool | Literal["auto"] | str = False,
    overwrite: bool = False,
    **settings: Any,
) -> TrainResult:
    """Trains a model, as ``tepo train`` does, and returns the result.

    Args:
        config: the path of a run's YAML, a ``RunConfig``, settings by dotted names or sections
            (``{"train.steps": 10}``), or None: ``settings`` alone.
        reward: a function ``(problem, response) -> float``, another form of docs/guides/rewards.md, as an object or by
            name, or the settings of ``reward``.
        objective: a preset's name, or the settings of ``objective``, which may name plugins.
        env: an environment's name, a class that can be imported, or the settings of ``environment``.
        callbacks: ``Callback`` objects, or names as in ``train.callbacks``, besides the config's.
        collect: your own generation step, ``(problems, sampler) -> rollouts``, as an object or by name.
        resume: continue from the newest whole checkpoint of ``output`` (``"auto"``: if there is one), or from the one with
            this name or path.
        overwrite: remove the run that ``output`` holds.
        settings: override ``config``: sections as mappings, or ``name``, ``output``, ``seed``.

    With one rank (``engine.parallel``) the run is in this process, and uses its memory, its random numbers and, in the main
    thread, its Ctrl-C. With several, ranks are started on this machine, which must be able to import ``reward`` and callbacks
    by name. Under torchrun every rank calls, with the same arguments; rank 0's functions are used, and ranks that fail end
    their process.

    Raises:
        ConfigError, ValueError, RuntimeError: with the message of ``tepo train``.
        StopRequested: a KeyboardInterrupt, after Ctrl-C, SIGTERM or SIGUSR1, when what was trained is saved.
    """
    brought = bring(
        config, settings, reward=reward, objective=objective, callbacks=callbacks, collect=collect, env=env, resume=resume
    )
    prepare_run(brought.config, overwrite=overwrite)
    if under_torchrun():
        if code := train_as_rank(brought.config, brought.extensions):  # ends the process, as torchrun's agent expects
            sys.exit(code)
    elif brought.config.engine.parallel.world_size == 1:
        _train_here(brought)
    else:
        _train_in_ranks(brought)
    return read_result(brought.config)


def _train_here(brought: Brought) -> None:
    with _own_process(), borrowed_stop_signals():
        from tepo_megatron.run.training import train_model

        train_model(brought.config, brought.extensions)


@contextmanager
def _own_process() -> Iterator[None]:
    """A run's settings of this process, undone afterwards: one thread a rank, gloo on the loopback interface."""
    import torch

    environment, threads = dict(os.environ), torch.get_num_threads()
    if "OMP_NUM_THREADS" not in environment and not torch.cuda.is_available():
        torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        with warnings.catch_warnings():
            yield
    finally:
        torch.set_num_threads(threads)
        os.environ.clear()
        os.environ.update(environment)


def _train_in_ranks(brought: Brought) -> None:
    config = brought.named_everywhere()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.yaml"
        file.write_text(dump_resolved(config), encoding="utf-8")
        code, message = start_ranks(config, [str(file)])
    if code in (INTERRUPTED, PREEMPTED):
        raise StopRequested(signal.SIGINT if code == INTERRUPTED else signal.SIGTERM)
    if code:
        raise RuntimeError(message)


@dataclass(frozen=True)
class TrainResult:
    """A run that ended well. Everything is also in its folder, ``output``.

    ``rows``: the rows of metrics, one per step, oldest first; step 0 is the evaluation before the first. ``model``: the trained
    model as a Hugging Face folder. ``config``: the configuration of the run.
    """

    output: Path
    model: Path
    config: RunConfig = field(repr=False)
    rows: Sequence[Mapping[str, Any]] = field(repr=False)

    @property
    def step(self) -> int:
        """Completed steps; fewer than ``train.steps`` if a callback ended the run."""
        return int(self.rows[-1]["step"])

    def column(self, name: str) -> tuple[list[int], list[float]]:
        """Returns the steps that have a metric, and its values: two lists to plot.

        Raises KeyError, with similar names, if no row has it.
        """
        found = [(row["step"], row[name]) for row in self.rows if row.get(name) is not None]
        if not found:
            raise KeyError(f"no row has {name!r}; there are {', '.join(sorted({key for row in self.rows for key in row}))}")
        return [step for step, _ in found], [value for _, value in found]

    def best(self, name: str = "accuracy/greedy", choose: Callable[..., Any] = max) -> Mapping[str, Any]:
        """Returns the first row with the largest value of a metric (``choose=min``: the smallest). Raises KeyError as
        :meth:`column`.
        """
        self.column(name)
        row: Mapping[str, Any] = choose((row for row in self.rows if row.get(name) is not None), key=lambda row: row[name])
        return row


def read_result(config: RunConfig) -> TrainResult:
    output = config.output
    return TrainResult(output, output / "model", config, read_metrics(output / "metrics.jsonl"))
