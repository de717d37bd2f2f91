"""Environments (docs/guides/environments.md) and what runs them. Imports no NumPy."""

from __future__ import annotations

import inspect
import os
import secrets
import stat
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Protocol

from tepo_megatron.core.problem import reward_fault
from tepo_megatron.runtime.text import is_key

Message = Mapping[str, Any]  # role (user, tool or system), content, and more keys for the chat template

Observation = str | Sequence[int] | Sequence[Message] | None  # text (encoded without special tokens), ids, messages, or nothing


@dataclass(frozen=True)
class StepResult:
    """The environment's answer to a turn.

    ``reward``: a number or components by name; an episode's reward is the sum. ``done``: the episode ends, and ``observation``
    is ignored. ``tool_error``: the model used a tool wrongly (only counted, in ``environment/tool_errors``).
    """

    observation: Observation = None
    reward: float | Mapping[str, float] = 0.0
    done: bool = False
    tool_error: bool = False
    info: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """For the environment and adapters; not read here."""


@dataclass(frozen=True)
class EpisodeAnswer:
    """``error``: why the episode failed. ``lost``: why its worker ended; it can begin again. ``suspect``: maybe the cause."""

    episode: int
    answer: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    lost: str | None = None
    suspect: bool = False
    seconds: float = 0.0

    @classmethod
    def read(cls, values: Any, episode: int | None = None) -> EpisodeAnswer:
        """``values``: JSON of another process. An answer to ``episode`` (None: any) that is none fails it; raises ValueError
        if its episode is unknown.
        """
        fault = "the environment's process answered with something else than a step"
        match values:
            case [int() as number, *_] if episode in (None, number):
                pass
            case _ if episode is None:
                raise ValueError(fault)
            case _:
                return cls(episode, error=fault)
        match values[1:]:
            case [dict() as answer, None | str() as error, None | str() as lost, bool() as suspect, int() | float() as seconds]:
                is_sound = error is not None or lost is not None or _is_step(answer)
                if is_sound and reward_fault(seconds) is None:
                    return cls(number, answer, error, lost, suspect, seconds)
        return cls(number, error=fault)


def _is_step(answer: Any) -> bool:
    match answer:
        case {"observation": observation, "reward": reward, "done": bool(), "tool_error": bool()}:
            rewards = list(reward.values()) if isinstance(reward, dict) and reward else [reward]
            if not all(type(item) in (int, float) and reward_fault(item) is None for item in rewards):
                return False
        case _:
            return False
    match observation:
        case None | ["text", str()]:
            return True
        case ["ids", [*ids]]:
            return all(type(item) is int for item in ids)
        case ["messages", [*messages]]:
            return all(map(_is_message, messages))
        case ["chat", {"messages": [*messages], "begins": bool(), "tools": None | list(), "max_tokens": None | int()}]:
            return all(map(_is_message, messages))
    return False


def _is_message(item: Any) -> bool:
    return isinstance(item, dict) and isinstance(item.get("role"), str) and isinstance(item.get("content"), str)


class EnvironmentHost(Protocol):
    """Takes at most one open call per episode. Used from one thread."""

    @property
    def notice(self) -> str | None: ...

    @property
    def busy(self) -> bool: ...

    def call(self, episode: int, call: list[Any]) -> None:
        """Sends ``["reset", problem, seed, alone]`` (``alone``: in a worker of its own) or ``["step", *response]``."""

    def end(self, episode: int) -> None:
        """Further answers are dropped."""

    def poll(self, timeout_s: float) -> Sequence[EpisodeAnswer]:
        """Waits up to ``timeout_s`` for the first. Raises RuntimeError if environments cannot run."""

    def close(self) -> None: ...


END = ["end"]


async def awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def takes_seed(signature: inspect.Signature) -> bool:
    return any(item.name == "seed" or item.kind is item.VAR_KEYWORD for item in signature.parameters.values())


class Strangers:
    """Connections without a key so far. Beyond ``most`` the oldest closes: nobody takes all threads and open files.
    Thread-safe.
    """

    def __init__(self, most: int = 64) -> None:
        self._most, self._lock = most, threading.Lock()
        self._closes: dict[Any, Callable[[], object]] = {}

    def add(self, connection: Any, close: Callable[[], object]) -> None:
        with self._lock:
            self._closes[connection] = close
            if len(self._closes) > self._most:
                self._closes.pop(next(iter(self._closes)))()

    def discard(self, connection: Any) -> None:
        """It has shown the key, or ended."""
        with self._lock:
            self._closes.pop(connection, None)


def read_key(path: Path, setting: str = "environment.key_file", *, write: bool = False) -> str:
    """``write``: writes a missing file, for its owner only. Raises ValueError if it is missing or not its owner's alone."""
    try:
        if write and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with NamedTemporaryFile("w", dir=path.parent, prefix=".key-") as file:  # mode 0600
                file.write(secrets.token_urlsafe(32))
                file.flush()
                with suppress(FileExistsError):  # another process was faster; its key counts
                    os.link(file.name, path)
    except OSError as error:
        raise ValueError(f"{setting} = {path} cannot be written ({error.strerror}); give another file") from error
    try:
        status, key = path.stat(), path.read_text("utf-8", "replace").strip()
    except OSError as error:
        raise ValueError(
            f"{setting} = {path} cannot be read ({error.strerror}); 'tepo environment serve' writes it, and it must "
            "be where the trainer sees it"
        ) from error
    if stat.S_IMODE(status.st_mode) & (stat.S_IRWXG | stat.S_IRWXO) or status.st_uid != os.geteuid():
        raise ValueError(f"{setting} = {path} can be read by others than you; chmod 600 it, or remove it")
    if not is_key(key):
        raise ValueError(f"{setting} = {path} holds no key of visible ASCII characters; remove it, and another is written")
    return key
