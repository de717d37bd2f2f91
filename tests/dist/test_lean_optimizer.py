"""Optimizer states on the host or in fewer bits: the same updates as without, and checkpoints that go from one to the other."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tepo_megatron.config import RunConfig
from tests.support.engines import make_engine, save_checkpoint, states_of
from tests.support.launch import run_dist
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
            copied: list[tuple[Tensor, Tensor, Tensor]] = []
            for param in group["params"]:
                remainders = self.store_param_remainders and param.dtype == torch.bfloat16
                if not self.state[param]:
                    self.initialize_state(param, remainders)
                copied.append((param, *(self.get_unscaled_state(param, name).clone() for name in ("exp_avg", "exp_avg_sq"))))
            assert len(copied) == 1 or sum(param.numel() for param, *_ in copied) <= PART_ELEMENTS
            for param, mean, square in copied:
                self._one(group, param, mean, square)

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


UPDATES, LR = 2, 1e-3
Outcome = dict[str, Any]
"""By parameter and kind, what this rank holds: ``first`` after the first update, or just after a checkpoint of it was read;
``states`` after the second. ``weights``: those of the model."""

SPLITS = {1: {}, 2: {"dp": 2}, 4: {"tp": 2, "dp": 2, "sequence_parallel": True}}
WHOLE: dict[str, Any] = {"offload_fraction": 1.0}
HALF: dict[str, Any] = {"offload_fraction": 0.5}
REMAINDERS: dict[str, Any] = {"store_param_remainders": True}
REDUCED: dict[str, Any] = {"exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16", "store_param_remainders": True}
SCALED: dict[str, Any] = {"exp_avg_dtype": "float16", "exp_avg_sq_dtype": "float16"}


def update(engine: Any, step: int) -> None:
    batch = engine.batch_from_root(draw_rollouts([8] * 4, seed=step) if engine.ranks.rank == 0 else None)
    assert not engine.update(engine.score(batch)).skipped


def train(case: dict[str, Any], folder: Path) -> Outcome:
    """Two updates of a fresh engine, with a checkpoint between them; or the second, from such a checkpoint."""
    config = RunConfig.model_validate(case["config"])
    with instead_of_transformer_engine() if config.optimizer.precision_aware else contextlib.nullcontext():
        engine = make_engine(config)

        def states() -> dict[str, Tensor]:
            return {name: value.clone() for name, value in states_of(engine).items()}

        if case["resume"]:
            assert engine.checkpoints.load(folder / case["resume"] / "step_000001")["step"] == 1
        else:
            update(engine, 0)
            save_checkpoint(engine, folder / case["name"], step=1, state={})
        first = states()
        update(engine, 1)
        weights = {name: param.detach().clone() for name, param in engine.policy.params.items()}
        return {"first": first, "states": states(), "weights": weights}


def all_of(rank: int, world: int, cases: list[dict[str, Any]], folder: Path) -> list[Outcome]:
    return [train(case, folder) for case in cases]


def case(name: str, world: int, resume: str | None = None, **optimizer: Any) -> dict[str, Any]:
    config = {
        "model": {"dtype": "bfloat16"},
        "engine": {"parallel": SPLITS[world]},
        "optimizer": {"lr": LR, "weight_decay": 0.1, "distributed": True, **optimizer},
        "rollout": {"replay": "recorded"},
        "train": {"steps": UPDATES, "minibatches": 1},
    }
    return {"name": f"{name}-{world}", "config": config, "resume": resume}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Within a part of the largest value of each tensor."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name] - value).abs().max() <= tolerance * value.abs().max(), name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lean")


@pytest.mark.parametrize("world", [2, 1, 4])
def test_states_on_the_host_are_those_of_adam_on_the_device(world: int, folder: Path) -> None:
    """Both compute AdamW in fp32, in another order: an update from the same states gives the same masters and moments to 2e-6
    of each tensor's largest. A checkpoint of either is read by the other bit for bit, also in another world.
    """
    cases = [
        case("plain", world),
        case("half", world, **HALF),
        case("half-from-half", world, "half-2", **HALF),
        case("plain-from-half", world, "half-2"),
        *([case("whole", world, **WHOLE), case("half-from-plain", world, "plain-2", **HALF)] if world == 2 else []),
    ]
    for rank in run_dist(world, all_of, cases, folder):
        plain, half, half_from_half, plain_from_half, *of_two = rank
        assert_close(half["first"], plain["first"], 2e-6)
        assert_equal(half_from_half["first"], plain_from_half["first"])
        assert_close(half_from_half["states"], plain_from_half["states"], 2e-6)
        for whole, half_from_plain in zip(of_two[::2], of_two[1::2], strict=True):
            assert_close(whole["first"], plain["first"], 2e-6)
            assert_equal(half_from_half["first"], half["first"])
            assert_equal(half_from_half["weights"], half["weights"])
            assert_equal(half_from_plain["first"], plain["first"])
            assert_close(half_from_plain["states"], plain["states"], 2e-6)


def test_states_in_fewer_bits_round_and_nothing_else(folder: Path) -> None:
    """With a stand-in for Transformer Engine's Adam. 16 bits beside each bfloat16 weight are the same fp32 master, bit for bit;
    moments in 16 bits change an update by no more than they round.
    """
    cases = [
        case("plain", 2),
        case("remainders", 2, **REMAINDERS),
        case("reduced", 2, **REDUCED),
        case("scaled", 2, **SCALED),
        case("remainders-from-plain", 2, "plain-2", **REMAINDERS),
        case("plain-from-remainders", 2, "remainders-2"),
        case("reduced-from-reduced", 2, "reduced-2", **REDUCED),
        case("scaled-from-scaled", 2, "scaled-2", **SCALED),
        case("plain-from-reduced", 2, "reduced-2"),
    ]
    for rank in run_dist(2, all_of, cases, folder):
        plain, remainders, reduced, scaled, from_plain, from_remainders, from_reduced, from_scaled, plain_from_reduced = rank
        for same in (remainders, from_plain, from_remainders):
            assert_close(same["states"], plain["states"], 1e-7)
            assert_equal(same["weights"], plain["weights"])
        assert_equal(from_reduced["first"], reduced["first"])
        assert_equal(from_reduced["states"], reduced["states"])
        assert_close(from_scaled["first"], scaled["first"], 3e-7)  # a scale of its own, for the same 16 bits
        for rounded, bits in ((reduced, 8), (scaled, 11)):
            for name, value in plain["first"].items():
                part = 0.0 if name.endswith("master") else 2.0**-bits  # the update was made before anything was rounded
                assert (rounded["first"][name] - value).abs().max() <= part * value.abs().max(), name
        assert_equal(from_reduced["weights"], plain_from_reduced["weights"])
