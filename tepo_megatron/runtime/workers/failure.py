"""Why a response has no reward, as a sentence; and a memory of failed responses."""

from __future__ import annotations

import errno
import linecache
import socket
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tepo_megatron.runtime.workers.child import NO_MEMORY, OPEN_FILES

_LONGEST_ERROR = 500
_NO_NETWORK = (errno.ENETUNREACH, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
_HINTS = {
    **dict.fromkeys(("signal 6", "signal 7", "signal 11"), "a C library does this that gets no more memory than {memory}"),
    "signal 9": "the kernel does this when the machine's memory runs out",
    f"exit status {NO_MEMORY}": "it got no more memory than {memory}",
}


class RememberedFailures:
    def __init__(self, most: int = 10_000) -> None:
        self._most = most
        self._causes: OrderedDict[bytes, str] = OrderedDict()

    def add(self, key: bytes, cause: str) -> None:
        self._causes[key] = cause
        if len(self._causes) > self._most:
            self._causes.popitem(last=False)

    def get(self, key: bytes) -> str | None:
        if key in self._causes:
            self._causes.move_to_end(key)
        return self._causes.get(key)


def why_it_ended(exit_status: str, memory_mb: int, *, what: str = "verifier", section: str = "reward") -> str:
    """The sentence for a worker that ended during a response. ``exit_status`` as of `WorkerProcess.exit_status`; ``section``:
    the configuration's section with the limits of ``what``."""
    hint = _HINTS.get(exit_status, "").format(memory=f"{section}.memory_mb = {memory_mb}")
    return f"the {what}'s process ended ({exit_status}){'; ' if hint else ''}{hint}"


def why_it_raised(error: BaseException, verifier: Callable[..., Any], setup: Mapping[str, Any]) -> str:
    """The sentence for a verifier's error: type, text, the limit that caused it, and its line.

    ``setup``: the limits by name; for others than verifiers ``setup["what"]`` and ``setup["section"]``.
    """
    what, section = setup.get("what", "verifier"), setup.get("section", "reward")
    if isinstance(error, MemoryError):
        return f"the {what} needed more memory than {section}.memory_mb = {setup['memory_mb']}{_place(error, verifier)}"
    text = f"the {what} raised {type(error).__name__}: {error}"
    return f"{text[:_LONGEST_ERROR]}{_limit_behind(error, setup)}{_place(error, verifier)}"


def _limit_behind(error: BaseException, setup: Mapping[str, Any]) -> str:
    what, section = setup.get("what", "verifier"), setup.get("section", "reward")
    for each in _chain(error):
        if not isinstance(each, OSError):
            continue
        if each.errno == errno.EFBIG:
            return f" ({_a(what)}'s files may have {section}.file_mb = {setup['file_mb']})"
        if each.errno == errno.EMFILE:
            return f" ({_a(what)} may have {OPEN_FILES} files open)"
        if not setup["network"] and (isinstance(each, socket.gaierror) or each.errno in _NO_NETWORK):
            return f" (this {what} has no network; {section}.network=true gives it one)"
    return ""


def _a(what: str) -> str:
    return f"{'an' if what[0] in 'aeiou' else 'a'} {what}"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def place_of(verifier: Callable[..., Any], line: int | None = None) -> str:
    """``, at file:line: "…"`` of a verifier, by default of its definition; empty if unknown."""
    code = getattr(verifier, "__code__", None)
    if code is None:
        return ""
    line = code.co_firstlineno if line is None else line
    return f', at {code.co_filename}:{line}: "{linecache.getline(code.co_filename, line).strip()[:120]}"'


def _place(error: BaseException, verifier: Callable[..., Any]) -> str:
    code = getattr(verifier, "__code__", None)
    frames = traceback.extract_tb(error.__traceback__) if code is not None else ()
    lines = [frame.lineno for frame in frames if code is not None and frame.filename == code.co_filename]
    return place_of(verifier, lines[-1] if lines else None)
