"""Which versions of the large packages this one is written for, and which are installed.

Reads metadata, and imports none of them. ``tests/unit/test_versions.py`` holds ``pyproject.toml``, scripts, pins and images to
these ranges.
"""

from __future__ import annotations

from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

MEGATRON_LINE = "0.16"
MEGATRON_RANGE = f">={MEGATRON_LINE}.1,<0.17"
"""Megatron-Core: the engine uses, and on a CPU patches, what it does not promise to keep."""

TE_RANGE = ">=2.9,<2.12"
"""Transformer Engine: what Megatron-Core of that line is made for."""

TRITON_RANGE = ">=3.5,<4"
"""Triton, for the kernels of ``vocab_parallel``."""

VLLM_RANGE = ">=0.32,<0.33"
"""vLLM: the plugin that takes new weights uses what it does not promise to keep."""


def in_range(version: str, supported: str) -> bool:
    """Whether ``version`` lies in a range such as ``VLLM_RANGE``; pre-releases and local builds (``+cpu``) may."""
    return SpecifierSet(supported).contains(version, prereleases=True)


def installed_version(distribution: str) -> str | None:
    """The installed version, or ``None``; from metadata, so that nothing is imported."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def requirements_of(distribution: str) -> list[Requirement]:
    """What a distribution asks for here, without its extras; empty if it is not installed."""
    try:
        wanted = [Requirement(text) for text in metadata.requires(distribution) or []]
    except metadata.PackageNotFoundError:
        return []
    return [each for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})]
