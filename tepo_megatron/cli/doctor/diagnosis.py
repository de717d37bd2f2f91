"""Results of ``tepo doctor``'s checks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "missing", "fail"]


@dataclass(frozen=True)
class Diagnosis:
    """``detail`` is a version or measurement, ``advice`` what it enables or how to correct it."""

    name: str
    status: Status
    detail: str
    advice: str = ""
    needed: bool = False


def diagnose(checks: Sequence[Callable[[], Diagnosis]]) -> list[Diagnosis]:
    """A check that raises is reported with its error."""
    results = []
    for check in checks:
        try:
            results.append(check())
        except Exception as error:
            name, detail = check.__name__.lstrip("_"), f"{type(error).__name__}: {error}"
            results.append(Diagnosis(name, "warn", detail, "this check itself failed"))
    return results


def is_fit(checks: Sequence[Diagnosis]) -> bool:
    return not any(check.needed and check.status in ("missing", "fail") for check in checks)


def has_gpu() -> bool:
    return os.path.exists("/dev/nvidiactl")
