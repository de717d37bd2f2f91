"""Names the member at fault where a check of a contract meets an error that it does not expect."""

from collections.abc import Callable, Container
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any

Check = Callable[..., None]


def naming_members(check: Check, name: str) -> Check:
    """The check, which raises AssertionError with a sentence that begins with a member, whatever a member raises.

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
            raise AssertionError(f"{member or name} raised {type(error).__name__}: {error}") from error

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


def members_of(protocol: type) -> dict[str, Any]:
    entered = ("__enter__", "__exit__", "__iter__")
    return {
        name: member
        for base in reversed(protocol.__mro__)
        for name, member in vars(base).items()
        if (not name.startswith("_") or name in entered) and (callable(member) or isinstance(member, property))
    }


def have_members(subject: Any, protocol: type, *, defaults: Container[str] = ()) -> None:
    """Raises AssertionError for a member that is missing, or that cannot be called as the protocol does.

    ``defaults``: members that a subclass of the protocol may inherit.
    """
    for name, member in members_of(protocol).items():
        label = f"{protocol.__name__}.{name}"
        is_inherited = getattr(type(subject), name, None) is member and name not in defaults
        exists = name in dir(subject) and not is_inherited
        assert exists, f"{label} is missing"
        if isinstance(member, property) or name.startswith("_"):
            continue
        own = getattr(subject, name)
        assert callable(own), f"{label} is missing"
        expected, actual = list(signature(member).parameters.values())[1:], signature(own).parameters.values()
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in actual)
        names = [parameter.name for parameter in expected]
        assert takes_any or [parameter.name for parameter in actual] == names, f"{label} has other parameters"
        positional = [None for parameter in expected if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
        by_name = {parameter.name: None for parameter in expected if parameter.kind is parameter.KEYWORD_ONLY}
        try:
            signature(own).bind(*positional, **by_name)
        except TypeError as error:
            raise AssertionError(f"{label} cannot be called as the protocol does: {error}") from None


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
