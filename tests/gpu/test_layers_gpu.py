"""Transformer Engine's layers on a GPU: the same model in bfloat16 and under every FP8 recipe that the GPU has; and on two GPUs
splits that no CPU computes the same way.

Context parallelism goes through Transformer Engine's attention; interleaved pipeline stages exchange tensors on two NCCL
communicators while they compute, and overlapped reductions and gathers run on a stream of their own.
"""

import importlib
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer import FP32Optimizer

from tepo_megatron.config.load import load_run
from tepo_megatron.trainer.megatron.gpu import CONNECTIONS_VARIABLE, prepare_process
from tepo_megatron.trainer.megatron.policy.optimizer_states import STATES, OptimizerStates
from tests.support.engines import make_engine, save_checkpoint
from tests.support.launch import run_dist
from tests.support.random_models import draw_rollouts, write_llama

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")]

LENGTHS = (50, 171, 3, 200, 111, 90)
SIZES = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "head_dim": 64}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("there is no Transformer Engine")
    return write_llama(tmp_path_factory.mktemp("layers"), scale=0.02, **SIZES, **HEADS)


def work(rank: int, world: int, model: Path, folder: Path, engine_section: dict[str, Any]) -> dict[str, Any]:
    """Scores, three updates, and scores again before and after the weights went through a checkpoint; the first export.

    Only the first update's gradient is comparable: which tokens the clip leaves to the next two is rounding (their norms differ
    tenfold between fp32 and bf16 on a CPU).
    """
    join_over_nccl(rank, world, folder)
    config = {
        "model": {"path": str(model), "dtype": "bfloat16"},
        "engine": {"platform": "cuda", "micro_batch_tokens": 300, **engine_section},
        "optimizer": {"lr": 1e-5, "distributed": True},
    }
    engine = make_engine(config)
    exported = {name: tensor.float().cpu() for name, tensor in engine.weights.stream() if tensor is not None}
    batch = engine.score(engine.batch_from_root(draw_rollouts(LENGTHS) if rank == 0 else None))
    results = [engine.update(batch, last=last) for last in (False, False, True)]
    trained = engine.score(batch).old_logprobs_T
    engine.checkpoints.load(save_checkpoint(engine, folder, step=3, state={}))
    return {
        "mask": batch.loss_mask_T.cpu(),
        "logprobs": batch.old_logprobs_T.cpu(),
        "trained": trained.cpu(),
        "resumed": engine.score(batch).old_logprobs_T.cpu(),
        "grad_norms": [result.grad_norm for result in results],
        "exported": exported,
        "queued": queued(),
    }


def join_over_nccl(rank: int, world: int, folder: Path) -> None:
    dist.destroy_process_group()
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=world)


def queued() -> int:
    """What Transformer Engine keeps for recomputation in backward passes to come."""
    of_checkpoints, of_fp8 = (importlib.import_module(f"transformer_engine.pytorch.{name}") for name in ("distributed", "fp8"))
    scales = of_fp8.FP8GlobalStateManager.fp8_tensors_recompute_buffer
    return len(of_checkpoints.activation_recompute_forward._is_first_fp8_module) + sum(map(len, scales))


@pytest.fixture(scope="module")
def bfloat16(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (found,) = run_dist(1, work, model, tmp_path_factory.mktemp("bf16"), {})
    return found


@pytest.mark.parametrize(
    ("recipe", "params", "recompute"),
    [
        ("delayed", False, "none"),
        ("delayed", False, "full"),
        *((recipe, params, "none") for recipe in ("tensorwise", "blockwise", "mxfp8") for params in (False, True)),
    ],
)
def test_fp8_layers_train_as_bfloat16_does(
    recipe: str, params: bool, recompute: str, model: Path, tmp_path: Path, bfloat16: dict[str, Any]
) -> None:
    section = {"fp8": {"recipe": recipe, "params": params}, "recompute": recompute}
    try:
        (found,) = run_dist(1, work, model, tmp_path, section)
    except RuntimeError as refused:
        if f"engine.fp8.recipe = {recipe} " in str(refused):
            pytest.skip(str(refused).strip().splitlines()[-1])
        raise
    assert found["queued"] == 0
    mask = bfloat16["mask"]
    error = (found["logprobs"] - bfloat16["logprobs"])[mask].abs()
    # Rounding weights and inputs to e4m3 on a CPU moves this model by 0.036 nats, and to bf16 by 0.003.
    assert 0.012 < error.mean() < 0.1, "FP8 was not used, or is wrong"
    assert found["grad_norms"][0] == pytest.approx(bfloat16["grad_norms"][0], rel=0.25)
    assert (found["resumed"] - found["trained"])[mask].abs().mean() < 0.02
    for name, tensor in bfloat16["exported"].items():
        off = (found["exported"][name] - tensor).norm() / tensor.norm()
        assert off <= (0.05 if params else 0), f"{name} was exported {off:.3f} of its norm off"


def test_local_layers_on_a_gpu_agree_with_transformer_engines(model: Path, tmp_path: Path, bfloat16: dict[str, Any]) -> None:
    (found,) = run_dist(1, work, model, tmp_path, {"layers": "local"})
    assert (found["logprobs"] - bfloat16["logprobs"])[bfloat16["mask"]].abs().mean() < 0.03


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="it wants two GPUs")
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
def test_two_gpus_compute_what_one_does(options: dict[str, Any], model: Path, tmp_path: Path, bfloat16: dict[str, Any]) -> None:
    first, second = run_dist(2, work, model, tmp_path, options)
    assert torch.equal(first["logprobs"], second["logprobs"])
    assert (first["logprobs"] - bfloat16["logprobs"])[bfloat16["mask"]].abs().mean() < 0.02
    assert first["grad_norms"][0] == pytest.approx(bfloat16["grad_norms"][0], rel=0.05)


def states_of_a_teacher(rank: int, world: int, model: Path, folder: Path) -> list[tuple[str, bool]]:
    join_over_nccl(rank, world, folder)
    config = {
        "model": {"path": str(model), "dtype": "bfloat16"},
        "engine": {"platform": "cuda", "micro_batch_tokens": 300},
        "objective": {"distill": {"of": "all", "divergence": "jsd"}},
        "teachers": {"same": {"path": str(model), "place": "ranks"}},
    }
    engine = make_engine(config, teachers={"same": model})
    batch = engine.score(engine.batch_from_root(draw_rollouts(LENGTHS)))
    return [(states.device.type, states.is_pinned()) for of_micro in batch.teacher_states for states in of_micro]


def test_a_teachers_states_are_in_pageable_host_memory(model: Path, tmp_path: Path) -> None:
    (found,) = run_dist(1, states_of_a_teacher, model, tmp_path)
    assert set(found) == {("cpu", False)}


def test_a_resumed_fused_adam_goes_on_as_on_a_cpu() -> None:
    """torch's, which the weights' part on the GPU gets without Transformer Engine and apex if others are on the host."""
    results = []
    for device in ("cpu", "cuda"):
        param = torch.nn.Parameter(torch.zeros(3, device=device))
        wrapped = object.__new__(FP32Optimizer)
        wrapped.optimizer = torch.optim.AdamW([param], fused=True)
        values = {state: torch.full((3,), float(number)) for number, state in enumerate(STATES, 1)}
        OptimizerStates(wrapped).restore(param, values, updates=4)
        param.grad = torch.ones_like(param)
        wrapped.optimizer.step()
        results.append(param.detach().cpu())
    torch.testing.assert_close(*results)


def test_the_capability_is_known_before_cuda_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's answer about the GPU, which a rank asks before it starts CUDA, is torch's."""
    monkeypatch.setenv(CONNECTIONS_VARIABLE, "")  # so that it is as before afterwards
    monkeypatch.delenv(CONNECTIONS_VARIABLE)
    prepare_process(load_run(None, ["engine.parallel.tp=2"]))
    expected = "1" if torch.cuda.get_device_capability(0) < (10, 0) else None
    assert os.environ.get(CONNECTIONS_VARIABLE) == expected
