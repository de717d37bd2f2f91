"""CUDA_DEVICE_MAX_CONNECTIONS: where Megatron's training demands it, and nowhere else."""

from __future__ import annotations

import ctypes
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.config import ParallelConfig
from tepo_megatron.config.load import load_run
from tepo_megatron.run.training import phase_limits
from tepo_megatron.trainer.megatron import gpu as connections
from tepo_megatron.trainer.megatron.platform import collective_timeout

A100, H100, B200, RTX_5090 = (8, 0), (9, 0), (10, 0), (12, 0)


@given(tp=st.sampled_from([1, 2, 8]), cp=st.sampled_from([1, 2]), gpu=st.sampled_from([None, A100, H100, B200, RTX_5090]))
def test_it_is_for_tensor_and_context_parallelism_before_blackwell(tp: int, cp: int, gpu: tuple[int, int] | None) -> None:
    wanted = connections.wants_one_connection(ParallelConfig(tp=tp, cp=cp), gpu)
    assert wanted == (gpu in (A100, H100) and tp * cp > 1)


@pytest.mark.parametrize(
    ("given", "gpu", "expected"), [(None, H100, "1"), ("8", H100, "8"), (None, B200, None), (None, None, None)]
)
def test_it_is_set_once_and_never_against_the_user(
    given: str | None, gpu: tuple[int, int] | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(connections.CONNECTIONS_VARIABLE, given or "")  # so that it is as before afterwards
    if given is None:
        monkeypatch.delenv(connections.CONNECTIONS_VARIABLE)
    monkeypatch.setattr(connections, "gpu_capability", lambda: gpu)
    connections.set_connections(ParallelConfig(tp=2))
    assert os.environ.get(connections.CONNECTIONS_VARIABLE) == expected


def test_a_machine_without_nvidia_s_driver_has_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert connections.gpu_capability() is None


def test_collectives_outlast_what_the_watch_allows_in_a_weight_update() -> None:
    """Ranks may wait in one, with ``transfer = gather``, while rank 0 waits for servers; the watch is to speak first."""
    given = ["rollout.server.start_timeout_s=4000", "rollout.server.request_timeout_s=3600", "train.hang_timeout_s=100"]
    for config in (load_run(None, given), load_run(None, [])):
        allowed = config.train.hang_timeout_s + phase_limits(config)["sync"]
        assert collective_timeout(config).total_seconds() > allowed
