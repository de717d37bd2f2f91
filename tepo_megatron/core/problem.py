"""A problem and a response as verifiers receive them. Verifier processes import nothing else of core, and no NumPy."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Problem:
    """One task of a dataset: the prompt, and the answer for the verifier.

    ``metadata``: all other keys of its line in the data file, ignored by ``==``. ``messages``: (role, content) pairs for a chat
    template; ``prompt`` is then the last user message. ``source``: the name of its data source, if several.
    """

    id: str
    prompt: str
    answer: str
    metadata: Mapping[str, Any] = field(default_factory=dict, compare=False)
    messages: tuple[tuple[str, str], ...] = ()
    source: str = ""


class ResponseText(str):
    """The text of a response, a ``str``, with its tokens.

    ``finish_reason`` is ``"stop"`` (the model ended it) or ``"length"`` (cut). Methods such as ``strip()`` return a plain
    ``str``. ``prompt_tokens``: tokens before a turn of an episode, else 0.
    """

    finish_reason: str
    prompt_tokens: int = 0
    _ids: Iterable[int]

    def __new__(cls, text: str, token_ids: Iterable[int] = (), finish_reason: str = "stop") -> ResponseText:
        response = super().__new__(cls, text)
        response._ids, response.finish_reason = token_ids, finish_reason
        return response

    @property
    def token_ids(self) -> tuple[int, ...]:
        """With the end token; empty if only the text is known."""
        return tuple(self._ids)

    @cached_property
    def packed_ids(self) -> bytes:
        """Native 32-bit integers."""
        with suppress(TypeError):  # no buffer
            view = memoryview(self._ids)  # type: ignore[arg-type]
            if view.format == "i":
                return view.tobytes()
        return array("i", self._ids).tobytes()

    @classmethod
    def unpack(cls, text: str, packed_ids: bytes, finish_reason: str) -> ResponseText:
        ids = array("i")
        ids.frombytes(packed_ids)
        return cls(text, ids, finish_reason)
