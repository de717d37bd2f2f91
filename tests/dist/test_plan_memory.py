"""The memory formulas of a plan against what two small runs on CPU really need at their peak."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tepo_megatron.bridge.architecture import read_model_spec
from tepo_megatron.config import RunConfig
from tepo_megatron.launch.plan.memory import rank_memory
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


@needs_linux
@pytest.mark.parametrize("split", [{}, {"tp": 2, "sequence_parallel": True}], ids=["tp1", "tp2-sp"])
def test_the_predicted_peak_is_within_a_tenth_of_the_measured(split: dict[str, int], model: Path, tmp_path: Path) -> None:
    predicted, measured = predicted_and_measured(model, {"parallel": split}, SEQUENCES, TOKENS, tmp_path)
    assert predicted == pytest.approx(max(measured), rel=0.1), (predicted / 2**20, [each / 2**20 for each in measured])


@needs_linux
def test_the_predicted_peak_with_lora_is_within_a_tenth_of_the_measured_and_a_third_of_full_training(
    model: Path, tmp_path: Path
) -> None:
    lora = {"rank": 8, "alpha": 16}
    predicted, measured = predicted_and_measured(model, {}, SEQUENCES, TOKENS, tmp_path, lora=lora)
    assert predicted == pytest.approx(max(measured), rel=0.1), (predicted / 2**20, [each / 2**20 for each in measured])


@needs_linux
def test_the_predicted_peak_without_logits_is_within_a_tenth_of_the_measured(tmp_path: Path) -> None:
    """With logits it would be half as much again."""
    model, sequences, tokens = tmp_path / "model", 8, 128
    model.mkdir()
    write_llama(model, hidden_size=64, intermediate_size=8192, vocab_size=65536)
    predicted, measured = predicted_and_measured(model, {"head": "fused"}, sequences, tokens, tmp_path)
    assert predicted == pytest.approx(max(measured), rel=0.1), (predicted / 2**20, [each / 2**20 for each in measured])


def predicted_and_measured(
    model: Path, engine: dict[str, Any], sequences: int, tokens: int, folder: Path, lora: dict[str, Any] | None = None
) -> tuple[float, list[float]]:
    """Bytes of a rank's peak as planned, and as each rank measured them, with all sequences in one micro-batch."""
    config = RunConfig.model_validate(
        {
            "model": {"path": str(model), "lora": lora},
            "engine": {"platform": "cpu", "micro_batch_tokens": sequences * tokens, **engine},
            "train": {"minibatches": 1, "steps": 1},
        }
    )
    spec = read_model_spec(model)
    predicted = rank_memory(spec, config, 0, longest=tokens, step_tokens=sequences * tokens).total
    case: dict[str, Any] = {"config": config.model_dump(mode="json"), "out": str(folder)}
    case |= {"sequences": sequences, "tokens": tokens, "vocab_size": spec.vocab_size}
    (folder / "case.json").write_text(json.dumps(case))
    start(config.engine.parallel.world_size, folder / "case.json")
    measured = [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]
    assert len(measured) == config.engine.parallel.world_size
    return predicted, measured


def start(world: int, case: Path) -> None:
    environment = {"GLOO_SOCKET_IFNAME": "lo", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    run_program("memory", case, ranks=world if world > 1 else None, environment=environment)
