"""Servers whose processes are forks, on CPUs: what a fork releases, and that vLLM by itself still does otherwise."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.runtime.machine import read_cores


@given(st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=5), min_size=1, max_size=4), st.data())
def test_cores_are_read_as_they_are_written(workers: list[list[int]], data: st.DataObject) -> None:
    def written(core: int) -> tuple[str, list[int]]:
        more = data.draw(st.none() | st.integers(0, 3))
        return (str(core), [core]) if more is None else (f"{core}-{core + more}", list(range(core, core + more + 1)))

    parts = [[written(core) for core in cores] for cores in workers]
    text = "|".join(",".join(part for part, _ in worker) for worker in parts)
    assert read_cores(text) == [[core for _, meant in worker for core in meant] for worker in parts]


VLLM = """
import json, os, signal, socket
from vllm.config import ParallelConfig, VllmConfig
from vllm.utils.system_utils import get_mp_context
from tepo_megatron.sampler.vllm.plugin.patches import fork_processes

def look(executor):
    config = VllmConfig(parallel_config=ParallelConfig(distributed_executor_backend=executor)).parallel_config
    return [config.distributed_executor_backend, get_mp_context().get_start_method()]

name = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
own = look("uni")
fork_processes()
port, local, (signals, waker) = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX), socket.socketpair()
waker.setblocking(False)
signal.set_wakeup_fd(waker.fileno())  # as an event loop does
answer, question = os.pipe()
if os.fork() == 0:
    released = [os.fstat(one.fileno()).st_ino == os.stat(os.devnull).st_ino for one in (port, local)]
    os.write(question, json.dumps([released, signal.set_wakeup_fd(-1)]).encode())
    os._exit(0)
fork = json.loads(os.read(answer, 1000))
parent = [port.getsockname()[1] > 0, signal.set_wakeup_fd(-1) == waker.fileno()]
print(json.dumps([own, look(name), fork, parent]))
"""


@pytest.mark.slow
def test_vllm_by_itself_spawns_on_a_cpu_and_forks_keep_neither_the_port_nor_the_signals_of_their_parent() -> None:
    """Where it no longer spawns, decision 020 can go, with ``fork_processes`` and the name of the executor in ``server``."""
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    printed = subprocess.run([sys.executable, "-c", VLLM], env=environment, capture_output=True, text=True, check=True).stdout
    own, ours, fork, parent = json.loads(printed.splitlines()[-1])
    assert own == ["mp", "spawn"]
    assert ours == ["vllm.v1.executor.uniproc_executor.UniProcExecutor", "fork"]
    assert fork == [[True, False], -1]
    assert parent == [True, True]
