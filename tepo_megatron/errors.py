"""Which errors are sentences for the user, and which are ours to debug."""

from __future__ import annotations

import dis
import os

_RAISE = dis.opmap["RAISE_VARARGS"]


class NotFiniteError(ValueError):
    """A number computed from a batch is NaN or infinite. An update that meets one is skipped."""


def is_ours(error: BaseException) -> bool:
    """Whether a ``raise`` in this package made the error: a ``ValueError`` or ``RuntimeError`` that is a sentence for the user.

    The same types out of a library, or out of an operator (``a @ b`` of wrong shapes), are bugs, and need their traceback.
    """
    trace = error.__traceback__
    if not isinstance(error, ValueError | RuntimeError) or trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    code, module = trace.tb_frame.f_code.co_code, trace.tb_frame.f_globals.get("__name__", "")
    return module.split(".")[0] == "tepo_megatron" and code[trace.tb_lasti] == _RAISE


def describe(error: BaseException) -> str:
    """The error's text, after the type's name if it is not one of ours."""
    return str(error) if is_ours(error) else f"{type(error).__name__}: {error}"


def wants_traceback() -> bool:
    """Whether ``TEPO_TRACEBACK=1`` asks for tracebacks of errors that are sentences, too."""
    return os.environ.get("TEPO_TRACEBACK") == "1"
