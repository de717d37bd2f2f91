"""The memory formulas of a plan against what two small runs on CPU really need at their peak."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tepo_megatron.config import RunConfig
from tepo_megatron.plan.memory import TrainingRanks
from tepo_megatron.weights.architecture import read_model_spec
from tests.support.launch import run_world
from tests.support.random_models import write_llama

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


INTERLEAVED = {"pp": 2, "vpp": 2, "num_layers_in_first_pipeline_stage": 6, "num_layers_in_last_pipeline_stage": 4}


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the measure is Linux' own")
@pytest.mark.parametrize(
    ("engine", "lora"),
    [
        ({"parallel": {"tp": 2, "sequence_parallel": True}}, None),
        ({"parallel": {"cp": 2}}, None),
        ({"parallel": INTERLEAVED, "micro_batch_tokens": SEQUENCES * TOKENS // 4}, None),
        ({}, {"rank": 8, "alpha": 16}),  # training all weights needs twice as much
        ({"head": "fused"}, None),  # of a large vocabulary, where logits would need half as much again
    ],
    ids=["tp2-sp", "cp2", "pp2-vpp2", "lora", "without logits"],
)
def test_the_predicted_peak_is_within_a_tenth_of_the_measured(
    engine: dict[str, Any], lora: dict[str, Any] | None, model: Path, tmp_path: Path
) -> None:
    """All sequences are in one micro-batch, unless ``engine`` says otherwise."""
    tokens = TOKENS
    if "head" in engine:
        tokens, model = 2 * TOKENS, tmp_path / "model"
        write_llama(model, hidden_size=64, intermediate_size=8192, vocab_size=65536)
    config = RunConfig.model_validate(
        {
            "model": {"path": str(model), "lora": lora},
            "engine": {"platform": "cpu", "micro_batch_tokens": SEQUENCES * tokens, **engine},
            "train": {"minibatches": 1, "steps": 1},
        }
    )
    stages, world = config.engine.parallel.pp, config.engine.parallel.world_size
    ranks, step = TrainingRanks(read_model_spec(model), config), SEQUENCES * tokens
    predicted = [ranks.memory(stage, longest=tokens, step_tokens=step).total for stage in range(stages)]
    case = {"config": config.model_dump(mode="json"), "out": str(tmp_path), "sequences": SEQUENCES, "tokens": tokens}
    (tmp_path / "case.json").write_text(json.dumps(case))
    run_world("memory", world, tmp_path / "case.json")
    measured = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(world)]
    largest = [max(measured[stage * world // stages : (stage + 1) * world // stages]) for stage in range(stages)]
    assert predicted == pytest.approx(largest, rel=0.1), [each / 2**20 for each in (*predicted, *largest)]
