"""Plugins in a run: a changed one makes another run, and every rank has the same bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tepo_megatron.config import RunConfig
from tepo_megatron.config.load import load_run
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.trainer.megatron import engine
from tepo_megatron.trainer.run_compatibility import compare_runs, describe_run, refusal

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


def test_ranks_compare_their_bytes(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(copy)

    def gather(own: Any, *, device: torch.device) -> list[Any]:
        del device
        return [own, own, ["node7", {"my_objective.py": "0123456789abcdef"}]]

    monkeypatch.setattr(engine, "all_gather_json", gather)
    with pytest.raises(
        ValueError, match=r"rank 2 on node7 has other bytes of my_objective\.py than rank 0 on .* \(digest 0123456"
    ):
        engine.check_same_plugins(config, torch.device("cpu"))
    monkeypatch.setattr(engine, "all_gather_json", lambda own, device: [own, own])
    engine.check_same_plugins(config, torch.device("cpu"))
    monkeypatch.setattr(engine, "all_gather_json", None)  # nothing is asked of a run without plugins
    engine.check_same_plugins(load_run(None, []), torch.device("cpu"))
