"""Tells errors that are sentences for the user from bugs."""

import dis
import os

_RAISE = dis.opmap["RAISE_VARARGS"]


class NotFiniteError(ValueError):
    """A number computed from a batch is NaN or infinite. The update is skipped."""


def is_ours(error: BaseException) -> bool:
    """Returns whether a ``raise`` in this package made the error: its text is then for the user.

    A ``ValueError`` from a library or an operator (``a @ b``) is a bug and needs its traceback.
    """
    trace = error.__traceback__
    if not isinstance(error, ValueError | RuntimeError) or trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    code, module = trace.tb_frame.f_code.co_code, trace.tb_frame.f_globals.get("__name__", "")
    return module.split(".")[0] == "tepo_megatron" and code[trace.tb_lasti] == _RAISE


def describe(error: BaseException) -> str:
    return str(error) if is_ours(error) else f"{type(error).__name__}: {error}"


def wants_traceback() -> bool:
    return os.environ.get("TEPO_TRACEBACK") == "1"
