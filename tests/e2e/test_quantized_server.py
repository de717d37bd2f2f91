"""A real vLLM server in FP8 takes a float32 trainer's shards, quantises them itself, and says nearly what the trainer does."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.launch import run_world


def test_shards_are_quantised_as_full_tensors_are_and_the_canary_passes(tmp_path: Path) -> None:
    run_world("quantized_server", 1, tmp_path)
    said = json.loads((tmp_path / "report.json").read_text())
    # To the last bit: the same FP8 weights and the same scales, whoever took the tensors apart.
    assert said["first_by_shards"] == said["first_from_disk"]
    assert said["other_by_shards"] == said["other_by_tensors"]
    moved = max(abs(a - b) for a, b in zip(said["first_from_disk"], said["other_by_shards"], strict=True))
    assert moved > 2 * said["gap"]
    assert 0.01 < said["gap"] < 1.0  # far above what float32 shows: it does compute in FP8
