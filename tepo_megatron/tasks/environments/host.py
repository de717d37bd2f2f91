"""The interface to processes or servers that run episodes."""

from __future__ import annotations

import os
import secrets
import stat
from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tepo_megatron.core.problem import Problem, ResponseText


@dataclass(frozen=True)
class EpisodeAnswer:
    """``error``: why the episode has failed. ``lost``: why its worker ended; the episode can begin again. ``suspect``: a call
    of this episode was open then and may be the cause. ``seconds``: of the environment.
    """

    episode: int
    answer: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    lost: str | None = None
    suspect: bool = False
    seconds: float = 0.0


class EnvironmentHost(Protocol):
    """Runs episodes, with at most one open call each. Used from one thread."""

    @property
    def notice(self) -> str | None:
        """A limit that the kernel does not support."""

    @property
    def busy(self) -> bool: ...

    def call(self, episode: int, call: list[Any]) -> None:
        """Sends a call (``reset_call``, ``step_call``); :meth:`poll` returns its answer."""

    def end(self, episode: int) -> None:
        """Ends an episode; :meth:`poll` returns no further answer of it."""

    def poll(self, timeout_s: float) -> Sequence[EpisodeAnswer]:
        """New answers; waits up to ``timeout_s`` for the first if one is outstanding. Raises RuntimeError if environments
        cannot run any longer.
        """

    def close(self) -> None: ...


def reset_call(problem: Problem, seed: int, *, alone: bool = False) -> list[Any]:
    """``alone``: in a worker without other episodes."""
    messages = [list(pair) for pair in problem.messages]
    fields = [problem.id, problem.prompt, problem.answer, dict(problem.metadata), messages, problem.source]
    return ["reset", fields, seed, alone]


def read_problem(fields: list[Any]) -> Problem:
    identity, prompt, answer, metadata, messages, source = fields
    pairs = tuple((role, content) for role, content in messages)
    return Problem(identity, prompt, answer, metadata, messages=pairs, source=source)


def step_call(action: ResponseText) -> list[Any]:
    return ["step", str(action), b64encode(action.packed_ids).decode(), action.finish_reason, action.prompt_tokens]


def read_action(fields: list[Any]) -> ResponseText:
    text, ids, finish_reason, *prompt_tokens = fields
    action = ResponseText.unpack(text, b64decode(ids), finish_reason)
    if prompt_tokens:  # older trainers do not send it
        (action.prompt_tokens,) = prompt_tokens
    return action


END = ["end"]


SETTING = "environment.key_file"


def make_key(path: Path, setting: str = SETTING) -> str:
    """Writes the file, for its owner only, if missing. ``setting``: its name in messages. Raises as :func:`read_key`."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_urlsafe(32))
    return read_key(path, setting)


def read_key(path: Path, setting: str = SETTING) -> str:
    """Raises ValueError if the file is missing, or accessible to others than its owner."""
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
