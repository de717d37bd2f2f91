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
from tests.support.programs import run_program
from tests.support.small_llama import write_llama

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


needs_linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the measure is Linux' own")


INTERLEAVED = {"pp": 2, "vpp": 2, "num_layers_in_first_pipeline_stage": 6, "num_layers_in_last_pipeline_stage": 4}


@needs_linux
@pytest.mark.parametrize(
    ("engine", "lora"),
    [
        ({"parallel": {"tp": 2, "sequence_parallel": True}}, None),
        ({"parallel": {"cp": 2}}, None),
        ({"parallel": INTERLEAVED, "micro_batch_tokens": SEQUENCES * TOKENS // 4}, None),
        ({}, {"rank": 8, "alpha": 16}),  # training all weights needs twice as much
    ],
    ids=["tp2-sp", "cp2", "pp2-vpp2", "lora"],
)
def test_the_predicted_peak_is_within_a_tenth_of_the_measured(
    engine: dict[str, Any], lora: dict[str, Any] | None, model: Path, tmp_path: Path
) -> None:
    predicted, measured = predicted_and_measured(model, engine, SEQUENCES, TOKENS, tmp_path, lora=lora)
    assert predicted == pytest.approx(measured, rel=0.1), (in_mib(predicted), in_mib(measured))


@needs_linux
def test_the_predicted_peak_without_logits_is_within_a_tenth_of_the_measured(tmp_path: Path) -> None:
    """With logits it would be half as much again."""
    model, sequences, tokens = tmp_path / "model", 8, 128
    model.mkdir()
    write_llama(model, hidden_size=64, intermediate_size=8192, vocab_size=65536)
    predicted, measured = predicted_and_measured(model, {"head": "fused"}, sequences, tokens, tmp_path)
    assert predicted == pytest.approx(measured, rel=0.1), (in_mib(predicted), in_mib(measured))


def in_mib(stages: list[float]) -> list[float]:
    return [each / 2**20 for each in stages]


def predicted_and_measured(
    model: Path, engine: dict[str, Any], sequences: int, tokens: int, folder: Path, lora: dict[str, Any] | None = None
) -> tuple[list[float], list[float]]:
    """Bytes of a rank's peak in each stage, as planned, and as the stage's ranks measured them at most. All sequences are in
    one micro-batch, unless ``engine`` says otherwise."""
    config = RunConfig.model_validate(
        {
            "model": {"path": str(model), "lora": lora},
            "engine": {"platform": "cpu", "micro_batch_tokens": sequences * tokens, **engine},
            "train": {"minibatches": 1, "steps": 1},
        }
    )
    spec = read_model_spec(model)
    stages, world = config.engine.parallel.pp, config.engine.parallel.world_size
    step = sequences * tokens
    predicted = [TrainingRanks(spec, config).memory(stage, longest=tokens, step_tokens=step).total for stage in range(stages)]
    case: dict[str, Any] = {"config": config.model_dump(mode="json"), "out": str(folder)}
    case |= {"sequences": sequences, "tokens": tokens, "vocab_size": spec.vocab_size}
    (folder / "case.json").write_text(json.dumps(case))
    start(world, folder / "case.json")
    measured = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world)]
    return predicted, [max(measured[stage * world // stages : (stage + 1) * world // stages]) for stage in range(stages)]


def start(world: int, case: Path) -> None:
    environment = {"GLOO_SOCKET_IFNAME": "lo", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    run_program("memory", case, ranks=world if world > 1 else None, environment=environment)
