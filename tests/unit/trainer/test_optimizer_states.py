"""Adam's states after a resume, in fewer bits, and on the host. tests/dist/test_lean_optimizer.py and test_offload.py train."""

import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from tepo_megatron.config.load import load_run
from tepo_megatron.run.checks import check_model
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.trainer.megatron import teachers
from tepo_megatron.trainer.megatron.forward import Forward
from tepo_megatron.trainer.megatron.gpu import check_config
from tepo_megatron.trainer.megatron.parallel.platform import Platform
from tepo_megatron.trainer.megatron.policy import Policy, offload
from tepo_megatron.trainer.megatron.policy.checkpoints import MegatronCheckpoints
from tepo_megatron.trainer.megatron.policy.optimizer_states import STATES, OptimizerStates
from tepo_megatron.weights.architecture import read_model_spec
from tepo_megatron.weights.layouts import MegatronParallel
from tepo_megatron.weights.transfer.full_tensors import GatherPlan
from tests.support.reshard_models import small_spec

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
    config = load_run(None, ["optimizer.distributed=true", "optimizer.exp_avg_dtype=bfloat16", "model.dtype=bfloat16"])
    with pytest.raises(ValueError, match=r"= bfloat16 needs Transformer Engine's Adam on a GPU, and the trainer runs on a"):
        check_model(config)
    spec = read_model_spec(resolve_model_path("builtin:tiny"))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"is not installed \(docs/reference/gpu.md\); install it, or leave exp_avg_dtype out"):
        check_config(config, spec, on_gpu=True)


CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def small_pieces() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload, "CHUNK_BYTES", 48)
        yield


def offloader_of(model: torch.nn.Module, *frozen: torch.nn.Module) -> offload.Offloader:
    optimizer: Any = SimpleNamespace(optimizer=SimpleNamespace(param_groups=[], state={}))
    ddp: Any = SimpleNamespace(offload_grad_buffers=lambda **_: None, restore_grad_buffers=lambda **_: None)
    policy: Any = SimpleNamespace(chunks=[model], ddp=[ddp], optimizer=optimizer)
    return offload.Offloader(policy, CPU, lambda: None, frozen)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=5), st.integers(1, 3))
def test_every_byte_and_every_view_comes_back(sizes: list[int], times: int) -> None:
    whole = [torch.randn(size) for size in sizes]
    views = [tensor[tensor.numel() // 2 :] for tensor in whole]
    before = [tensor.clone() for tensor in whole]
    offloader = offloader_of(torch.nn.ParameterList([*whole, *views]))
    for _ in range(times):
        offloader.keep()
        assert offloader.most_offloaded == 4 * sum(sizes)
        assert not any(tensor.untyped_storage().nbytes() for tensor in whole)
        offloader.keep("weights")
        assert all(torch.equal(tensor, copy) for tensor, copy in zip(whole, before, strict=True))
        assert all(torch.equal(view, copy[copy.numel() // 2 :]) for view, copy in zip(views, before, strict=True))


def test_host_memory_is_used_again() -> None:
    offloader = offloader_of(torch.nn.ParameterList([torch.randn(40)]))
    with mock.patch.object(torch, "empty", wraps=torch.empty) as empty:
        for _ in range(3):
            offloader.keep()
            offloader.keep("weights")
    assert [call.args[0] for call in empty.call_args_list if "pin_memory" in call.kwargs] == [48, 48, 48, 16]


class Copies(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.copy_.default
        return func(*args, **(kwargs or {}))


@given(st.lists(st.integers(1, 100), min_size=1, max_size=5))
def test_a_frozen_model_goes_to_the_host_once_and_comes_back_each_time(sizes: list[int]) -> None:
    frozen = [torch.randn(size) for size in sizes]
    before = [tensor.clone() for tensor in frozen]
    offloader = offloader_of(torch.nn.ParameterList(), torch.nn.ParameterList(frozen))
    counts = []
    for _ in range(3):
        for parts in ((), ("optimizer",)):
            with Copies() as copies:
                offloader.keep(*parts)
            counts.append(copies.count)
            assert all(bool(tensor.untyped_storage().nbytes()) == bool(parts) for tensor in frozen)
        assert all(map(torch.equal, frozen, before))
    chunks = sum(-(-4 * size // 48) for size in sizes)
    assert counts == [chunks, chunks, 0, chunks, 0, chunks]
    assert offloader.most_offloaded == 4 * sum(sizes)


def test_copies_in_fp8_leave_with_the_weights() -> None:
    model: Any = torch.nn.Linear(3, 3)
    model._fp8_workspaces = {"weight": torch.zeros(9)}  # as Transformer Engine's modules have it
    offloader = offloader_of(model)
    offloader.keep("weights")
    assert model._fp8_workspaces
    offloader.keep()
    assert not model._fp8_workspaces


class GroupCounting(torch.optim.Optimizer):
    """Counts steps as Transformer Engine's and apex' Adam do: per group, from 1 where there is no count."""

    def __init__(self, params: list[torch.nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1


@given(st.integers(0, 1000))
def test_a_resumed_fused_adam_counts_on(updates: int) -> None:
    """Or else its bias correction would start anew under moments that did not: a jump of the weights at every resume."""
    param = torch.nn.Parameter(torch.zeros(3))
    wrapped = object.__new__(FP32Optimizer)
    wrapped.optimizer = GroupCounting([param])
    values = {state: torch.full((3,), float(number)) for number, state in enumerate(STATES, 1)}
    OptimizerStates(wrapped).restore(param, values, updates=updates)
    wrapped.optimizer.step()
    assert wrapped.optimizer.param_groups[0]["step"] == updates + 1
    assert torch.equal(param, torch.ones(3))
    assert set(wrapped.optimizer.state[param]) == {"exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("fused", [False, True])
def test_torchs_adam_finds_its_count_where_it_reads_it(fused: bool) -> None:
    """The fused one on the device of the states: what is on the host would be a wrong address there."""
    param = torch.nn.Parameter(torch.zeros(3, device="meta"))
    wrapped = object.__new__(FP32Optimizer)
    wrapped.optimizer = torch.optim.AdamW([param], fused=fused)
    OptimizerStates(wrapped).restore(param, {state: torch.ones(3) for state in STATES}, updates=4)
    assert wrapped.optimizer.state[param]["step"].device.type == ("meta" if fused else "cpu")


def test_a_master_is_set_where_it_is_held() -> None:
    param = torch.nn.Parameter(torch.zeros(2, 3))
    wrapped = object.__new__(FP32Optimizer)
    wrapped.optimizer = torch.optim.AdamW([param])
    value = torch.arange(6.0).view(2, 3)
    OptimizerStates(wrapped).set_master(param, value)
    assert torch.equal(param, value)


def test_a_save_lists_the_trained_parameters_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dict of all parameters for each pair of shard and owner would take seconds for a model with many experts."""
    split = MegatronParallel(tp=2, pp=2)
    layouts = split.layouts(small_spec())
    params = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in layouts[0].params.items()}
    listed = mock.PropertyMock(return_value=params)
    monkeypatch.setattr(Policy, "trained", listed)
    optimizer = object.__new__(DistributedOptimizer)
    adam = optimizer.optimizer = torch.optim.AdamW(params.values())
    monkeypatch.setattr(OptimizerStates, "_held", lambda _, param: (adam, param, slice(0, param.numel())))
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    policy: Any = Policy([], [], optimizer, mock.Mock(), params)
    weights: Any = SimpleNamespace(policy=policy, split=split, trained_sources=GatherPlan(layouts))
    boxes = dict(MegatronCheckpoints(weights, group=None, about={})._boxes())
    assert len(boxes) == len(STATES) * len(layouts[0].shards)
    assert listed.call_count == 1


@given(sizes=st.lists(st.tuples(st.integers(0, 70), st.sampled_from([torch.bfloat16, torch.float32])), max_size=4))
def test_states_are_copied_to_the_host_whatever_their_size(sizes: list[tuple[int, torch.dtype]]) -> None:
    """In chunks of 32 bytes."""
    copies = offload.HostCopies(CPU, chunk_bytes=32)
    tensors = [torch.randn(size, 3).to(dtype).t() for size, dtype in sizes]  # not contiguous
    results = [copies.copy(tensor) for tensor in tensors]
    assert [result.dtype for result in results] == [dtype for _, dtype in sizes]
    expected = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.zero_()
    assert all(map(torch.equal, results, expected))


def test_teachers_states_are_copied_through_few_pinned_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are on a GPU. Pinned as a whole they would take a power of two each, which torch never gives back."""
    build = mock.Mock()
    monkeypatch.setattr(teachers._Teacher, "build", build)
    monkeypatch.setattr(teachers, "HostCopies", lambda device: offload.HostCopies(CPU))
    config = load_run(None, ["objective.distill={of: all, divergence: jsd}", "teachers={big: {path: big, place: ranks}}"])
    platform = Platform("cuda", torch.device("cuda", 0), "nccl")
    teachers.Teachers(config, {"big": Path("big")}, mock.Mock(platform=platform), mock.Mock())
    forward: Any = SimpleNamespace(
        engine=config.engine, on_progress=mock.Mock(), routers=None, _local_scores=mock.Mock(), **build.call_args.kwargs
    )
    hidden = torch.arange(12.0).view(1, 3, 4)
    part, model, loss = mock.MagicMock(), mock.Mock(return_value=hidden), mock.Mock(return_value=(hidden.sum(), {}))
    monkeypatch.setattr("tepo_megatron.trainer.megatron.forward.fused_head", mock.Mock())
    output, reduce = Forward._step(forward, (0, part), model, loss, train=False)
    states = reduce(output)[2]["output"]
    hidden.zero_()
    assert torch.equal(states, torch.arange(12.0).view(3, 4))
