"""Our middleware in a vLLM server: nothing samples without weights, and an orderly end logs no error."""

import asyncio
import importlib.util
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tepo_megatron.sampler.vllm.client import GENERATE
from tepo_megatron.sampler.vllm.plugin.middleware import ALLOWED, Middleware
from tepo_megatron.sampler.vllm.wire import ABORT, AWAITS_VARIABLE, FACTS, KEY_VARIABLE, PROGRESS, SAMPLES
from tests.unit.sampler.conftest import ask

UPDATE = ("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update")


class Served:
    """The middleware before an application that answers everything with ``status``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, awaits: bool) -> None:
        self.status = 200
        monkeypatch.setenv(KEY_VARIABLE, "key")
        if awaits:
            monkeypatch.setenv(AWAITS_VARIABLE, "1")
        else:
            monkeypatch.delenv(AWAITS_VARIABLE, raising=False)
        self.middleware = Middleware(self._answer)

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    def post(self, path: str, status: int = 200) -> tuple[int, bytes]:
        self.status = status
        return ask(self.middleware, path)


OTHERS = (SAMPLES, GENERATE, "/v1/completions", "/v1/load_lora_adapter", "/what/comes/next")
paths = st.sampled_from([*OTHERS, *sorted(ALLOWED - {ABORT, PROGRESS, FACTS})]) | st.sampled_from([UPDATE[-1], "/sleep"])


@given(awaits=st.booleans(), requests=st.lists(st.tuples(paths, st.sampled_from([200, 500])), max_size=12))
@example(awaits=True, requests=[(SAMPLES, 200), *((step, 200) for step in UPDATE), (SAMPLES, 200)])
def test_samples_come_only_after_an_update_that_nothing_undid(awaits: bool, requests: list[tuple[str, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        served = Served(patch, awaits=awaits)
    has_weights = not awaits
    for path, status in requests:
        answer, message = served.post(path, status)
        if path in ALLOWED or has_weights:
            assert answer == (400 if path == SAMPLES else status)  # the request for samples is empty
        else:
            assert answer == 409
            assert f"{path}: this server has no weights yet" in message.decode()
        if path == "/sleep" or (path, status) == (UPDATE[-1], 200):
            has_weights = path != "/sleep"


def test_an_update_lasts_from_its_first_request_to_the_end_of_its_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that is broken off."""
    served = Served(monkeypatch, awaits=False)
    state = SimpleNamespace(engine_client=SimpleNamespace(output_processor=SimpleNamespace(request_states={})))

    def is_updating() -> bool:
        status, body = ask(served.middleware, PROGRESS, state=state)
        assert status == 200
        return bool(json.loads(body)["updating"])

    assert not is_updating()
    for first in (UPDATE[0], "/pause"):
        for path in (first, *UPDATE[1:]):
            served.post(path)
            assert is_updating()
        served.post("/resume", status=500)
        assert is_updating()
        served.post("/resume")
        assert not is_updating()


@pytest.mark.parametrize("header", [None, b"", b"Bearer", b"Bearer wrong", b"key"])
def test_a_request_without_the_key_gets_no_further(header: bytes | None, monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(monkeypatch, awaits=False)
    headers = [] if header is None else [(b"authorization", header)]
    for path in (SAMPLES, ABORT, "/finish_weight_update", "/health/metrics", "/nowhere"):
        assert ask(served.middleware, path, headers=headers)[0] == 401
    assert ask(served.middleware, SAMPLES, headers=[(b"authorization", b"Bearer key")] * 2)[0] == 401
    assert ask(served.middleware, "/health", headers=headers)[0] == 200
    monkeypatch.delenv(KEY_VARIABLE)
    with pytest.raises(RuntimeError, match="must not run without a key"):
        Middleware(served._answer)


def test_a_server_says_which_model_runner_and_attention_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = mock.AsyncMock(return_value=["(attn): Attention(num_heads=2, scale=0.5, backend=FlashAttentionImpl)"] * 2)
    engine = SimpleNamespace(collective_rpc=attention, vllm_config=SimpleNamespace(use_v2_model_runner=True))
    answer = ask(Served(monkeypatch, awaits=True).middleware, FACTS, state=SimpleNamespace(engine_client=engine))
    assert answer == (200, b'{"facts":"Model Runner V2, FlashAttentionImpl"}')


# -- the end


class Engine:
    """As vLLM's client of its engine: in another thread than the loop's, the loop runs between its steps."""

    def __init__(self) -> None:
        self.outputs: asyncio.Queue[Exception] = asyncio.Queue()
        self.logged: list[Exception] = []
        self.output_handler = asyncio.create_task(self._wait())
        self._loop = asyncio.get_running_loop()

    async def _wait(self) -> None:
        self.logged.append(await self.outputs.get())

    def shutdown(self, timeout: float | None = None) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self.output_handler.cancel)

    async def _close(self) -> None:
        self.outputs.put_nowait(RuntimeError("the engine is dead"))
        for _ in range(3):
            await asyncio.sleep(0)


async def _nothing(scope: Any, receive: Any, send: Any) -> None: ...


@pytest.mark.parametrize("quiet", [True, False])
def test_a_task_is_cancelled_before_what_it_waits_on_is_closed(quiet: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "key")

    async def end() -> Engine:
        engine = Engine()
        scope = {"type": "lifespan", "app": SimpleNamespace(state=SimpleNamespace(engine_client=engine))}
        served: Any = Middleware(_nothing) if quiet else _nothing
        await served(scope, None, None)
        await asyncio.sleep(0)
        await asyncio.to_thread(engine.shutdown, timeout=0)
        await asyncio.gather(engine.output_handler, return_exceptions=True)
        return engine

    assert bool(asyncio.run(end()).logged) != quiet


def test_vllm_still_closes_first() -> None:
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        pytest.skip("vllm is not installed")
    source = (Path(found.submodule_search_locations[0]) / "v1" / "engine" / "async_llm.py").read_text()
    body = re.search(r"    def shutdown\(.*?(?=\n    def )", source, re.S)
    assert 0 < body[0].index("engine_core.shutdown(") < body[0].index("cancel_task_threadsafe("), (
        "_stop_waiting_first is not needed any more"
    )
