"""A problem and a response as verifiers get them. Their processes import nothing more of this package's values, nor NumPy."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Problem:
    """One task of a dataset: what the model reads, and what the verifier compares its answer with.

    ``metadata``: every other key of its line in the data file, with JSON's values, for verifiers. Two problems that differ in
    nothing else are equal. ``messages``: where the model reads the prompt in its chat template, the (role, content) pairs; then
    ``prompt`` is the user's last message. ``source``: which of several sources it is of, by name; empty where there is one.
    """

    id: str
    prompt: str
    answer: str
    metadata: Mapping[str, Any] = field(default_factory=dict, compare=False)
    messages: tuple[tuple[str, str], ...] = ()
    source: str = ""


class ResponseText(str):
    """What a verifier gets as a response: its text, a ``str``, with what else is known of it.

    ``finish_reason`` is ``"stop"`` (the model ended it) or ``"length"`` (cut at the longest response allowed). What is made of
    it, such as ``response.strip()``, is a plain ``str``. ``prompt_tokens``: of a turn of an episode, how many tokens the model
    had read; 0 elsewhere.
    """

    finish_reason: str
    prompt_tokens: int = 0
    _ids: Iterable[int]

    def __new__(cls, text: str, token_ids: Iterable[int] = (), finish_reason: str = "stop") -> ResponseText:
        made = super().__new__(cls, text)
        made._ids, made.finish_reason = token_ids, finish_reason
        return made

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids as they were sampled, the end token included. Empty where only the text is known."""
        return tuple(self._ids)

    @cached_property
    def packed_ids(self) -> bytes:
        """The ids as 32-bit integers of this machine, as they travel to the process that runs the verifier."""
        with suppress(TypeError):  # what has no buffer
            view = memoryview(self._ids)  # type: ignore[arg-type]
            if view.format == "i":
                return view.tobytes()
        return array("i", self._ids).tobytes()

    @classmethod
    def unpack(cls, text: str, packed_ids: bytes, finish_reason: str) -> ResponseText:
        """The other end of ``packed_ids``."""
        ids = array("i")
        ids.frombytes(packed_ids)
        return cls(text, ids, finish_reason)
