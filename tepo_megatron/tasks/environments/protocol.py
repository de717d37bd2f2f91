"""Environments (docs/guides/environments.md) and what runs them. Imports no NumPy."""

from __future__ import annotations

import inspect
import os
import secrets
import stat
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

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
    if write and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_urlsafe(32))
    try:
        status, key = path.stat(), path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ValueError(
            f"{setting} = {path} cannot be read ({error.strerror}); 'tepo environment serve' writes it, and it must "
            "be where the trainer sees it"
        ) from error
    if stat.S_IMODE(status.st_mode) & (stat.S_IRWXG | stat.S_IRWXO) or status.st_uid != os.geteuid():
        raise ValueError(f"{setting} = {path} can be read by others than you; chmod 600 it, or remove it")
    if not key:
        raise ValueError(f"{setting} = {path} is empty; remove it, and another is written")
    return key
