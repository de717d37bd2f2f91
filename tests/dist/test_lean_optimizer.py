"""Optimizer states on the host or in fewer bits: the same updates as without, and checkpoints that go from one to the other."""

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tepo_megatron.config import RunConfig
from tests.support.engines import Split, Worlds, make_engine, save_checkpoint, states_of
from tests.support.random_models import draw_rollouts

HALF_RANGE = torch.finfo(torch.float16).max / 2
PART_ELEMENTS = 4096
"""The most that a step may take at once, so that the smallest models have several parts."""


class FusedAdam(torch.optim.Optimizer):
    """In place of Transformer Engine's, and written against its 2.11.0 (``pytorch/optimizers/fused_adam.py`` and
    ``multi_tensor/adam.cu``). FP8 is left out.
    """

    def __init__(
        self,
        params: Any,
        *,
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
        eps: float,
        adam_w_mode: bool,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        master_weights: bool = False,
        use_decoupled_grad: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        store_param_remainders: bool = False,
    ) -> None:
        assert adam_w_mode
        assert not master_weights or use_decoupled_grad
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps})
        self.dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype, "master_param": master_weight_dtype}
        self.master_weights, self.store_param_remainders = master_weights, store_param_remainders
        self._scales: dict[Tensor, dict[str, Tensor]] = {}

    def initialize_state(self, param: Tensor, store_param_remainders: bool) -> None:
        for name in ("exp_avg", "exp_avg_sq"):
            self._make(param, name, self.dtypes[name])
        self._make(param, "master_param", torch.int16 if store_param_remainders else self.dtypes["master_param"])
        if not store_param_remainders:
            self.set_scaled_state(param, "master_param", param.detach().float())

    def _make(self, param: Tensor, name: str, dtype: torch.dtype) -> None:
        self.state[param][name] = torch.zeros_like(param, dtype=dtype)
        self._scales.setdefault(param, {})[name] = torch.ones(1)

    def get_unscaled_state(self, param: Tensor, name: str) -> Tensor:
        value = self.state[param][name]
        assert value.dtype == self.dtypes[name]
        return value.float() * self._scales[param][name] if value.dtype == torch.float16 else value.float()

    def set_scaled_state(self, param: Tensor, name: str, unscaled: Tensor) -> None:
        assert unscaled.dtype == torch.float32
        if self.dtypes[name] == torch.float16:
            scale = unscaled.abs().max().view(1) / HALF_RANGE
            self._scales[param][name].copy_(scale)
            unscaled.mul_(torch.where(scale > 0, scale.reciprocal(), 0.0))
        self.state[param][name].copy_(unscaled)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            assert len(group["params"]) == 1 or sum(param.numel() for param in group["params"]) <= PART_ELEMENTS
            for param in group["params"]:
                if not self.state[param]:
                    self.initialize_state(param, self.store_param_remainders and param.dtype == torch.bfloat16)
                self._one(group, param, *(self.get_unscaled_state(param, name).clone() for name in ("exp_avg", "exp_avg_sq")))

    def _one(self, group: dict[str, Any], param: Tensor, mean: Tensor, square: Tensor) -> None:
        low = self.state[param]["master_param"]
        master = _joined(param, low) if low.dtype == torch.int16 else low
        grad: Tensor = param.decoupled_grad  # type: ignore[attr-defined]
        (beta1, beta2), step = group["betas"], group["step"]
        master.mul_(1 - group["lr"] * group["weight_decay"])
        mean.lerp_(grad, 1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        denominator = (square.sqrt() / (1 - beta2**step) ** 0.5).add_(group["eps"])
        master.addcdiv_(mean, denominator, value=-group["lr"] / (1 - beta1**step))
        if low.dtype == torch.int16:
            bits = master.view(torch.int32)
            low.copy_((bits & 0xFFFF).to(torch.int16))
            param.copy_(((bits >> 16) + (low < 0)).to(torch.int16).view(torch.bfloat16))  # halfway: up, as the kernel rounds
        else:
            param.copy_(master)
        self.set_scaled_state(param, "exp_avg", mean)
        self.set_scaled_state(param, "exp_avg_sq", square)


def _joined(param: Tensor, low: Tensor) -> Tensor:
    high = param.view(torch.int16).to(torch.int32) - (low < 0).to(torch.int32)
    return ((high << 16) | (low.to(torch.int32) & 0xFFFF)).view(torch.float32)


@contextlib.contextmanager
def instead_of_transformer_engine() -> Iterator[None]:
    """Megatron's optimizers are built with it, and our check for a GPU says that there is one."""
    import megatron.core.optimizer as megatron
    from megatron.core.optimizer import distrib_optimizer, optimizer_config

    from tepo_megatron.trainer.megatron import engine, policy

    modules = {"transformer_engine": ModuleType("transformer_engine"), "transformer_engine.pytorch": ModuleType("pytorch")}
    module = modules["transformer_engine.pytorch.optimizers"] = ModuleType("optimizers")
    module.FusedAdam = FusedAdam  # type: ignore[attr-defined]
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(sys.modules, modules))
        for owner, name, value in (
            (megatron, "Adam", FusedAdam),
            (megatron, "USING_PYTORCH_OPTIMIZER", False),
            (megatron, "is_te_min_version", lambda *_: True),
            (optimizer_config, "is_te_min_version", lambda *_: True),
            (distrib_optimizer, "Adam", FusedAdam),
            (engine, "check_config", lambda *_, **__: None),
            (policy, "PART_ELEMENTS", PART_ELEMENTS),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "half": {"offload_fraction": 0.5},
    "whole": {"offload_fraction": 1.0},
    "remainders": {"store_param_remainders": True},
    "reduced": {"exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"},
    "scaled": {"exp_avg_dtype": "float16", "exp_avg_sq_dtype": "float16"},
}
SPLITS: dict[int, dict[str, Any]] = {1: {}, 2: {"dp": 2}, 4: {"tp": 2, "dp": 2, "sp": True}}


@dataclass(frozen=True, kw_only=True)
class Case(Split):
    kind: str = "plain"


def case(kind: str, origin: str = "", *, world: int = 2) -> Case:
    """``origin``: the optimizer, on two ranks, whose checkpoint it continues."""
    return Case(**SPLITS[world], kind=kind, resumes=case(origin) if origin else None)


ON_THE_HOST = [("plain", ""), ("half", ""), ("half", "half"), ("plain", "half")]
OF_TWO_RANKS = [
    *((kind, "") for kind in OPTIMIZERS),
    *[("half", "half"), ("plain", "half"), ("half", "plain")],
    *[("remainders", "plain"), ("plain", "remainders"), ("reduced", "reduced"), ("plain", "reduced"), ("scaled", "scaled")],
]
CASES = [case(*kinds) for kinds in OF_TWO_RANKS] + [case(*kinds, world=world) for world in (1, 4) for kinds in ON_THE_HOST]
Outcome = dict[str, dict[str, Tensor]]
"""By parameter and kind, what this rank holds: ``first`` after the first update, or just after a checkpoint of it was read;
``states`` after the second. ``weights``: those of the model."""


def update(engine: Any, step: int) -> None:
    batch = engine.batch_from_root(draw_rollouts([8] * 4, seed=step) if engine.ranks.rank == 0 else None)
    assert not engine.update(engine.score(batch)).skipped


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def train(split: Case, folder: Path) -> Outcome:
    """Two updates of a fresh engine, with a checkpoint between them; or the second, from such a checkpoint."""
    from tepo_megatron.trainer.megatron.policy.optimizer_states import OptimizerStates

    config = {
        "model": {"dtype": "bfloat16"},
        "engine": {"parallel": split.parallel},
        "optimizer": {"lr": 1e-3, "weight_decay": 0.1, "distributed": True, **OPTIMIZERS[split.kind]},
        "rollout": {"replay": "recorded"},
        "train": {"steps": 2, "minibatches": 1},
    }
    run = RunConfig.model_validate(config)
    with instead_of_transformer_engine() if run.optimizer.precision_aware else contextlib.nullcontext():
        engine = make_engine(run)
        for inner in OptimizerStates(engine.policy.optimizer).inner:
            assert getattr(inner.optimizer, "store_param_remainders", False) == run.optimizer.store_param_remainders
        if split.resumes:
            assert engine.checkpoints.load(folder / split.resumes.name / "step_000001")["step"] == 1
        else:
            update(engine, 0)
            save_checkpoint(engine, folder / split.name, step=1, state={})
        first = copied(states_of(engine))
        update(engine, 1)
        return {"first": first, "states": copied(states_of(engine)), "weights": copied(engine.policy.params)}


def assert_same(ours: Outcome, theirs: Outcome, *names: str, within: float = 0.0) -> None:
    """Bit for bit, or within a part of the largest value of each tensor."""
    for name in names:
        assert ours[name].keys() == theirs[name].keys()
        for key, value in theirs[name].items():
            error = (ours[name][key] - value).abs().max()
            assert torch.equal(ours[name][key], value) or (within and error <= within * value.abs().max()), key


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds[Case]:
    return Worlds(tmp_path_factory.mktemp("lean"), CASES, train)


def by_rank(worlds: Worlds[Case], *cases: Case) -> Iterator[tuple[Any, ...]]:
    return zip(*map(worlds.ranks, cases), strict=True)


@pytest.mark.parametrize("world", SPLITS)
def test_states_on_the_host_are_those_of_adam_on_the_device(worlds: Worlds[Case], world: int) -> None:
    """Both compute AdamW in fp32, in another order: an update from the same states gives the same masters and moments to 2e-6
    of each tensor's largest. A checkpoint of either is read by the other bit for bit, also in another world.
    """
    cases = [case(*kinds, world=world) for kinds in ON_THE_HOST]
    for plain, half, half_from_half, plain_from_half in by_rank(worlds, *cases):
        assert_same(half, plain, "first", within=2e-6)
        assert_same(half_from_half, plain_from_half, "first")
        assert_same(half_from_half, plain_from_half, "states", within=2e-6)
        if world == 2:
            assert_same(half_from_half, half, "first", "weights")


def test_all_states_may_be_on_the_host_and_those_of_the_device_go_there(worlds: Worlds[Case]) -> None:
    for plain, whole, half_from_plain in by_rank(worlds, case("plain"), case("whole"), case("half", "plain")):
        assert_same(whole, plain, "first", within=2e-6)
        assert_same(half_from_plain, plain, "first")
        assert_same(half_from_plain, plain, "states", within=2e-6)


def test_16_bits_beside_each_weight_are_the_same_master(worlds: Worlds[Case]) -> None:
    """With a stand-in for Transformer Engine's Adam; bit for bit but for the few masters halfway between two weights. Theirs is
    rounded up, and the master that is read is the next fp32 number: a weight in 16 bits may differ by a step.
    """
    cases = [case("remainders"), case("remainders", "plain"), case("plain", "remainders")]
    for plain, *others in by_rank(worlds, case("plain"), *cases):
        for same in others:
            assert_same(same, plain, "first", within=1e-7)
            assert_same(same, plain, "states", "weights", within=2.0**-7)
            for name in plain:
                assert all((same[name][key] != value).sum() <= 8 for key, value in plain[name].items()), name


@pytest.mark.parametrize(("kind", "bits"), [("reduced", 8), ("scaled", 11)])
def test_moments_in_16_bits_change_an_update_by_no_more_than_they_round(worlds: Worlds[Case], kind: str, bits: int) -> None:
    for plain, rounded in by_rank(worlds, case("plain"), case(kind)):
        for name, value in plain["first"].items():
            part = 0.0 if name.endswith("master") else 2.0**-bits  # the update was made before anything was rounded
            assert (rounded["first"][name] - value).abs().max() <= part * value.abs().max(), name


def test_moments_in_16_bits_come_back_from_a_checkpoint(worlds: Worlds[Case]) -> None:
    cases = [case("reduced"), case("reduced", "reduced"), case("plain", "reduced")]
    for reduced, from_reduced, plain_from_reduced in by_rank(worlds, *cases):
        assert_same(from_reduced, reduced, "first", "states")
        assert_same(from_reduced, plain_from_reduced, "weights")
    for scaled, from_scaled in by_rank(worlds, case("scaled"), case("scaled", "scaled")):
        assert_same(from_scaled, scaled, "first", within=3e-7)  # a scale of its own, for the same 16 bits
