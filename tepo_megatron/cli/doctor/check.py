"""One thing that ``tepo doctor`` looked at, and what checks have in common: metadata of distributions, and the driver."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

from packaging.requirements import Requirement

Status = Literal["ok", "warn", "missing", "fail"]


@dataclass(frozen=True)
class Check:
    """What one check found: ``detail`` is a version or a measure, ``advice`` what it enables or how to mend it.

    ``needed`` tells whether a run on CPU needs it.
    """

    name: str
    status: Status
    detail: str
    advice: str = ""
    needed: bool = False


def version_of(distribution: str) -> str | None:
    """The installed version, or ``None``; from metadata, so that nothing is imported."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def has_gpu() -> bool:
    """Whether NVIDIA's driver is there."""
    return os.path.exists("/dev/nvidiactl")


def requirements_of(distribution: str) -> list[Requirement]:
    """What a distribution asks for here, without its extras; empty if it is not installed."""
    try:
        wanted = [Requirement(text) for text in metadata.requires(distribution) or []]
    except metadata.PackageNotFoundError:
        return []
    return [each for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})]
