"""Experts in Transformer Engine's grouped products: in bfloat16 and FP8 on one GPU, and split over two where there are two."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.launch import run_dist
from tests.support.model_worlds import save_random_model
from tests.support.small_llama import VOCABULARY, draw_rollouts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="there is no Transformer Engine"),
]

LENGTHS = (50, 171, 3, 200, 111, 90)
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 512,
}
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 8},
    "Glm4Moe": {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "first_k_dense_replace": 1},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    for family, changes in MODELS.items():
        save_random_model(family, {**SIZES, **changes}, folder / family, seed=1)
    return folder


def work(rank: int, world: int, model: Path, folder: Path, engine_options: dict[str, Any]) -> dict[str, Any]:
    """Scores, and two updates."""
    from tepo_megatron.config import RunConfig
    from tepo_megatron.trainer.megatron.engine import Engine

    dist.destroy_process_group()
    os.environ |= {"WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    dist.init_process_group("nccl", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=world)
    config = {
        "model": {"path": str(model), "dtype": "bfloat16"},
        "engine": {"platform": "cuda", "micro_batch_tokens": 300, **engine_options},
        "optimizer": {"lr": 1e-5, "distributed": True},
    }
    engine = Engine(RunConfig.model_validate(config), model)
    batch = engine.score(engine.batch_from_root(draw_rollouts(LENGTHS) if rank == 0 else None))
    assert batch.old_logprobs_T is not None
    norms = [engine.update(batch).grad_norm for _ in range(2)]
    return {"mask": batch.loss_mask_T.cpu(), "logprobs": batch.old_logprobs_T.cpu(), "grad_norms": norms}


@pytest.mark.parametrize("family", MODELS)
def test_grouped_products_and_fp8_are_near_one_expert_after_the_other(
    family: str, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Near a tie a router chooses another expert for other rounding, so that means are compared."""
    found = {
        name: run_dist(1, work, models / family, tmp_path_factory.mktemp(name), options)[0]
        for name, options in (
            ("local", {"layers": "local"}),
            ("grouped", {"layers": "te"}),
            ("fp8", {"layers": "te", "fp8": {"recipe": "tensorwise"}}),
        )
    }
    mask_T = found["local"]["mask"]
    for name, nats in (("grouped", 0.05), ("fp8", 0.2)):
        apart_T = (found[name]["logprobs"] - found["local"]["logprobs"])[mask_T]
        assert apart_T.abs().mean() < nats, name
        assert found[name]["grad_norms"] == pytest.approx(found["local"]["grad_norms"], rel=4 * nats)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="it wants two GPUs")
@pytest.mark.parametrize("family", MODELS)
def test_experts_on_two_gpus_compute_what_they_do_on_one(
    family: str, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Tokens go to their experts' rank and back by Megatron's all-to-all."""
    (one,) = run_dist(1, work, models / family, tmp_path_factory.mktemp("one"), {})
    first, second = run_dist(2, work, models / family, tmp_path_factory.mktemp("two"), {"parallel": {"dp": 2, "ep": 2}})
    assert torch.equal(first["logprobs"], second["logprobs"])
    assert (first["logprobs"] - one["logprobs"])[one["mask"]].abs().mean() < 0.05
    assert first["grad_norms"] == pytest.approx(one["grad_norms"], rel=0.1)
