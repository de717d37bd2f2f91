"""Conditions of a GPU on a CPU: sums in changing order, and collectives that refuse tensors of the host.

Each remedy is also taken away: then the run differs, or is refused, as it was on a GPU.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.engines import Split, make_engine, short_rollouts
from tests.support.launch import run_dist
from tests.support.random_models import draw_rollouts, random_model, write_llama

pytestmark = pytest.mark.gpu_conditions


class AtomicSums(TorchDispatchMode):
    """Sums by index add in another order each time, and on each rank in an order of its own."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(rank)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.name().startswith(("aten::index_add", "aten::scatter_add")):
            target, dim, index_T, source, *rest = args
            order_T = torch.randperm(index_T.shape[0] if index_T.dim() == 1 else index_T.shape[dim], generator=self._generator)
            index_T = index_T.index_select(0 if index_T.dim() == 1 else dim, order_T)
            args = (target, dim, index_T, source.index_select(dim, order_T), *rest)
        return func(*args, **(kwargs or {}))


def sum_in_fp32(values_T: Tensor, sequence_index_T: Tensor, num_sequences: int) -> Tensor:
    """``sequence_sum`` before its remedy."""
    return values_T.new_zeros(num_sequences).index_add(0, sequence_index_T, values_T)


REPEATS, ORDERS = 40, 9
Seen = dict[bool, list[tuple[float, ...]]]
"""Whether sums are in fp32 → losses and gradients."""


def losses(engine: Any) -> Seen:
    """Loss and gradient of the second update, many times. A sequence is exactly at each bound of clip and mask. Ratios are far
    from 1: in fp32 sums of a few small differences are exact.
    """
    from tepo_megatron.core.objective import compose, ratio
    from tepo_megatron.core.objective.compose import Objective, build_objective
    from tepo_megatron.core.objective.ratio import over_sequence

    seen: Seen = {False: [], True: []}
    right, atomic_sums = Objective.__call__, AtomicSums(engine.ranks.rank)

    def measure(objective: Objective, scores: Any, batch: Any, context: Any) -> Iterator[tuple[float, ...]]:
        values = objective.token_values(scores, batch, context)
        with atomic_sums:  # the middle one of several orders: there are others on both sides, on any processor
            ratios = [right(objective, scores, batch, context).token_values["ratio"] for _ in range(ORDERS)]
            weights = [over_sequence(values.mismatch_T, "sequence", values).exp() for _ in range(ORDERS)]
        ratio_T, weight_T = (torch.stack(items).median(0).values for items in (ratios, weights))
        ratio_R, sign_R = (items[values.mask_T].double() for items in (ratio_T, values.advantage_T))
        clip = {"low": float(1 - ratio_R[sign_R < 0].median()), "high": float(ratio_R[sign_R > 0].median() - 1)}
        config = objective.config
        region = config.trust_region.model_copy(update={"scale": "fixed", **clip})
        mask = config.mismatch.model_copy(update={"high": float(weight_T[values.mask_T].max())})
        at_bounds = build_objective(config.model_copy(update={"trust_region": region, "mismatch": mask}))
        for _ in range(REPEATS):
            with atomic_sums:
                numerator = right(at_bounds, scores, batch, context).numerator
            (gradient_T,) = torch.autograd.grad(numerator, scores.logprob, retain_graph=True)
            yield (float(numerator), *gradient_T.tolist())

    def noted(objective: Objective, scores: Any, *args: Any) -> Any:
        if scores.logprob.requires_grad:
            seen[False] += measure(objective, scores, *args)
            with ExitStack() as stack:
                for module in (ratio, compose):
                    stack.enter_context(mock.patch.object(module, "sequence_sum", sum_in_fp32))
                seen[True] += measure(objective, scores, *args)
        return right(objective, scores, *args)

    batch = engine.score(engine.batch_from_root(draw_rollouts(LENGTHS) if engine.ranks.rank == 0 else None))
    batch = batch.with_(sampler_logprobs_T=batch.old_logprobs_T + 0.1 * torch.arange(batch.num_tokens).sin())
    engine.update(batch)
    with mock.patch.object(Objective, "__call__", noted):
        engine.update(batch)
    return seen


LENGTHS = [40, 31, 90, 17, 64, 80, 55, 72, 99, 60]
OBJECTIVES: list[dict[str, Any]] = [
    {"preset": preset, "ratio": {"kind": kind, "length_normalized": False}, "mismatch": {"kind": "mask", "level": "sequence"}}
    for preset, kind in (("tepo", "sequence_token"), ("gspo", "sequence"))
]
SPLITS = [Split(tp=2, sp=True), Split(cp=2), Split(tp=2, cp=2, sp=True)]


def losses_in_turn(rank: int, world: int, split: Split, model: Path) -> list[Seen]:
    config = {"model": {"path": str(model)}, "engine": {"parallel": split.parallel}}
    config |= {"optimizer": {"lr": 1e-3, "warmup_steps": 0}, "rollout": {"sampling": {"temperature": 1.0}}}
    return [losses(make_engine({**config, "objective": objective})) for objective in OBJECTIVES]


@pytest.mark.parametrize("split", SPLITS, ids=lambda split: split.name)
def test_ranks_that_share_a_sequence_take_the_same_decisions(split: Split, tmp_path: Path) -> None:
    model = write_llama(tmp_path, scale=0.1, num_key_value_heads=4)
    for by_rank in zip(*run_dist(split.world, losses_in_turn, split, model), strict=True):
        for in_fp32 in (False, True):
            outcomes = {outcome for seen in by_rank for outcome in seen[in_fp32]}
            clipped = {tuple(value == 0 for value in outcome[1:]) for outcome in outcomes}
            assert len(by_rank[0][in_fp32]) == REPEATS
            assert (len(outcomes) > 1, len(clipped) > 1) == (in_fp32, in_fp32)


class StandIn(TorchFunctionMode):
    """A device besides the host's memory, both in this machine's: the package's tensors without a device are the host's.

    Collectives of the package refuse these, as NCCL does, unless the group is one of the host. Megatron's are not looked at.
    """

    DEVICE = torch.device("cpu", 0)  # tensors of it say so, though torch forgets the number
    FACTORIES = (
        *(torch.zeros, torch.ones, torch.full, torch.empty, torch.arange, torch.eye),
        *(torch.tensor, torch.as_tensor, torch.frombuffer, torch.from_numpy),
    )

    def __init__(self) -> None:
        super().__init__()
        self._on_host: dict[int, Any] = {}  # storages, which keeps their numbers from being used again
        self.refused: list[str] = []

    def is_on_host(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._on_host

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.device.__get__:
            return torch.device("cpu") if self.is_on_host(args[0]) else self.DEVICE
        result = func(*args, **kwargs)
        if not isinstance(result, Tensor):
            return result
        inputs = [
            each for arg in args for each in (arg if isinstance(arg, list | tuple) else [arg]) if isinstance(each, Tensor)
        ]
        on_host = bool(inputs) and all(map(self.is_on_host, inputs))
        if func in (*self.FACTORIES, Tensor.cpu, Tensor.to):
            named = [each for each in (*args[1:], *kwargs.values()) if isinstance(each, torch.device) or each == "cpu"]
            if func in self.FACTORIES:
                on_host = not named and sys._getframe(1).f_globals["__name__"].startswith("tepo_megatron")
            elif func is Tensor.cpu or named:
                on_host = func is Tensor.cpu or torch.device(named[0]) != self.DEVICE
            if on_host != self.is_on_host(result):
                result = result.clone()
        if on_host:
            self._on_host[result.untyped_storage()._cdata] = result.untyped_storage()
        return result


COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor")


@contextmanager
def on_a_stand_in() -> Iterator[None]:
    from tepo_megatron.trainer.megatron import engine
    from tepo_megatron.trainer.megatron.parallel.platform import Platform, select_platform

    device, host_groups = StandIn(), []

    class OnStandIn(Platform):
        def host_group(self, timeout: Any = None) -> Any:
            host_groups.append(super().host_group(timeout))
            return host_groups[-1]

    def checked(collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = [each for arg in args for each in (arg if isinstance(arg, list) else [arg]) if isinstance(each, Tensor)]
            is_ours = sys._getframe(1).f_globals["__name__"].startswith("tepo_megatron")
            if is_ours and kwargs.get("group") not in host_groups and any(map(device.is_on_host, tensors)):
                raise RuntimeError("No backend type associated with device type cpu")
            return collective(*args, **kwargs)

        return call

    def stand_in(config: Any) -> Platform:
        return OnStandIn(select_platform(config).kind, device.DEVICE, "nccl")

    with ExitStack() as stack:
        for name in COLLECTIVES:
            stack.enter_context(mock.patch.object(dist, name, checked(getattr(dist, name))))
        stack.enter_context(mock.patch.object(engine, "select_platform", stand_in))
        stack.enter_context(device)
        yield


def counters_on_the_host(make: Callable[..., None]) -> Callable[..., None]:
    def init(routers: Any, *args: Any, **kwargs: Any) -> None:
        make(routers, *args, **kwargs)
        routers._loads_LE, routers._replayed_L2 = routers._loads_LE.cpu(), routers._replayed_L2.cpu()
        routers._aux_loss = routers._aux_loss.cpu()

    return init


EXPERTS = {
    "a first stage without experts": ("Glm4Moe", Split(pp=2, first=1), {}),
    "an auxiliary loss": ("Mixtral", Split(tp=2, sp=True), {"moe_balance": {"kind": "aux_loss", "coefficient": 0.1}}),
    "expert parallel": ("Mixtral", Split(dp=2, ep=2, distributed=True), {}),
}


def step_with_experts(rank: int, world: int, case: str, folder: Path, on_host: bool) -> dict[str, float]:
    from tepo_megatron.trainer.megatron.model.routers import Routers

    _, split, balance = EXPERTS[case]
    with ExitStack() as stack:
        stack.enter_context(on_a_stand_in())
        if on_host:
            stack.enter_context(mock.patch.object(Routers, "__init__", counters_on_the_host(Routers.__init__)))
        config: dict[str, Any] = {"model": {"path": str(folder)}, "engine": {"parallel": split.parallel, **balance}}
        engine = make_engine({**config, "optimizer": {"distributed": split.distributed, "warmup_steps": 0}})
        nothing = engine.take_routing_metrics()  # as after a step whose updates were all skipped
        assert nothing == {}
        batch = engine.score(engine.batch_from_root(short_rollouts(prompt=3) if rank == 0 else None))
        engine.update(batch)
        engine.weights.version(1)
        return engine.take_routing_metrics()


@pytest.mark.parametrize("case", EXPERTS)
@pytest.mark.parametrize("on_host", [False, True], ids=["", "reverted"])
def test_what_ranks_exchange_is_on_the_device(case: str, on_host: bool, tmp_path: Path) -> None:
    family, split, _ = EXPERTS[case]
    random_model(family).save_pretrained(tmp_path)
    if on_host:
        with pytest.raises(RuntimeError, match=r"in take_metrics\n(.*\n)*.*No backend type associated with device type cpu"):
            run_dist(split.world, step_with_experts, case, tmp_path, on_host)
    else:
        assert run_dist(split.world, step_with_experts, case, tmp_path, on_host)[0]["moe/load_entropy"] > 0
