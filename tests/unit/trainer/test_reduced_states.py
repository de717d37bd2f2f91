"""States in fewer bits: what is kept of a master, and what is refused; tests/dist/test_lean_optimizer.py trains with them."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.config.load import load_run
from tepo_megatron.run.checks import check_model
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.trainer.megatron.gpu import check_config
from tepo_megatron.trainer.megatron.optimizer_states import OptimizerStates
from tepo_megatron.weights.architecture import read_model_spec

floats = st.floats(width=32, allow_nan=False, allow_infinity=False).filter(lambda value: abs(value) < 3e38)


def tie(high: int) -> float:
    """The fp32 number halfway between the bfloat16 number of these bits and the next one."""
    return struct.unpack("<f", struct.pack("<I", high << 16 | 0x8000))[0]


@given(st.lists(floats | st.integers(0, 0x7F00).map(tie) | st.integers(0x8000, 0xFF00).map(tie), min_size=1))
def test_a_master_is_its_weight_and_16_bits(values: list[float]) -> None:
    """The weight is what torch rounds to; of a number halfway to an odd one the next towards zero comes back."""
    master = torch.tensor(values, dtype=torch.float32)
    weight, low = OptimizerStates.split_master(master)
    assert torch.equal(weight, master.bfloat16())
    joined = OptimizerStates.join_master(weight, low)
    lost = (master.view(torch.int32) & 0x1FFFF) == 0x8000
    assert torch.equal(joined[~lost], master[~lost])
    assert torch.equal(joined[lost].view(torch.int32), master[lost].view(torch.int32) - 1)
    assert torch.equal(joined.bfloat16(), weight)


@given(st.lists(st.integers(-(2**15), 2**15 - 1), min_size=1), st.integers(1, 0x7F00))
def test_whatever_the_kernel_has_kept_is_read_as_a_master_of_that_weight(lows: list[int], high: int) -> None:
    low = torch.tensor(lows, dtype=torch.int32).to(torch.int16)
    weight = torch.full_like(low, high).view(torch.bfloat16)
    assert torch.equal(OptimizerStates.join_master(weight, low).bfloat16(), weight)


def test_on_a_cpu_states_in_fewer_bits_are_refused_before_servers_start(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["optimizer.distributed=true", "optimizer.exp_avg_dtype=bfloat16", "model.dtype=bfloat16"]
    with pytest.raises(ValueError, match=r"= bfloat16 needs Transformer Engine's Adam on a GPU, and the trainer runs on a"):
        check_model(load_run(None, given))
    config = load_run(None, given)
    spec = read_model_spec(resolve_model_path("builtin:tiny"))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"is not installed \(docs/reference/gpu.md\); install it, or leave exp_avg_dtype out"):
        check_config(config, spec, on_gpu=True)
