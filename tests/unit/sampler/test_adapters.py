"""Servers that keep adapters: what they are started with, and how they take new ones from memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tepo_megatron.config.load import load_run
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
from tests.support.asgi import ask


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
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Loader], tuple[int, bytes]]:
    """Asks a server with these models for the adapters."""
    monkeypatch.setenv(KEY_VARIABLE, "key")
    monkeypatch.delenv(AWAITS_VARIABLE, raising=False)
    middleware = Middleware(cast(Any, None))
    return lambda models: ask(middleware, USE_ADAPTER, state=SimpleNamespace(openai_serving_models=models))


def test_a_server_is_told_once_where_its_adapters_lie_and_says_why_it_cannot_load_them(use: Any) -> None:
    """Once: a request that names them again after an update loads the new ones."""
    pytest.importorskip("vllm")
    models = Loader()
    assert [use(models), use(models)] == [(200, b"{}")] * 2
    (asked,) = models.asked
    assert (asked.lora_name, asked.lora_path, asked.load_inplace) == (ADAPTER_NAME, ADAPTER_PATH, False)
    status, said = use(Loader("no place for it"))
    assert status == 500
    assert b"no place for it" in said


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
