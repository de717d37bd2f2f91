"""Splits that no CPU computes the same way, on two GPUs: in bfloat16 the scores and updates of one GPU.

Context parallelism goes through Transformer Engine's attention; interleaved pipeline stages exchange tensors on two NCCL
communicators while they compute, and overlapped reductions and gathers run on a stream of their own.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.launch import run_dist
from tests.support.small_llama import draw_rollouts, write_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="it wants two GPUs"),
    pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="there is no Transformer Engine"),
]

LENGTHS = (50, 171, 3, 200, 111, 90)
SIZES = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "head_dim": 64}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("cp"), scale=0.05, **SIZES, **HEADS)


def work(rank: int, world: int, model: Path, folder: Path, engine_options: dict[str, Any]) -> dict[str, Any]:
    """Scores, and three updates."""
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
    results = [engine.update(batch, last=last) for last in (False, False, True)]
    return {
        "mask": batch.loss_mask_T.cpu(),
        "logprobs": batch.old_logprobs_T.cpu(),
        "grad_norms": [result.grad_norm for result in results],
    }


@pytest.mark.parametrize(
    "options",
    [
        {"parallel": {"cp": 2, "cp_comm_type": "p2p"}},
        {"parallel": {"cp": 2, "cp_comm_type": "a2a"}},
        {"parallel": {"pp": 2, "vpp": 2}},
        {"parallel": {"dp": 2}, "overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 10**6},
        {"parallel": {"tp": 2}, "recompute": "selective", "recompute_modules": ["core_attn", "mlp"]},
    ],
    ids=["cp-p2p", "cp-a2a", "pp-vpp", "dp-overlap", "tp-recompute"],
)
def test_two_gpus_compute_what_one_does(options: dict[str, Any], model: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    (one,) = run_dist(1, work, model, tmp_path_factory.mktemp("one"), {})
    first, second = run_dist(2, work, model, tmp_path_factory.mktemp("two"), options)
    assert torch.equal(first["logprobs"], second["logprobs"])
    assert (first["logprobs"] - one["logprobs"])[one["mask"]].abs().mean() < 0.02
    assert first["grad_norms"] == pytest.approx(one["grad_norms"], rel=0.05)
