"""What ended a vLLM server, read from its log.

Several processes write one log. vLLM starts its lines with process, level and place, ``(Worker_TP1 pid=7) ERROR 11-21 19:40:24
[core.py:9] …``, also each line of a traceback that it logs; Python's own tracebacks and other libraries write bare lines.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_LINE = re.compile(
    r"(?:\((?P<process>[^)]* pid=\d+)\) )?"
    r"(?:(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) [\d-]+ [\d:]+ \[[^\]]*\] ?)?"
    r"(?P<text>.*)"
)
_TRACEBACK = "Traceback (most recent call last):"
_RAISED = re.compile(r"[A-Za-z_][\w.]*(:|$)")
"""The line after a traceback's frames, which are indented: ``ValueError: why``, or the bare name of an exception."""
_ANOTHER_FOLLOWS = ("During handling of the above exception", "The above exception was the direct cause")
_ERROR = re.compile(r"\b(\w*(Error|Exception)|error): \S")
"""A line that reports an error without a traceback: ``RuntimeError: why``, or argparse's ``program: error: why``."""


_CONSEQUENCES = re.compile(
    r"WorkerProc initialization failed due to an exception in a background process"
    r"|Engine core initialization failed"
    r"|Worker ?proc\S* .*died unexpectedly"
    r"|EngineDeadError|EngineCore encountered an issue"
)
"""What vLLM says when another of its processes has failed, whose own error is the cause; shown where there is no other."""
_TRACKER = "multiprocessing/resource_tracker.py"
"""Python's tracker complains when processes that shared memory end in disorder, which is never the cause."""


class _Line(NamedTuple):
    process: str
    """The process that wrote the line; empty where the line does not say."""
    level: str
    """vLLM's level; empty for a bare line."""
    text: str


def first_error(log: Sequence[str]) -> list[str]:
    """The lines that say what went wrong first; empty if the log reports no error.

    Later errors of a server are consequences: the engine reports that a worker died, and the API server that the engine did.
    That is the exception of the first traceback, of a chain the last, with the lines that belong to its message; without a
    traceback, the first line that is logged as an error or reads like one. What is logged below ERROR is skipped: a healthy
    server logs a traceback as a warning, because it is started without a tokenizer. So are complaints of Python's resource
    tracker; and what vLLM says about its other processes, as long as one of those says something itself.
    """
    lines = [line for line in map(_parse, log) if line.level in ("", "ERROR", "CRITICAL")]
    starts = [number for number, line in enumerate(lines) if line.text == _TRACEBACK and not _of_tracker(lines, number)]
    raised = [found for start in starts if (found := _raised(lines, start))]
    said = [[line.text] for line in lines if line.text and (line.level or _ERROR.search(line.text)) and line.text != _TRACEBACK]
    candidates = [*raised, *said]
    return next((found for found in candidates if not _CONSEQUENCES.search(found[0])), candidates[0] if candidates else [])


def _of_tracker(lines: Sequence[_Line], start: int) -> bool:
    return any(_TRACKER in line.text for line in lines[start + 1 : start + 2])


def _parse(line: str) -> _Line:
    found = _LINE.fullmatch(line)
    assert found is not None  # every part may be empty
    return _Line(found["process"] or "", found["level"] or "", found["text"])


def _raised(lines: Sequence[_Line], start: int) -> list[str]:
    """The exception of the traceback that begins at ``lines[start]``; empty if the log ends before it."""
    # Two workers that fail together write their tracebacks through one another.
    own = [line.text for line in lines[start:] if (line.process, line.level) == (lines[start].process, lines[start].level)]
    raised: list[str] = []
    in_frames = in_chain = True
    for text in own[1:]:
        if in_frames:
            if _RAISED.match(text):
                raised, in_frames, in_chain = [text], False, False
        elif text == _TRACEBACK:
            if not in_chain:
                break
            in_frames = True
        elif text.startswith(_ANOTHER_FOLLOWS):
            in_chain = True
        elif text.startswith(" ") and not in_chain:
            raised.append(text)  # pydantic's messages have several lines
        elif text and not in_chain:
            break
    return raised
