"""The memory formulas of a plan against what two small runs on CPU really need at their peak."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tepo_megatron.bridge.architecture import read_model_spec
from tepo_megatron.config import ParallelConfig, RunConfig
from tepo_megatron.engine import parallel
from tepo_megatron.engine.platform import Platform
from tepo_megatron.launch.plan.memory import rank_memory
from tests.support.programs import run_program

SEQUENCES, TOKENS, VOCABULARY = 8, 64, 8192


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """55 million random parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=640,
        intermediate_size=1792,
        num_hidden_layers=10,
        num_attention_heads=10,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the measure is Linux' own")
@pytest.mark.parametrize("split", [{}, {"tp": 2, "sequence_parallel": True}], ids=["tp1", "tp2-sp"])
def test_the_predicted_peak_is_within_a_tenth_of_the_measured(split: dict[str, int], model: Path, tmp_path: Path) -> None:
    config = RunConfig.model_validate(
        {
            "model": {"path": str(model)},
            "engine": {"platform": "cpu", "micro_batch_tokens": SEQUENCES * TOKENS, "parallel": split},
            "train": {"minibatches": 1, "steps": 1},
        }
    )
    predicted = rank_memory(read_model_spec(model), config, 0, longest=TOKENS, step_tokens=SEQUENCES * TOKENS).total
    case: dict[str, Any] = {"config": config.model_dump(mode="json"), "out": str(tmp_path)}
    case |= {"sequences": SEQUENCES, "tokens": TOKENS, "vocab_size": VOCABULARY}
    (tmp_path / "case.json").write_text(json.dumps(case))
    start(config.engine.parallel.world_size, tmp_path / "case.json")
    measured = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("rank*.json"))]
    assert len(measured) == config.engine.parallel.world_size
    assert predicted == pytest.approx(max(measured), rel=0.1), (predicted / 2**20, [each / 2**20 for each in measured])


def start(world: int, case: Path) -> None:
    environment = {"GLOO_SOCKET_IFNAME": "lo", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    run_program("memory", case, ranks=world if world > 1 else None, environment=environment)


def test_the_engine_refuses_what_can_only_be_planned() -> None:
    platform = Platform("cpu", torch.device("cpu"), "gloo")
    with pytest.raises(ValueError, match=r"engine\.parallel\.vpp = 2 can be planned with, .* set it to 1"):
        parallel.initialize(ParallelConfig(pp=2, vpp=2), platform, seed=0)
