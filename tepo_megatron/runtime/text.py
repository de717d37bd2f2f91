"""Checks text from outside, and escapes it for a terminal, with the standard library only."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

_MOST_NESTED = 100


def text_fault(value: Any) -> str | None:
    """``value``: text, or JSON values with keys. Returns None for Unicode that is not nested too deeply."""
    level = [value]
    for _ in range(_MOST_NESTED):
        for item in level:
            if isinstance(item, str) and (fault := _surrogate_in(item)):
                return fault
        level = [inner for item in level for inner in _inside(item)]
        if not level:
            return None
    return f"values nested deeper than {_MOST_NESTED} levels"


def check_text(value: Any, place: str) -> None:
    """Raises ValueError, with ``place``, for a :func:`text_fault`."""
    fault = text_fault(value)
    if fault is not None:
        raise ValueError(f"{place} has {fault}; change it, or leave it out")


def read_json(raw: bytes, what: str) -> Any:
    """Raises ValueError, with ``what``, for no JSON, no Unicode, or values nested too deeply."""
    try:
        value = json.loads(raw)
    except RecursionError:
        raise ValueError(f"{what} has values nested deeper than {_MOST_NESTED} levels") from None
    except ValueError as error:
        raise ValueError(f"{what} is not JSON ({error})") from None
    check_text(value, what)
    return value


def valid_text(text: str) -> str:
    """Escapes lone surrogates (``\\ud83d``), so that every writer takes the text."""
    return text.encode("utf-8", "backslashreplace").decode() if _surrogate_in(text) else text


def _surrogate_in(text: str) -> str | None:
    try:
        str.encode(text)
    except UnicodeEncodeError as error:
        return f"the lone surrogate {text[error.start]!r}, half of a character, as character {error.start + 1}"
    return None


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return (*value, *value.values())
    return value if isinstance(value, list | tuple) else ()


_NOT_ASCII = re.compile(r"[^\n\t -~]")


def printable(text: str, encoding: str | None = None) -> str:
    """Escapes what does not print or is not in ``encoding`` as JSON does (``\\u001b``)."""

    def shown(match: re.Match[str]) -> str:
        item = match[0]
        return item if item.isprintable() and (encoding is None or _is_in(item, encoding)) else _escaped(item)

    return _NOT_ASCII.sub(shown, text)


def echo(text: str, *, err: bool = False) -> None:
    """Writes ``text`` and a line break, whatever the stream can show."""
    stream = sys.stderr if err else sys.stdout
    if stream is not None:  # it was closed before Python started
        stream.write(printable(text, stream.encoding) + "\n")
        stream.flush()


def _is_in(character: str, encoding: str) -> bool:
    try:
        character.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


def _escaped(character: str) -> str:
    """Beyond U+FFFF two surrogates, so that JSON stays JSON."""
    units = character.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[start : start + 4]}" for start in range(0, len(units), 4))
