"""Stands for Transformer Engine's FusedAdam on a CPU: its interface, how it keeps states, and its kernel's rounding.

Written against Transformer Engine 2.11.0 (``pytorch/optimizers/fused_adam.py`` and ``multi_tensor/adam.cu``). FP8 is left out.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

HALF_RANGE = torch.finfo(torch.float16).max / 2
PART_ELEMENTS = 4096
"""The most that a step may take at once, so that the smallest models have several parts."""


class FusedAdam(torch.optim.Optimizer):
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
