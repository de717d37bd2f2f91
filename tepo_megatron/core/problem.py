"""A problem and a response for verifiers, whose processes import no NumPy."""

from __future__ import annotations

import math
from array import array
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

LARGEST_REWARD = 1e15
"""In float32, sums of squares of a million such rewards are finite."""


def reward_fault(value: float) -> str | None:
    """Returns None for a reward."""
    if abs(value) <= LARGEST_REWARD:
        return None
    return f"{value}, beyond ±{LARGEST_REWARD:g}" if abs(value) < math.inf else f"{value}, not a finite number"


@dataclass(frozen=True)
class Problem:
    """One task of a dataset.

    ``metadata``: all other keys of its line in the data file, ignored by ``==``. ``messages``: (role, content) pairs for a chat
    template; ``prompt`` is then the last user message. ``special_tokens``: their names in ``prompt`` become these tokens.
    """

    id: str
    prompt: str
    answer: str
    metadata: Mapping[str, Any] = field(default_factory=dict, compare=False)
    messages: tuple[tuple[str, str], ...] = ()
    source: str = ""
    special_tokens: bool = False

    def other_answer(self, problems: Iterable[Problem]) -> str | None:
        return next((other.answer for other in problems if other.answer != self.answer), None)

    def to_json(self) -> list[Any]:
        """Leaves ``special_tokens`` out: they are for the prompt."""
        return [self.id, self.prompt, self.answer, dict(self.metadata), [list(pair) for pair in self.messages], self.source]

    @classmethod
    def from_json(cls, id: str, prompt: str, answer: str, metadata: Any, messages: Any, source: str) -> Problem:
        return cls(id, prompt, answer, metadata, tuple((role, content) for role, content in messages), source)


class ResponseText(str):
    """A response's text with its tokens. Methods such as ``strip()`` return a plain ``str``.

    ``finish_reason``: ``"stop"`` or ``"length"`` (cut). ``prompt_tokens``: tokens before a turn of an episode. ``prompt_ids``
    stay in this process.
    """

    finish_reason: str
    prompt_tokens: int = 0
    prompt_ids: Iterable[int] = ()
    _ids: Iterable[int]

    def __new__(cls, text: str, token_ids: Iterable[int] = (), finish_reason: str = "stop") -> ResponseText:
        response = super().__new__(cls, text)
        response._ids, response.finish_reason = token_ids, finish_reason
        return response

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Empty if unknown."""
        return tuple(self._ids)

    @cached_property
    def packed_ids(self) -> bytes:
        """Native 32-bit integers."""
        with suppress(TypeError):  # no buffer
            view = memoryview(self._ids)  # type: ignore[arg-type]
            if view.format == "i":
                return view.tobytes()
        return array("i", self._ids).tobytes()

    def to_json(self) -> list[Any]:
        return [str(self), b64encode(self.packed_ids).decode(), self.finish_reason, self.prompt_tokens]

    @classmethod
    def from_json(cls, text: str, packed_ids: str, finish_reason: str, prompt_tokens: int = 0) -> ResponseText:
        """Older trainers do not send ``prompt_tokens``."""
        ids = array("i")
        ids.frombytes(b64decode(packed_ids))
        response = cls(text, ids, finish_reason)
        response.prompt_tokens = prompt_tokens
        return response
