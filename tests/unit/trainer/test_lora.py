"""An adapted layer computes with its merged weight, gradients go to the adapters, and merged weights are not kept."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from tepo_megatron.config import LoraConfig
from tepo_megatron.config.load import ConfigError, load_run
from tepo_megatron.run.checks import RUN_CHECKS
from tepo_megatron.sampler.vllm.plugin.middleware import Middleware
from tepo_megatron.sampler.vllm.server import Server
from tepo_megatron.sampler.vllm.wire import (
    ADAPTER_NAME,
    ADAPTER_PATH,
    ADAPTER_VARIABLE,
    AWAITS_VARIABLE,
    KEY_VARIABLE,
    USE_ADAPTER,
)
from tepo_megatron.trainer.megatron.model.lora import Adapter, Lora, with_merged_weights
from tepo_megatron.weights.adapters import AdapterBlock
from tests.support.asgi import ask
from tests.support.reshard_models import MOE, small_spec

BLOCKS = [
    [AdapterBlock(slice(0, 2), slice(0, 2)), AdapterBlock(slice(2, 4), slice(3, 5))],  # as the queries of two groups
    [AdapterBlock(slice(0, 1), slice(2, 3))],
]
LORA = LoraConfig(rank=2, alpha=3)


def adapter(dtype: torch.dtype) -> Adapter:
    torch.manual_seed(0)
    shapes = [(2, 7), (4, 2), (2, 7), (1, 2)]
    return Adapter(LORA.scale, BLOCKS, [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes])


def merged_by_hand(weight: Tensor, made: Adapter) -> Tensor:
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


def adapted(dtype: torch.dtype) -> tuple[Layer, Adapter, Lora]:
    layer, made = Layer(torch.randn(6, 7, dtype=dtype)), adapter(dtype)
    lora = Lora(LORA, [], [], None, None, {}, {"weight": made})
    layer.forward = with_merged_weights(layer, {"weight": made}, lambda: lora.on)  # type: ignore[method-assign]
    return layer, made, lora


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


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.lora.dropout=0.1", r"dropout must be 0: a training step draws no random numbers"),
        ("model.lora.target_modules=[]", r"target_modules is empty"),
        ("model.lora.target_modules=[q_proj,q_proj]", r"names a layer twice"),
        ("model.lora.target_modules=[q_proj,all-linear]", r"all-linear already means every layer"),
        ("model.lora.rank=0", r"got 0; allowed: an integer ≥ 1"),
        (
            "model.lora.serve=adapter model.lora.rank=600",
            r"takes ranks up to 512, .*rank = 600; set .*merged",
        ),
        ("model.lora.serve=adapter rollout.server.placement=colocated", r"servers that keep their weights.*serve = merged"),
        (
            "model.lora.serve=adapter rollout.server.load_format=dummy",
            r"never sends the weights under the adapters; set rollout.server.load_format = auto",
        ),
        (
            "model.lora.serve=adapter model.dtype=bfloat16 rollout.server.quantization=fp8_per_tensor rollout.uncorrected=true",
            r"full precision, and rollout.server.quantization = fp8_per_tensor; set model.lora.serve = merged",
        ),
    ],
)
def test_settings_that_cannot_act_are_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_run(None, ["model.lora.rank=4", *override.split()])


@pytest.mark.parametrize(("rank", "served"), [(1, 1), (4, 8), (8, 8), (300, 320), (512, 512)])
def test_servers_of_adapters_are_told_a_rank_that_vllm_takes(rank: int, served: int, tmp_path: Path) -> None:
    config = load_run(None, [f"model.lora.rank={rank}", "model.lora.serve=adapter"])
    server = Server(
        config.rollout.server,
        model_dir=tmp_path,
        dtype="float32",
        cores="0",
        key="k",
        log=tmp_path / "log",
        adapter_rank=config.adapter_rank,
    )
    command = server.command(on_gpu=True)
    assert command[command.index("--max-lora-rank") + 1] == str(served)
    assert "--enable-lora" in command
    assert {AWAITS_VARIABLE, ADAPTER_VARIABLE} <= server.environment(on_gpu=True).keys()
    assert load_run(None, [f"model.lora.rank={rank}"]).adapter_rank is None


def test_lora_is_not_trained_in_fp8() -> None:
    given = ["model.lora.rank=4", "model.dtype=bfloat16", "engine.fp8.recipe=tensorwise"]
    with pytest.raises(ConfigError, match=r"model\.lora with engine\.fp8\.recipe = tensorwise"):
        load_run(None, given)


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


class Loader:
    """vLLM's table of models, as far as the route asks it."""

    def __init__(self, problem: str = "") -> None:
        self.lora_requests: dict[str, Any] = {}
        self.asked: list[Any] = []
        self.problem = problem

    async def load_lora_adapter(self, request: Any) -> Any:
        self.asked.append(request)
        if self.problem:
            return SimpleNamespace(error=SimpleNamespace(message=self.problem))
        self.lora_requests[request.lora_name] = request
        return "loaded"


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Loader], tuple[int, str]]:
    """Asks a server with these models for the adapters."""
    monkeypatch.setenv(KEY_VARIABLE, "key")
    monkeypatch.delenv(AWAITS_VARIABLE, raising=False)
    middleware = Middleware(cast(Any, None))
    return lambda models: ask(middleware, USE_ADAPTER, state=SimpleNamespace(openai_serving_models=models))


def test_a_server_is_told_once_where_its_adapters_lie_and_says_why_it_cannot_load_them(use: Any) -> None:
    """Once: a request that names them again after an update loads the new ones."""
    pytest.importorskip("vllm")
    models = Loader()
    assert [use(models), use(models)] == [(200, "{}")] * 2
    (asked,) = models.asked
    assert (asked.lora_name, asked.lora_path, asked.load_inplace) == (ADAPTER_NAME, ADAPTER_PATH, False)
    status, said = use(Loader("no place for it"))
    assert status == 500
    assert "no place for it" in said


def test_a_worker_takes_adapters_from_memory_only_where_each_has_a_layer() -> None:
    pytest.importorskip("vllm")
    from tepo_megatron.sampler.vllm.plugin import patches

    inner = SimpleNamespace(model=None, packed_modules_mapping={"qkv_proj": ["q_proj"]}, supported_lora_modules=["qkv_proj"])
    manager = SimpleNamespace(
        _adapter_manager=inner, lora_config=SimpleNamespace(max_lora_rank=8, lora_dtype=torch.float32), vocab_size=9
    )
    request = SimpleNamespace(lora_int_id=1, lora_path=ADAPTER_PATH)
    patches._adapters.clear()
    with pytest.raises(RuntimeError, match="holds no adapters yet"):
        patches._adapters_from_memory(manager, request)
    settings = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    tensors = {f"model.layers.0.self_attn.q_proj.lora_{part}.weight": torch.ones(2, 2) for part in "AB"}
    patches.hold_adapters(settings, tensors)
    for _ in range(2):  # vLLM forgets it after every update, and scales what it is given
        found = patches._adapters_from_memory(manager, request).loras["model.layers.0.self_attn.q_proj"].optimize()
        assert found.lora_b.tolist() == [[2.0, 2.0]] * 2
    patches.hold_adapters(settings, {name.replace("q_proj", "gate"): tensor for name, tensor in tensors.items()})
    with pytest.raises(RuntimeError, match=r"no place for the adapters of model\.layers\.0\.self_attn\.gate; set .*merged"):
        patches._adapters_from_memory(manager, request)
    patches._adapters.clear()
