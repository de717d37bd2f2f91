"""Checks text from outside, escapes it for a terminal, and mends standard streams, with the standard library only."""

import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

_MOST_NESTED = 100


def flat(values: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Turns ``{"a": {"b": 1}}`` into ``{"a.b": 1}``."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        result |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {f"{prefix}{key}": value}
    return result


def text_fault(value: Any) -> str | None:
    """``value``: text, or JSON values with keys. Returns None for Unicode that is not nested too deeply."""
    return _fault(value, _surrogate_in)


def _fault(value: Any, fault_of: Callable[[str], str | None]) -> str | None:
    level = [value]
    for _ in range(_MOST_NESTED):
        for item in level:
            if isinstance(item, str) and (fault := fault_of(item)):
                return fault
        level = list({id(inner): inner for item in level for inner in _inside(item)}.values())  # YAML may repeat a part
        if not level:
            return None
    return f"values nested deeper than {_MOST_NESTED} levels"


def check_text(value: Any, place: str) -> None:
    """Raises ValueError, with ``place``, for a ``text_fault``."""
    fault = text_fault(value)
    if fault is not None:
        raise ValueError(f"{place} has {fault}; change it, or leave it out")


def parse_json(raw: bytes | str, what: object, kind: type = object) -> Any:
    """Raises ValueError, with ``what``, for no JSON, values nested too deeply, or another ``kind``."""
    try:
        value = json.loads(raw)
    except RecursionError:
        raise ValueError(f"{what} has values nested deeper than {_MOST_NESTED} levels") from None
    except ValueError as error:
        raise ValueError(f"{what} is not JSON ({error})") from None
    opening: tuple[Any, ...] = ("[", "{") if isinstance(raw, str) else (b"[", b"{")
    if sum(map(raw.count, opening)) > _MOST_NESTED and (fault := _fault(value, lambda _: None)):
        raise ValueError(f"{what} has {fault}")
    if not isinstance(value, kind):
        raise ValueError(f"{what} holds a {type(value).__name__}, not a {kind.__name__}")
    return value


def read_json(raw: bytes, what: str) -> Any:
    """As ``parse_json``; raises ValueError for no Unicode too."""
    value = parse_json(raw, what)
    check_text(value, what)
    return value


def is_key(text: str) -> bool:
    """Returns whether HTTP's headers take it: visible ASCII characters alone."""
    return bool(text) and all("!" <= item <= "~" for item in text)


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
        return item if item.isprintable() and (encoding is None or item.encode(encoding, "ignore")) else _escaped(item)

    return _NOT_ASCII.sub(shown, text)


def echo(text: str, *, err: bool = False, end: str = "\n") -> None:
    """Writes ``text`` and ``end``, whatever the stream can show."""
    stream = sys.stderr if err else sys.stdout
    if stream is not None:  # it was closed before Python started
        stream.write(printable(text, stream.encoding) + end)
        stream.flush()


def _escaped(character: str) -> str:
    """Beyond U+FFFF two surrogates, so that JSON stays JSON."""
    units = character.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[start : start + 4]}" for start in range(0, len(units), 4))


def open_closed_streams() -> None:
    """Puts ``/dev/null`` where the starter closed a stream (``>&-``): another file or socket would take its number, and what
    processes below print. Call it before any file is opened.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number and not _is_open(number):
                os.dup2(null, number)
                os.close(null)
                null = number
            os.set_inheritable(null, null == number)
            setattr(sys, name, os.fdopen(null, "w" if number else "r", closefd=False))


def _is_open(number: int) -> bool:
    with suppress(OSError):
        os.fstat(number)
        return True
    return False


def outlive_readers() -> None:
    """Printing never fails from now on: work must not end because ``head`` ended, a terminal is gone or the log's disk full."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper):
            continue
        raw = getattr(stream.buffer, "raw", stream.buffer)  # python -u has no buffer
        if type(raw) is io.FileIO:
            stream.flush()
            lasting: Any = _LastingFile(raw.fileno(), "w", closefd=False)
            buffer = lasting if raw is stream.buffer else io.BufferedWriter(lasting)
            modes: dict[str, Any] = {"line_buffering": stream.line_buffering, "write_through": stream.write_through}
            setattr(sys, name, io.TextIOWrapper(buffer, stream.encoding, stream.errors, **modes))


class _LastingFile(io.FileIO):
    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:  # nobody reads it any more
            return memoryview(data).nbytes
