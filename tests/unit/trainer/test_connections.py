"""CUDA_DEVICE_MAX_CONNECTIONS: set if Megatron's training demands it, and never against the user."""

from __future__ import annotations

import ctypes
import os
from types import SimpleNamespace
from typing import Any

import pytest

from tepo_megatron.config.load import load_run
from tepo_megatron.trainer.megatron.gpu import CONNECTIONS_VARIABLE, prepare_process
from tepo_megatron.trainer.megatron.platform import collective_timeout

A100, H100, B200, RTX_5090 = (8, 0), (9, 0), (10, 0), (12, 0)


def driver(capability: tuple[int, int] | None) -> Any:
    """NVIDIA's library on a machine with this GPU; ``None``: without the library."""

    def load(name: str) -> Any:
        if capability is None:
            raise OSError(f"{name}: cannot open shared object file")
        return SimpleNamespace(
            nvmlInit_v2=lambda: 0,
            nvmlDeviceGetHandleByIndex_v2=lambda index, gpu: 0,
            nvmlDeviceGetCudaComputeCapability=tell,
            nvmlShutdown=lambda: 0,
        )

    def tell(gpu: Any, *places: Any) -> int:
        for place, value in zip(places, capability or (), strict=True):
            place._obj.value = value
        return 0

    return load


@pytest.mark.parametrize(
    ("preset", "parallel", "capability", "expected"),
    [
        *((None, parallel, capability, "1") for parallel in ("tp=2", "cp=2", "tp=8") for capability in (A100, H100)),
        *((None, parallel, capability, None) for parallel in ("tp=2", "cp=2") for capability in (B200, RTX_5090, None)),
        *((None, parallel, H100, None) for parallel in ("tp=1", "dp=2", "pp=2")),
        ("8", "tp=2", H100, "8"),
    ],
)
def test_it_is_for_tensor_and_context_parallelism_before_blackwell(
    preset: str | None,
    parallel: str,
    capability: tuple[int, int] | None,
    expected: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(CONNECTIONS_VARIABLE, preset or "")  # so that it is as before afterwards
    if preset is None:
        monkeypatch.delenv(CONNECTIONS_VARIABLE)
    monkeypatch.setattr(ctypes, "CDLL", driver(capability))
    prepare_process(load_run(None, [f"engine.parallel.{parallel}"]))
    assert os.environ.get(CONNECTIONS_VARIABLE) == expected


def test_collectives_outlast_what_the_watch_allows_in_a_weight_update() -> None:
    """Ranks may wait in one, with ``transfer = gather``, while rank 0 waits for servers; the watch is to speak first."""
    long = ["rollout.server.start_timeout_s=4000", "rollout.server.request_timeout_s=3600", "train.hang_timeout_s=100"]
    for config in (load_run(None, long), load_run(None, [])):
        allowed = config.train.hang_timeout_s + config.rollout.server.longest_wait_s
        assert collective_timeout(config).total_seconds() > allowed
