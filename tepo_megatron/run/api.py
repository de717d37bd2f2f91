"""``tepo_megatron.train(…)``: a run from a script or a notebook."""

from __future__ import annotations

import difflib
import gc
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tepo_megatron.config import ObjectiveConfig, RunConfig
from tepo_megatron.config.load import as_yaml, collected_warnings, dump_resolved, load_run, override
from tepo_megatron.config.objective.custom import CustomKind, Plugin
from tepo_megatron.config.paths import paths_in
from tepo_megatron.run.callbacks import NO_EXTENSIONS, Extensions
from tepo_megatron.run.metrics import read_metrics, value_in
from tepo_megatron.runtime import rank
from tepo_megatron.runtime.hub import HUB, hub_folder
from tepo_megatron.runtime.machine import changed_environment, this_machine
from tepo_megatron.runtime.preemption import INTERRUPTED, PREEMPTED, StopRequested, StopSignals
from tepo_megatron.runtime.restarts import attempt, job_name
from tepo_megatron.runtime.supervise import locked_folder
from tepo_megatron.runtime.text import echo
from tepo_megatron.runtime.torchrun import run_ranks
from tepo_megatron.tasks.reward.verifiers import GIVEN


def train(
    config: RunConfig | str | Path | Mapping[str, Any] | None = None,
    *,
    reward: str | Mapping[str, Any] | Callable[..., Any] | object | None = None,
    objective: str | Mapping[str, Any] | ObjectiveConfig | None = None,
    env: str | type | Mapping[str, Any] | None = None,
    callbacks: Sequence[object] | object = (),
    collect: str | Callable[..., Any] | None = None,
    resume: bool | Literal["auto"] | str | None = None,
    overwrite: bool = False,
    **settings: Any,
) -> TrainResult:
    """Trains a model, as ``tepo train`` does.

    Args:
        config: the path of a run's YAML, a ``RunConfig``, settings by dotted names or sections (``{"train.steps": 10}``), or
            None: ``settings`` alone.
        reward: a function ``(problem, response) -> float``, another form of docs/guides/rewards.md, as an object or by name, or
            the settings of ``reward``.
        objective: a preset's name, or the settings of ``objective``, which may name plugins.
        env: an environment's name, a class that can be imported, or the settings of ``environment``.
        callbacks: a ``Callback`` object, or a name as in ``train.callbacks``, or several in a list; besides the config's.
        collect: a generation step, ``(problems, sampler) -> rollouts``, as an object or by name.
        resume: continue from the newest whole checkpoint of ``output`` (``"auto"``: if there is one), or from this name or
            path; False: start again, whatever ``config`` says.
        overwrite: remove the run in ``output``.
        settings: override ``config``: sections as mappings, or ``name``, ``output``, ``seed``.

    With one rank (``engine.parallel``) the run is in this process, and uses its memory, its random numbers and, in the main
    thread, its Ctrl-C. With several, ranks start on this machine and import ``reward`` and callbacks by name. Under torchrun
    every rank calls with the same arguments; rank 0's functions are used, and ranks that fail end their process.

    Raises:
        ConfigError, ValueError, RuntimeError: with the message of ``tepo train``.
        StopRequested: a KeyboardInterrupt, after Ctrl-C, SIGTERM, SIGHUP or SIGUSR1, once the training so far is saved, or
            the run is complete.
    """
    with collected_warnings() as sentences:
        run, extensions = _read_arguments(
            config, settings, reward=reward, objective=objective, callbacks=callbacks, collect=collect, env=env, resume=resume
        )
    for text in sentences:
        warnings.warn(text, stacklevel=2)  # with the caller's line
    from tepo_megatron.run.output.resume import resolve_dtype

    ranks = 0 if rank.under_torchrun() else run.engine.parallel.world_size  # that start here
    if ranks == 1:
        _check_restarts(run)
    elif ranks:
        run = _name_everywhere(run, extensions)
    try:
        run = prepare_run(run, extensions, overwrite=overwrite, is_rank=ranks < 2)
    except ValueError as error:
        error.args = (str(error).replace("--resume", "resume=True").replace("--overwrite", "overwrite=True"),)
        raise
    run = resolve_dtype(run, this_machine().gpus)
    stops: list[int] = []
    if not ranks:
        code = run_rank(run, partial(_train_as_rank, extensions=extensions))
        if code:  # ends the process, as torchrun's agent expects
            sys.exit(code)
    elif ranks == 1:
        from tepo_megatron.run.training import train_model

        signals = StopSignals(grace_s=run.train.grace_s, warning_s=run.train.warning_s, ends=False)
        with _own_process(), signals.borrowed():
            train_model(run, extensions)
        stops += [] if signals.requested is None else [signals.requested]
    else:
        code, message = start_ranks(run, stops)
        if code in (INTERRUPTED, PREEMPTED):
            raise StopRequested(signal.SIGINT if code == INTERRUPTED else signal.SIGTERM)
        if code:
            raise RuntimeError(message)
    if stops:  # after the last step
        raise StopRequested(stops[0], f"the run is complete in {run.output}")
    return TrainResult(run.output, run.output / "model", run, read_metrics(run.output / "metrics.jsonl"))


@contextmanager
def _own_process() -> Iterator[None]:
    import torch

    threads = torch.get_num_threads()
    with changed_environment(), warnings.catch_warnings():
        if "OMP_NUM_THREADS" not in os.environ and not torch.cuda.is_available():
            torch.set_num_threads(1)
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        try:
            yield
        finally:
            torch.set_num_threads(threads)


@dataclass(frozen=True)
class TrainResult:
    """``rows``: metrics, one row per step, oldest first; step 0 is the evaluation before the first. ``model``: the trained
    model as a Hugging Face folder.
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
        """Returns steps and values. Raises KeyError, with similar names, if no row has the metric."""
        points = [(row["step"], value) for row in self.rows if (value := value_in(row, name)) is not None]
        if not points:
            raise KeyError(f"no row has {name!r}; there are {', '.join(sorted({key for row in self.rows for key in row}))}")
        return [step for step, _ in points], [value for _, value in points]

    def best(self, name: str = "accuracy/greedy", choose: Callable[..., Any] = max) -> Mapping[str, Any]:
        """Returns the first row with the largest value (``choose=min``: the smallest)."""
        self.column(name)
        return choose((row for row in self.rows if value_in(row, name) is not None), key=lambda row: value_in(row, name))


def _read_arguments(
    config: Any, settings: dict[str, Any], *, reward: Any, objective: Any, callbacks: Any, collect: Any, env: Any, resume: Any
) -> tuple[RunConfig, Extensions]:
    values = [*(config.items() if isinstance(config, Mapping) else ()), *settings.items()]  # the last one of a field counts
    for argument in (argument for argument, value in settings.items() if callable(value)):
        near = difflib.get_close_matches(argument, ("reward", "objective", "callbacks", "collect", "env"), n=1)
        raise ValueError(f"{argument} is no argument that takes a function{f'; did you mean {near[0]}?' if near else ''}")
    if isinstance(reward, Mapping):
        values.append(("reward", reward))
        reward = None
    elif reward is not None:
        verifier, reward = _named(reward)
        values.append(("reward.verifier", verifier))
        if reward is not None and not hasattr(os, "fork"):
            raise ValueError(
                f"reward={_called(reward)} is in this process alone, and {sys.platform} cannot fork it; put the function into "
                "a file and give path/file.py:name"
            )
    if collect is not None:
        step, collect = _named(collect)
        values.append(("rollout.collect", step))
    if env is not None:
        name = env if isinstance(env, str | Mapping) else _address(env)
        if name is None:
            raise ValueError(
                f"env={_called(env)} has no name that the environments' processes can import; put the class into a file and "
                "give env='path/file.py:Class', or the class itself as imported from there"
            )
        values.append(("environment" if isinstance(name, Mapping) else "environment.name", name))
    if objective is not None:
        values.append(("objective.preset" if isinstance(objective, str) else "objective", objective))
    if resume in (True, "auto"):
        values.append(("train.resume", resume))
    elif resume is not None:
        values += [("train.resume", bool(resume)), ("train.resume_from", resume or None)]
    listed = callbacks if isinstance(callbacks, list | tuple) else [callbacks]
    names = [callback for callback in listed if isinstance(callback, str | Mapping)]
    objects = tuple(callback for callback in listed if not isinstance(callback, str | Mapping))
    for section in (config.objective if isinstance(config, RunConfig) else None, objective):
        if isinstance(section, ObjectiveConfig):
            _check_kinds(section)
    configured = _configure(None if isinstance(config, Mapping) else config, values)
    return _with_callbacks(configured, names), Extensions(objects, reward, collect)


def _check_kinds(objective: ObjectiveConfig) -> None:
    kinds = [kind for plugin in map(Plugin.load, objective.plugins) for kind in plugin.kinds]
    for name, section in objective.sections.items():
        if isinstance(section, CustomKind) and type(section) not in kinds:
            raise ValueError(
                f"objective.{name} = {_called(type(section))}() is in this process alone: its rules are not checked, and no "
                "other process can read the run; put the class into a file, name it in objective.plugins, and give the "
                f"section as {{'kind': {section.kind!r}}} (docs/guides/own-objective.md)"
            )


def _name_everywhere(config: RunConfig, extensions: Extensions) -> RunConfig:
    names = [_address(callback) for callback in extensions.callbacks]
    unnamed = [callback for callback, name in zip(extensions.callbacks, names, strict=True) if name is None]
    objects = [("reward={}", extensions.reward), ("collect={}", extensions.collect), *(("callbacks=[{}]", o) for o in unnamed)]
    for argument, thing in objects:
        if thing is not None:
            is_callback = argument.startswith("callbacks")
            remedy = "the class by its name, with its arguments as kwargs" if is_callback else "the function by its name"
            raise ValueError(
                f"{argument.format(_called(thing))} is in this process alone, and the {config.engine.parallel.world_size} "
                f"ranks of engine.parallel are processes of their own; put it into a file and give {remedy} "
                "(path/file.py:name), start the program by python -m tepo_megatron.runtime.torchrun, or use one rank"
            )
    return _with_callbacks(config, [name for name in names if name is not None])


def _configure(base: RunConfig | str | Path | None, settings: Sequence[tuple[str, Any]]) -> RunConfig:
    overrides = [f"{name}={as_yaml(value)}" for name, value in settings]
    if not isinstance(base, RunConfig):
        return load_run(base, overrides)
    return override(base, overrides) if overrides else base


def _address(thing: object) -> str | None:
    """None if other processes cannot import it. A module outside a package is named by its file: others may lack its path."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", "")
    loaded = sys.modules.get(module or "")
    if module in (None, "__main__", "builtins") or not name.isidentifier() or getattr(loaded, name, None) is not thing:
        return None
    file = getattr(loaded, "__file__", None)
    if "." in str(module) or file is None or not file.endswith(".py"):
        return f"{module}:{name}"
    return f"{Path(file).resolve()}:{name}"


def _named(thing: Any) -> tuple[str, Any]:
    if isinstance(thing, str):
        return thing, None
    name = _address(thing)
    return (name, None) if name else (f"{GIVEN}{_called(thing)}", thing)


def _with_callbacks(config: RunConfig, names: Sequence[str | Mapping[str, Any]]) -> RunConfig:
    return _configure(config, [("train.callbacks", [*config.train.callbacks, *names])]) if names else config


def _called(thing: object) -> str:
    name = str(getattr(thing, "__qualname__", type(thing).__qualname__)).rpartition(".")[2]
    return re.sub(r"\W", "", name) or "function"


def prepare_run(
    config: RunConfig, extensions: Extensions = NO_EXTENSIONS, *, overwrite: bool = False, is_rank: bool = False
) -> RunConfig:
    """Returns it with the output folder that ranks read. ``is_rank``: this process trains, and may start CUDA.

    Every process that may start a run calls; under torchrun only rank 0's first start acts. Raises ValueError.
    """
    from tepo_megatron.run.output.resume import Resumed, prepare_folder, resumes
    from tepo_megatron.run.output.room import Room
    from tepo_megatron.tasks.data.builtin import resolve_model_path

    config.require_data()
    config = config.model_copy(update={"output": config.output.expanduser()})
    if not rank.under_torchrun():
        _download(config)
    if rank.speaks_first() and not attempt():
        prepare_folder(config, overwrite=overwrite, check=partial(_check_start, config, extensions, is_rank))
        if lack := Room.of(config).lack(config.output):
            echo(f"warning: {lack}", err=True)
    if not rank.under_torchrun() and config.train.resume and resumes(config):
        Resumed.find(config, resolve_model_path(config.model.path))
    return config


def _check_start(config: RunConfig, extensions: Extensions, is_rank: bool) -> None:
    """What the run itself checks before its servers start. Other processes check their machine's limits themselves."""
    from tepo_megatron.run.checks import check_model
    from tepo_megatron.run.output.resume import resolve_dtype
    from tepo_megatron.run.sampling.custom_rollout import load_collect
    from tepo_megatron.run.sampling.inputs import Inputs
    from tepo_megatron.trainer.protocol import trainer_kind

    if rank.under_torchrun():
        _check_ranks(config)
        trainer_kind().prepare_process(config)  # before the checks look at GPUs
    model_dir = check_model(resolve_dtype(config, this_machine().gpus), machine=is_rank)
    Inputs.read(config, model_dir, has_reward=extensions.reward is not None)
    load_collect(config, extensions.collect)


def _download(config: RunConfig) -> None:
    models = [config.model.path, *(teacher.path for teacher in config.teachers.values())]
    for path in (path for path in models if path.startswith(HUB)):
        hub_folder(path, "model")
    for name, path in paths_in(config).items() if config.rollout.replay is None else ():
        if path.startswith(HUB) and name.startswith(("data.", "evaluate.")):
            hub_folder(path, "dataset")


def start_ranks(config: RunConfig, stops: list[int] | None = None) -> tuple[int, str]:
    """Ranks, also restarted ones, read this configuration, not its files. ``stops``: as of ``run_ranks``."""
    from tepo_megatron.sampler.protocol import sampler_spec

    world_size, restarts, rollout = config.engine.parallel.world_size, config.train.max_restarts, config.rollout
    outlive = restarts and rollout.replay is None and rollout.server.placement == "local"  # rank 0's would end with it
    servers = sampler_spec().outlive_ranks(config) if outlive else nullcontext()
    with locked_folder() as folder, servers:
        file = folder / "run.yaml"
        file.write_text(dump_resolved(config), encoding="utf-8")
        status = config.output / "status"
        return run_ranks(["train", str(file)], world_size, status=status, max_restarts=restarts, stops=stops)


def _check_restarts(config: RunConfig) -> None:
    if config.train.max_restarts and not job_name():
        raise ValueError(
            f"train.max_restarts = {config.train.max_restarts}, but nothing would start these ranks again; start the run by "
            "'tepo train' or python -m tepo_megatron.runtime.torchrun --max-restarts, or set it to 0"
        )


def _check_ranks(config: RunConfig) -> None:
    parallel, world_size = config.engine.parallel, int(os.environ["WORLD_SIZE"])
    if world_size != parallel.world_size:
        raise ValueError(
            f"engine.parallel needs tp × pp × cp × dp = {parallel.tp} × {parallel.pp} × {parallel.cp} × {parallel.dp} = "
            f"{parallel.world_size} ranks, but WORLD_SIZE is {world_size}; start torchrun with --nproc-per-node "
            f"{parallel.world_size}, or change engine.parallel"
        )
    _check_restarts(config)


def _train_as_rank(config: RunConfig, extensions: Extensions = NO_EXTENSIONS) -> None:
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()  # while it imports: a million objects that stay would be walked a dozen times
    try:
        from tepo_megatron.run.training import train_model

        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()
    train_model(config, extensions)


def run_rank(config: RunConfig, work: Callable[[RunConfig], None] = _train_as_rank) -> int:
    from tepo_megatron.run.output.resume import of_attempt

    def checked() -> None:
        _check_ranks(config)
        work(of_attempt(config))

    return rank.run_rank(checked, grace_s=config.train.grace_s, warning_s=config.train.warning_s)
