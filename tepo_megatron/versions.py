"""Supported and installed versions of the large packages, without imports.

``tests/unit/test_versions.py`` holds ``pyproject.toml``, scripts, pins and images to these ranges.
"""

from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

MEGATRON_LINE = "0.16"
MEGATRON_RANGE = f">={MEGATRON_LINE}.1,<0.17"  # the engine uses and patches private parts

TE_RANGE = ">=2.9,<2.12"

TRITON_RANGE = ">=3.5,<4"

VLLM_RANGE = ">=0.32,<0.34"  # the weights' plugin uses private parts


def in_range(version: str, supported: str) -> bool:
    """Accepts pre-releases and local builds (``+cpu``)."""
    return SpecifierSet(supported).contains(version, prereleases=True)


def installed_version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def requirements_of(distribution: str) -> list[Requirement]:
    try:
        requirements = [Requirement(text) for text in metadata.requires(distribution) or []]
    except metadata.PackageNotFoundError:
        return []
    return [entry for entry in requirements if entry.marker is None or entry.marker.evaluate({"extra": ""})]
