"""Servers whose processes are forks, on CPUs: what a fork releases, and that vLLM by itself still does otherwise."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.runtime.machine import read_cores
from tepo_megatron.sampler.vllm.plugin.patches import leave_parent


def look(answer: Connection, internet: int, local: int) -> None:
    leave_parent()
    nothing = os.stat(os.devnull)
    answer.send([os.fstat(each).st_ino == nothing.st_ino for each in (internet, local)])
    answer.send(signal.set_wakeup_fd(-1))


@pytest.fixture
def wakeup() -> Iterator[int]:
    """The descriptor to which this process' signals are told, as an event loop has it."""
    here, there = socket.socketpair()
    there.setblocking(False)
    before = signal.set_wakeup_fd(there.fileno())
    yield there.fileno()
    signal.set_wakeup_fd(before)
    here.close()
    there.close()


def test_a_fork_keeps_neither_the_port_nor_the_signals_of_its_parent(wakeup: int) -> None:
    context = multiprocessing.get_context("fork")
    asked, answer = context.Pipe(duplex=False)
    with socket.create_server(("127.0.0.1", 0)) as port, socket.socket(socket.AF_UNIX) as local:
        child = context.Process(target=look, args=(answer, port.fileno(), local.fileno()))
        child.start()
        assert asked.recv() == [True, False]
        assert asked.recv() == -1
        child.join()
        assert port.getsockname()[1] > 0  # the parent's own is open
    assert signal.set_wakeup_fd(wakeup) == wakeup


@given(st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=5), min_size=1, max_size=4), st.data())
def test_cores_are_read_as_they_are_written(workers: list[list[int]], data: st.DataObject) -> None:
    def written(core: int) -> tuple[str, list[int]]:
        more = data.draw(st.none() | st.integers(0, 3))
        return (str(core), [core]) if more is None else (f"{core}-{core + more}", list(range(core, core + more + 1)))

    parts = [[written(core) for core in cores] for cores in workers]
    text = "|".join(",".join(part for part, _ in worker) for worker in parts)
    assert read_cores(text) == [[core for _, meant in worker for core in meant] for worker in parts]


VLLM = """
import json
from vllm.config import ParallelConfig, VllmConfig
from vllm.utils.system_utils import get_mp_context
from tepo_megatron.sampler.vllm.plugin.patches import fork_processes

def look(executor):
    config = VllmConfig(parallel_config=ParallelConfig(distributed_executor_backend=executor)).parallel_config
    return [config.distributed_executor_backend, get_mp_context().get_start_method()]

name = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
own = look("uni")
fork_processes()
print(json.dumps([own, look(name)]))
"""


@pytest.mark.slow
def test_vllm_by_itself_spawns_on_a_cpu() -> None:
    """Where it no longer does, decision 020 can go, with ``fork_processes`` and the name of the executor in ``server``."""
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    printed = subprocess.run([sys.executable, "-c", VLLM], env=environment, capture_output=True, text=True, check=True).stdout
    own, ours = json.loads(printed.splitlines()[-1])
    assert own == ["mp", "spawn"]
    assert ours == ["vllm.v1.executor.uniproc_executor.UniProcExecutor", "fork"]
