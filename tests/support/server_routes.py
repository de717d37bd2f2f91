"""Every route that a vLLM server may have, and that all of them ask a stranger for the key."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

from tepo_megatron.sampler.vllm.wire import ABORT, SAMPLES, USE_ADAPTER
from tests.support import stranger

OPEN = {"/health": "says only whether the engine works; the trainer asks it before it has a reason to send the key"}
"""Paths that answer without the key, with reasons."""


def routes() -> list[tuple[str, str]]:
    """Every route that the source of vLLM's servers names, whether or not this server has it, and some that it has not."""
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    stated = re.compile(r"""\.(get|post|put|delete|patch|head|options|websocket|mount)\(\s*["'](/[^"']*)["']""")
    found = {
        ({"mount": "get"}.get(method, method).upper(), re.sub(r"\{[^}]*\}", "1", path))
        for source in (Path(spec.origin).parent / "entrypoints").rglob("*.py")
        for method, path in stated.findall(source.read_text())
    }
    found |= {("POST", SAMPLES), ("POST", ABORT), ("POST", USE_ADAPTER)}
    found |= {
        ("GET", path) for path in ("/", "/metrics", "/openapi.json", "/docs", "/nowhere", "/health/", "//health", "/health/1")
    }
    return sorted(found)


def assert_routes_need_the_key(url: str) -> None:
    asked = routes()
    assert {("POST", "/update_weights"), ("POST", "/collective_rpc"), ("POST", "/inference/v1/generate")} < set(asked)
    assert len(asked) > 40
    for method, path, header, status in stranger.ask("ask_routes", url, json.dumps(asked)):
        if path in OPEN:
            assert status in (200, 405), (method, path, header)
        else:
            assert status == (403 if method == "WEBSOCKET" else 401), (method, path, header)
