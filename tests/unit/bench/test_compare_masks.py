"""The comparison of the ways to tell falling entropy: what it counts, and a small recorded run that it goes through."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tepo_megatron.config import RunConfig
from tepo_megatron.config.load import dump_resolved
from tepo_megatron.sampler.rollout_file import write_rollouts
from tepo_megatron.tools.bench.recipes import SIZES, make_model, random_rollouts
from tepo_megatron.tools.bench.studies.compare_masks import by_entropy

ROOT = Path(__file__).parents[3]
CHOSEN = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]], dtype=torch.bool)
ENTROPY = torch.tensor([0.3, 0.1, 0.4, 0.2])


def test_shares_by_hand():
    (found,) = by_entropy(CHOSEN, ENTROPY, 1)
    assert (found["tokens"], found["entropy"]) == (4, pytest.approx([0.1, 0.4]))
    assert found["masked"] == {"measured": 0.25, "covariance": 0.5, "first_order": 0.75}
    pairs = ("measured / covariance", "measured / first_order", "covariance / first_order")
    assert found["alike"] == dict(zip(pairs, (0.75, 0.5, 0.75), strict=True))
    assert found["overlap"] == pytest.approx(dict(zip(pairs, (1 / 2, 1 / 3, 2 / 3), strict=True)))


def test_parts_by_entropy():
    """Tokens 1 and 3 have the least entropy, 0 and 2 the most; a part without tokens has no shares."""
    low, high, empty = by_entropy(CHOSEN, ENTROPY, 2) + by_entropy(CHOSEN[:, :0], ENTROPY[:0], 1)
    assert (low["entropy"], low["masked"]["first_order"], low["masked"]["measured"]) == (pytest.approx([0.1, 0.2]), 0.5, 0.0)
    assert (high["entropy"], high["masked"]["first_order"], high["masked"]["measured"]) == (pytest.approx([0.3, 0.4]), 1.0, 0.5)
    assert math.isnan(empty["masked"]["measured"])


@pytest.mark.slow
def test_a_recorded_run(tmp_path):
    """Half of the responses have a positive advantage; in a first update nothing has been measured yet, and the others act."""
    run = tmp_path / "run"
    make_model(tmp_path / "model", SIZES["tiny"])
    (tmp_path / "model" / "tokenizer.json").touch()  # a model folder without a tokenizer is refused; nothing reads this one
    for step in range(2):
        write_rollouts(run / "rollouts", step, random_rollouts(8, 20, SIZES["tiny"]["vocab_size"]))
    document = {
        "name": "two steps",
        "output": str(run),
        "model": {"path": str(tmp_path / "model")},
        "engine": {"parallel": {"tp": 2, "sequence_parallel": True}, "micro_batch_tokens": 50},
        "optimizer": {"lr": 1e-3, "warmup_steps": 0},
        "train": {"steps": 2, "minibatches": 2},
    }
    (run / "resolved.yaml").write_text(dump_resolved(RunConfig.model_validate(document)))
    command = [sys.executable, "-m", "tepo_megatron.tools.bench.studies.compare_masks", str(run)]
    done = subprocess.run([*command, "--steps", "2", "--output", str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    record = json.loads((tmp_path / "masks-float32.json").read_text())
    first, second = record["updates"]
    assert first["tokens"] + second["tokens"] == 2 * 8 * 20 / 2
    assert first["masked"]["measured"] == 0
    assert 0 < first["masked"]["first_order"] < 1
    assert 0 < second["masked"]["measured"] < 1
    assert [found["tokens"] for found in record["by_entropy"]] == [second["tokens"] // 4] * 4
    table = (tmp_path / "masks-float32.md").read_text()
    assert "| measured | – |" in table
    assert "two steps · float32 · 2 steps of 2 updates" in table
