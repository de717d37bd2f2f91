"""A server that ends in order logs no error, however the threads of its API server take turns."""

from __future__ import annotations

import asyncio
import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tepo_megatron.sampler.vllm.plugin.middleware import QuietEnd


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
def test_the_task_that_waits_is_cancelled_before_what_it_waits_on_is_closed(quiet: bool) -> None:
    async def end() -> Engine:
        engine = Engine()
        scope = {"type": "lifespan", "app": SimpleNamespace(state=SimpleNamespace(engine_client=engine))}
        await (QuietEnd(_nothing) if quiet else _nothing)(scope, None, None)
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
    assert body is not None
    assert 0 < body[0].index("engine_core.shutdown(") < body[0].index("cancel_task_threadsafe("), (
        "QuietEnd is not needed any more"
    )
