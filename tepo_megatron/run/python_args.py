"""The arguments of ``tepo_megatron.train`` as a configuration and objects.

A function that other processes can import goes by its name, so that ``resolved.yaml`` says what was run. Nothing is pickled.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tepo_megatron.config import RunConfig
from tepo_megatron.config.base import Section
from tepo_megatron.config.loading.load import ConfigError, dump_diff, load_run
from tepo_megatron.tasks.reward.verifiers import GIVEN


@dataclass(frozen=True)
class Brought:
    config: RunConfig
    extensions: Extensions

    def named_everywhere(self) -> RunConfig:
        """Raises ValueError for an object without a name."""
        ranks = self.config.engine.parallel.world_size
        if self.extensions.reward is not None:
            raise ValueError(_unreachable(f"reward={_called(self.extensions.reward)}", "the function by its name", ranks))
        if self.extensions.collect is not None:
            raise ValueError(_unreachable(f"collect={_called(self.extensions.collect)}", "the function by its name", ranks))
        names = []
        for each in self.extensions.callbacks:
            name = address(each)
            if name is None:
                advice = "the class by its name, with its arguments as kwargs"
                raise ValueError(_unreachable(f"callbacks=[{_called(each)}]", advice, ranks))
            names.append(name)
        return _with_callbacks(self.config, names)


def bring(
    config: RunConfig | str | Path | Mapping[str, Any] | None,
    settings: Mapping[str, Any],
    *,
    reward: Any = None,
    objective: Any = None,
    callbacks: Sequence[object] = (),
    collect: Any = None,
    env: Any = None,
    resume: bool | str = False,
) -> Brought:
    given = dict(config) if isinstance(config, Mapping) else {}
    given |= settings
    forked = None
    if isinstance(reward, str):
        given["reward.verifier"] = reward
    elif isinstance(reward, Mapping):
        given["reward"] = reward
    elif reward is not None:
        name = address(reward)
        given["reward.verifier"] = name or f"{GIVEN}{_called(reward)}"
        if name is None:
            _check_forks(reward)
            forked = reward
    step = None
    if collect is not None:
        name = collect if isinstance(collect, str) else address(collect)
        given["rollout.collect"] = name or f"{GIVEN}{_called(collect)}"
        step = None if name else collect
    if env is not None:
        given["environment"] = {"name": _name_of_environment(env)} if not isinstance(env, Mapping) else env
    if isinstance(objective, str):
        given["objective.preset"] = objective
    elif objective is not None:
        given["objective"] = objective
    if resume:
        named = isinstance(resume, str) and resume != "auto"
        given |= {"train.resume": True, "train.resume_from": resume} if named else {"train.resume": resume}
    names = [each for each in callbacks if isinstance(each, str | Mapping)]
    objects = [each for each in callbacks if not isinstance(each, str | Mapping)]
    configured = configure(None if isinstance(config, Mapping) else config, given)
    return Brought(_with_callbacks(configured, names), Extensions(callbacks=tuple(objects), reward=forked, collect=step))


def configure(base: RunConfig | str | Path | None, settings: Mapping[str, Any]) -> RunConfig:
    """``load_run`` with settings as values: by dotted names, or sections as mappings."""
    overrides = [f"{name}={_as_yaml(value)}" for name, value in settings.items()]
    if not isinstance(base, RunConfig):
        return load_run(base, overrides)
    if not overrides:
        return base
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.yaml"
        file.write_text(dump_diff(base), encoding="utf-8")
        try:
            return load_run(file, overrides)
        except ConfigError as error:
            raise ConfigError("settings", error.problems) from error


def address(thing: object) -> str | None:
    """Returns ``module:name`` or ``path/file.py:name``; None if other processes cannot import it.

    A module without a package goes by its file: other processes may lack its path.
    """
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", "")
    loaded = sys.modules.get(module or "")
    if module in (None, "__main__", "builtins") or not name.isidentifier() or getattr(loaded, name, None) is not thing:
        return None
    file = getattr(loaded, "__file__", None)
    if "." in str(module) or file is None or not file.endswith(".py"):
        return f"{module}:{name}"
    return f"{Path(file).resolve()}:{name}"


def _name_of_environment(env: object) -> str:
    name = env if isinstance(env, str) else address(env)
    if name is None:
        raise ValueError(
            f"env={_called(env)} has no name that the environments' processes can import; put the class into a file and give "
            "env='path/file.py:Class', or the class itself as imported from there"
        )
    return name


def _with_callbacks(config: RunConfig, names: Sequence[str | Mapping[str, Any]]) -> RunConfig:
    return configure(config, {"train.callbacks": [*config.train.callbacks, *names]}) if names else config


def _called(thing: object) -> str:
    name = str(getattr(thing, "__qualname__", type(thing).__qualname__)).rpartition(".")[2]
    return re.sub(r"\W", "", name) or "function"


def _unreachable(argument: str, advice: str, ranks: int) -> str:
    return (
        f"{argument} is in this process alone, and the {ranks} ranks of engine.parallel are processes of their own; put it "
        f"into a file and give {advice} (path/file.py:name), start the program by "
        "python -m tepo_megatron.runtime.torchrun, or use one "
        "rank"
    )


def _check_forks(reward: object) -> None:
    if not hasattr(os, "fork"):
        raise ValueError(
            f"reward={_called(reward)} is in this process alone, and {sys.platform} cannot fork it; put the function into a "
            "file and give path/file.py:name"
        )


def _as_yaml(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=_as_json)
    return "".join(each if " " <= each <= "~" else f"\\U{ord(each):08x}" for each in text)


def _as_json(value: object) -> Any:
    if isinstance(value, Section):
        return value.model_dump(mode="json")
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise ValueError(f"a setting cannot be {type(value).__name__} ({value!r}); give numbers, text, lists and mappings")


@dataclass(frozen=True)
class Extensions:
    """Rank 0's objects. ``callbacks`` follow those of ``train.callbacks``. ``reward``, ``collect``: those that others cannot
    import.
    """

    callbacks: Sequence[object] = ()
    reward: Any = None
    collect: Any = None


NO_EXTENSIONS = Extensions()
