"""Plugins in a run: a changed one makes another run, and every rank has the same bytes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tepo_megatron.config import RunConfig
from tepo_megatron.config.load import load_run
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.trainer.run_compatibility import compare_runs, describe_run, refusal
from tests.support.launch import run_dist

EXAMPLE = Path(__file__).parents[3] / "examples/own_objective"
MODEL = resolve_model_path("builtin:tiny")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    (tmp_path / "my_objective.py").write_text((EXAMPLE / "my_objective.py").read_text())
    return tmp_path / "my_objective.py"


def load(plugin: Path) -> RunConfig:
    return load_run(None, ["objective.preset=grpo", f"objective.plugins=[{plugin}]", "objective.trust_region={kind: gate}"])


def described(plugin: Path) -> dict[str, Any]:
    """As it comes back from a checkpoint's JSON."""
    return json.loads(json.dumps(describe_run(load(plugin), MODEL)))


def test_a_changed_plugin_is_another_run_and_may_be_let_through(copy: Path) -> None:
    saved = described(copy)
    assert compare_runs(saved, described(copy)) == []
    copy.write_text(copy.read_text() + "\n# another\n")
    (found,) = compare_runs(saved, described(copy))
    assert refusal([found], []) is not None
    assert f'objective.plugins\' my_objective.py, by its digest: "{saved["plugins"]["my_objective.py"]}" -> ' in str(found)
    assert refusal([found], ["objective.plugins"]) is None


def test_the_same_plugin_elsewhere_is_the_same_run(copy: Path) -> None:
    elsewhere = copy.with_name("renamed.py")
    elsewhere.write_text(copy.read_text())
    assert refusal(compare_runs(described(copy), described(elsewhere)), []) is None


def test_a_checkpoint_of_before_there_were_plugins(copy: Path) -> None:
    usual = load_run(None, ["objective.preset=grpo"])
    saved = describe_run(usual, MODEL)
    for field in ("plugins", "mask", "penalty"):
        del saved["config"]["objective"][field]
    del saved["plugins"]
    assert compare_runs(saved, describe_run(usual, MODEL)) == []
    assert "by its digest" in str(refusal(compare_runs(saved, describe_run(load(copy), MODEL)), []))


def start(rank: int, world: int, folder: Path) -> None:
    """An engine whose plugin may differ on the last rank."""
    from tepo_megatron.trainer.megatron.engine import Engine

    os.environ["WORLD_SIZE"] = str(world)
    split = load(folder / f"rank{rank}" / "my_objective.py").model_dump() | {"engine": {"parallel": {"dp": world}}}
    Engine(RunConfig.model_validate(split), MODEL)


def test_ranks_compare_their_bytes(copy: Path) -> None:
    for rank in range(2):
        copy.with_name(f"rank{rank}").mkdir()
        (copy.with_name(f"rank{rank}") / copy.name).write_text(copy.read_text() + "\n# another\n" * rank)
    with pytest.raises(
        RuntimeError,
        match=r"rank 1 on .* has other bytes of my_objective\.py than rank 0 on .* \(digest [0-9a-f]+ and [0-9a-f]+",
    ):
        run_dist(2, start, copy.parent)
