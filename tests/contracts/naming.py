"""Names the member at fault where a check of a contract meets an error that it does not expect."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

Check = Callable[..., None]


def naming_members(check: Check, name: str, raises: type[AssertionError] = AssertionError) -> Check:
    """The check, which raises ``raises`` with a sentence that begins with a member, whatever a member raises.

    ``name`` is the member that the check is about. It is at fault for what goes wrong in the check itself, as with a value of
    another type.
    """

    @wraps(check)
    def run(*args: Any) -> None:
        try:
            check(*args)
        except Exception as error:
            member = _failed_member(error)
            if isinstance(error, AssertionError) and member is None:
                raise
            raise raises(f"{member or name} raised {type(error).__name__}: {error}") from error

    return run


def refused(
    member: str, kinds: type[Exception] | tuple[type[Exception], ...], call: Callable[[], object], *, naming: str = ""
) -> None:
    """Raises AssertionError if ``call`` does not raise one of ``kinds``, with ``naming`` in its sentence."""
    try:
        call()
    except kinds as error:
        if naming not in str(error):
            raise AssertionError(f"{member}: an error that does not name {naming}: {error}") from error
    else:
        raise AssertionError(f"{member}: no error where the protocol has one")


def _failed_member(error: BaseException) -> str | None:
    """The function that a check called, and the first ones that it called, such as ``Sampler.generate → FleetStream.submit``.

    None if the check itself raised.
    """
    names: list[str] = []
    contracts, trace = Path(__file__).parent, error.__traceback__
    while trace is not None:
        code, trace = trace.tb_frame.f_code, trace.tb_next
        if names or Path(code.co_filename).parent != contracts or code.co_qualname.startswith("Broken"):
            names.append(code.co_qualname)
    return " → ".join(names[:3]) or None
