"""Takes what looks like a secret out of what leaves the machine."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"

_SECRET_NAME = re.compile(r"(^|[_-])(api[_-]?key|key|token|secret|password|passwd|credentials?|authorization)$", re.IGNORECASE)
_IN_ADDRESS = re.compile(r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)")
_SHORTEST = 8
"""Values of the environment that are shorter are words that may stand anywhere."""


def without_secrets(value: Any) -> Any:
    """The same mapping, list or text with ``***`` in place of the values of fields whose name ends in key, token, secret or
    password, of the user and password in an address, and of whatever the environment holds under such a name.
    """
    return _hide(value, _in_environment())


def _in_environment() -> list[str]:
    found = {value for name, value in os.environ.items() if _SECRET_NAME.search(name) and len(value) >= _SHORTEST}
    return sorted(found, key=len, reverse=True)


def _hide(value: Any, known: list[str]) -> Any:
    if isinstance(value, Mapping):
        return {
            key: HIDDEN if isinstance(each, str) and _SECRET_NAME.search(str(key)) else _hide(each, known)
            for key, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [_hide(each, known) for each in value]
    if isinstance(value, str):
        for secret in known:
            value = value.replace(secret, HIDDEN)
        return _IN_ADDRESS.sub(HIDDEN, value)
    return value
