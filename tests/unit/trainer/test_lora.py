"""An adapted layer computes with its merged weight, gradients go to the adapters, and merged weights are not kept."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from tepo_megatron.config import LoraConfig
from tepo_megatron.config.load import load_run
from tepo_megatron.run.checks import RUN_CHECKS
from tepo_megatron.trainer.megatron.model.lora import Lora
from tepo_megatron.weights.adapters import AdapterBlock
from tests.support.reshard_models import MOE, small_spec

BLOCKS = [
    [AdapterBlock(slice(0, 2), slice(0, 2)), AdapterBlock(slice(2, 4), slice(3, 5))],  # as the queries of two groups
    [AdapterBlock(slice(0, 1), slice(2, 3))],
]
LORA = LoraConfig(rank=2, alpha=3)


def merged_by_hand(weight: Tensor, made: torch.nn.Module) -> Tensor:
    a1, b1, a2, b2 = (param.double() for param in made.parameters())
    first, second = 1.5 * b1 @ a1, 1.5 * b2 @ a2
    zero = torch.zeros(7, dtype=torch.float64)
    return weight.double() + torch.stack([first[0], first[1], second[0], first[2], first[3], zero])


class Layer(torch.nn.Module):
    """Notes the weights that it computed with."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.used: list[Any] = []

    def forward(self, inputs: Tensor) -> Tensor:
        self.used.append(weakref.ref(self.weight))
        return linear(inputs, self.weight)


def adapted(dtype: torch.dtype) -> tuple[Layer, torch.nn.Module, Lora]:
    torch.manual_seed(0)
    pairs = [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in [(2, 7), (4, 2), (2, 7), (1, 2)]]
    layer, lora = Layer(torch.randn(6, 7, dtype=dtype)), Lora(LORA, [], None, None, {})
    lora.add("weight", BLOCKS, pairs)
    lora.attach([layer], {"weight": layer.weight})
    return layer, lora.adapters["weight"], lora


def test_values_and_gradients_are_those_of_the_merged_weight() -> None:
    layer, made, lora = adapted(torch.float32)
    inputs = torch.randn(5, 7, requires_grad=True)
    expected = linear(inputs.double(), merged_by_hand(layer.weight, made))
    wanted = torch.autograd.grad(expected.square().sum(), [inputs, *made.parameters()])
    found = layer(inputs)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    got = torch.autograd.grad(found.square().sum(), [inputs, *made.parameters()])
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs.float(), atol=1e-4, rtol=1e-4)
    with lora.switched_off():
        assert torch.equal(layer(inputs), linear(inputs, layer.weight))
    assert torch.equal(layer(inputs), found)


def test_a_merged_weight_is_rounded_once() -> None:
    layer, made, lora = adapted(torch.bfloat16)
    expected = merged_by_hand(layer.weight, made).to(torch.bfloat16)
    assert torch.equal(lora.merged({"weight": layer.weight})["weight"], expected)


def test_no_merged_weight_waits_for_the_backward_pass() -> None:
    layer, made, _ = adapted(torch.float32)
    frozen = layer.weight.clone()
    found = layer(torch.randn(5, 7, requires_grad=True))
    assert layer.used[-1]() is None
    found.sum().backward()
    assert all(param.grad is not None for param in made.parameters())
    assert layer.weight.grad is None
    assert torch.equal(layer.weight, frozen)


def test_a_failure_within_a_layer_leaves_its_weight_as_it_was() -> None:
    layer, _, _ = adapted(torch.float32)
    weight = layer.weight
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        layer(torch.randn(5, 3))
    assert layer.weight is weight


def test_scales_are_those_of_peft() -> None:
    assert LoraConfig(rank=16, alpha=32).scale == 2
    assert LoraConfig(rank=16, alpha=32, rslora=True).scale == 8


def test_adapters_of_experts_are_served_merged_alone() -> None:
    spec = small_spec(architecture="MixtralForCausalLM", experts=MOE["MixtralForCausalLM"])
    (check,) = [check for check in RUN_CHECKS if check.name == "adapters"]
    for serve, problem in (("merged", ""), ("adapter", "serve = adapter is for dense models")):
        run: Any = SimpleNamespace(config=load_run(None, [f"model.lora.serve={serve}"]), spec=spec)
        assert problem in (check.problem(run) or "")
        assert bool(check.problem(run)) == bool(problem)
