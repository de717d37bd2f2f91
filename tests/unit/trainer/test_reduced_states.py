"""States in fewer bits: what is kept of a master, steps in parts, and what is refused."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.config import OptimizerConfig, RunConfig
from tepo_megatron.config.load import load_run
from tepo_megatron.run.checks import check_model
from tepo_megatron.trainer.megatron.gpu import check_states
from tepo_megatron.trainer.megatron.optimizer_states import join_remainder, split_remainder
from tepo_megatron.trainer.megatron.policy import state_options, step_in_parts
from tests.support.fused_adam import FusedAdam

floats = st.floats(width=32, allow_nan=False, allow_infinity=False).filter(lambda value: abs(value) < 3e38)


def tie(high: int) -> float:
    """The fp32 number halfway between the bfloat16 number of these bits and the next one."""
    return struct.unpack("<f", struct.pack("<I", high << 16 | 0x8000))[0]


@given(st.lists(floats | st.integers(0, 0x7F00).map(tie) | st.integers(0x8000, 0xFF00).map(tie), min_size=1))
def test_a_master_is_its_weight_and_16_bits(values: list[float]) -> None:
    """The weight is what torch rounds to; of a number halfway to an odd one the next towards zero comes back."""
    master = torch.tensor(values, dtype=torch.float32)
    weight, low = split_remainder(master)
    assert torch.equal(weight, master.bfloat16())
    joined = join_remainder(weight, low)
    lost = (master.view(torch.int32) & 0x1FFFF) == 0x8000
    assert torch.equal(joined[~lost], master[~lost])
    assert torch.equal(joined[lost].view(torch.int32), master[lost].view(torch.int32) - 1)
    assert torch.equal(joined.bfloat16(), weight)


@given(st.lists(st.integers(-(2**15), 2**15 - 1), min_size=1), st.integers(1, 0x7F00))
def test_whatever_the_kernel_has_kept_is_read_as_a_master_of_that_weight(lows: list[int], high: int) -> None:
    low = torch.tensor(lows, dtype=torch.int32).to(torch.int16)
    weight = torch.full_like(low, high).view(torch.bfloat16)
    assert torch.equal(join_remainder(weight, low).bfloat16(), weight)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 20))
def test_a_step_in_parts_is_the_same_step(sizes: list[int], most: int) -> None:
    def adam() -> FusedAdam:
        generator = torch.Generator().manual_seed(0)
        params = [torch.randn(size, generator=generator).bfloat16() for size in sizes]
        for param in params:
            param.decoupled_grad = torch.randn(param.shape, generator=generator)  # type: ignore[attr-defined]
        groups = [{"params": params[::2]}, {"params": params[1::2], "weight_decay": 0.1}]
        keep: dict[str, Any] = {"exp_avg_dtype": torch.bfloat16, "master_weights": True, "use_decoupled_grad": True}
        return FusedAdam(groups, lr=0.1, weight_decay=0.0, betas=(0.9, 0.95), eps=1e-8, adam_w_mode=True, **keep)

    whole, parts = adam(), adam()
    groups = parts.param_groups
    for _ in range(2):
        whole.step()
        step_in_parts(parts, parts.step, most)
    assert parts.param_groups is groups
    for one, other in zip(whole.param_groups, parts.param_groups, strict=True):
        assert one.get("step") == other.get("step")
        assert all(torch.equal(a, b) for a, b in zip(one["params"], other["params"], strict=True))
    assert parts.most_copied <= max(most, *sizes)


def test_fields_reach_megatron() -> None:
    reduced = OptimizerConfig(distributed=True, exp_avg_dtype="fp8", exp_avg_sq_dtype="float16", betas=(0.9, 0.95))
    options = state_options(reduced, on_gpu=True)
    assert (options["exp_avg_dtype"], options["exp_avg_sq_dtype"]) == (torch.uint8, torch.float16)
    assert (options["use_precision_aware_optimizer"], options["store_param_remainders"]) == (True, False)
    away = state_options(OptimizerConfig(distributed=True, offload_fraction=0.3), on_gpu=True)
    assert (away["optimizer_cpu_offload"], away["optimizer_offload_fraction"], away["pin_cpu_grads"]) == (True, 0.3, True)
    assert state_options(OptimizerConfig(distributed=True), on_gpu=True) == {}


BF16 = {"model": {"dtype": "bfloat16"}}


@pytest.mark.parametrize(
    ("optimizer", "rest", "sentence"),
    [
        ({"offload_fraction": 0.5, "distributed": False}, BF16, r"offload_fraction = 0.5 needs optimizer.distributed = true"),
        ({"exp_avg_dtype": "bfloat16", "distributed": False}, BF16, r"exp_avg_dtype = bfloat16 needs optimizer.distributed"),
        (
            {"offload_fraction": 1, "store_param_remainders": True},
            BF16,
            r"with offload_fraction, whose states are fp32",
        ),
        ({"exp_avg_sq_dtype": "bfloat16", "betas": (0.9, 0.999)}, BF16, r"bfloat16 rounds a step of 0.001 of the mean away"),
        ({"exp_avg_sq_dtype": "fp8"}, BF16, r"betas\[1\] below 0.9375"),
        ({"exp_avg_dtype": "bfloat16"}, {}, r"model.dtype = float32: its Adam has fp32 masters of bfloat16 weights"),
        ({"offload_fraction": 1}, {}, r"optimizer.offload_fraction with model.dtype = float32"),
        ({"exp_avg_dtype": "bfloat16"}, {**BF16, "engine": {"platform": "cpu"}}, r"Adam on a GPU, and engine.platform = cpu"),
        (
            {"exp_avg_dtype": "fp8"},
            {**BF16, "rollout": {"server": {"placement": "colocated"}}},
            r"FP8 cannot leave the GPU for the servers' turn",
        ),
        (
            {"offload_fraction": 1},
            {**BF16, "engine": {"fp8": {"recipe": "blockwise", "params": True}}},
            r"offload_fraction with engine.fp8.params = true, which needs masters outside of Adam",
        ),
    ],
)
def test_what_cannot_act_is_refused(optimizer: dict[str, Any], rest: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        RunConfig.model_validate({**rest, "optimizer": {"distributed": True, **optimizer}})


@given(st.sampled_from(["bfloat16", "float16"]), st.floats(0.5, 1, exclude_max=True), st.floats(1, 2))
def test_a_mean_that_is_accepted_falls(dtype: str, beta: float, start: float) -> None:
    """Where gradients have become 0 a running mean must go there too."""
    kept = getattr(torch, dtype)
    mean = torch.tensor(start, dtype=kept)
    if (mean.float() * beta).to(kept) < mean:
        return
    with pytest.raises(ValueError, match="so that it never falls"):
        OptimizerConfig(distributed=True, betas=(beta, 0.5), exp_avg_dtype=dtype)


def test_on_a_cpu_states_in_fewer_bits_are_refused_before_servers_start(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["optimizer.distributed=true", "optimizer.exp_avg_dtype=bfloat16", "model.dtype=bfloat16"]
    with pytest.raises(ValueError, match=r"= bfloat16 needs Transformer Engine's Adam on a GPU, and the trainer runs on a"):
        check_model(load_run(None, given))
    config = load_run(None, given).optimizer
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"is not installed \(docs/reference/gpu.md\); install it, or leave exp_avg_dtype out"):
        check_states(config, on_gpu=True)
