"""Where episodes run, as those who drive them see it: processes of this machine, or servers of others."""

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
    """What came of a call to an episode. ``answer``: as the worker sent it (``calls``), without ``error``; empty otherwise.

    ``error``: the episode has failed, and why. ``lost``: its worker ended, and why; it can be begun again. ``suspect``: a call
    of this episode was under way then, and may have been the cause. ``seconds``: how long the environment took.
    """

    episode: int
    answer: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    lost: str | None = None
    suspect: bool = False
    seconds: float = 0.0


class EnvironmentHost(Protocol):
    """Runs episodes, which their drivers number; each has one call under way at most. Used from one thread."""

    @property
    def notice(self) -> str | None:
        """Which limit a kernel does not grant; None: it grants all."""

    @property
    def busy(self) -> bool:
        """Whether an answer is owed."""

    def call(self, episode: int, call: list[Any]) -> None:
        """Hands a call over (``reset_call``, ``step_call``); its answer comes by :meth:`poll`."""

    def end(self, episode: int) -> None:
        """Nothing more is asked of an episode, and no answer of it comes any longer."""

    def poll(self, timeout_s: float) -> Sequence[EpisodeAnswer]:
        """The answers that are new; waits up to ``timeout_s`` for the first, not at all where none is owed.

        Raises RuntimeError where environments cannot be run any longer.
        """

    def close(self) -> None:
        """Ends all. It may be called more than once."""


def reset_call(problem: Problem, seed: int, *, alone: bool = False) -> list[Any]:
    """The call that begins an episode; ``alone``: in a worker that has no other."""
    messages = [list(pair) for pair in problem.messages]
    given = [problem.id, problem.prompt, problem.answer, dict(problem.metadata), messages, problem.source]
    return ["reset", given, seed, alone]


def read_problem(given: list[Any]) -> Problem:
    """The problem of such a call."""
    identity, prompt, answer, metadata, messages, source = given
    pairs = tuple((role, content) for role, content in messages)
    return Problem(identity, prompt, answer, metadata, messages=pairs, source=source)


def step_call(action: ResponseText) -> list[Any]:
    """The call that tells an episode what the model wrote."""
    return ["step", str(action), b64encode(action.packed_ids).decode(), action.finish_reason, action.prompt_tokens]


def read_action(given: list[Any]) -> ResponseText:
    """What the model wrote, of such a call."""
    text, ids, finish_reason, *prompt_tokens = given
    action = ResponseText.unpack(text, b64decode(ids), finish_reason)
    if prompt_tokens:  # trainers of before did not say
        (action.prompt_tokens,) = prompt_tokens
    return action


END = ["end"]
"""The last call of an episode; it has no answer."""


SETTING = "environment.key_file"


def make_key(path: Path, setting: str = SETTING) -> str:
    """The key in a file that only its owner reads; made if it is not there. ``setting`` names the file in sentences.

    Raises ValueError for one that others can read.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_urlsafe(32))
    return read_key(path, setting)


def read_key(path: Path, setting: str = SETTING) -> str:
    """The key of a file. Raises ValueError: there is none, or others than its owner can read or write it."""
    try:
        found, key = path.stat(), path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ValueError(
            f"{setting} = {path} cannot be read ({error.strerror}); 'tepo environment serve' writes it, and it must "
            "be where the trainer sees it"
        ) from error
    if stat.S_IMODE(found.st_mode) & (stat.S_IRWXG | stat.S_IRWXO) or found.st_uid != os.geteuid():
        raise ValueError(f"{setting} = {path} can be read by others than you; chmod 600 it, or remove it")
    if not key:
        raise ValueError(f"{setting} = {path} is empty; remove it, and another is written")
    return key
