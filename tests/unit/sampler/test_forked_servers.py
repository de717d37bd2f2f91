"""Servers whose processes are forks, on CPUs: what a fork lets go of, which servers have them, and that vLLM by itself still
does otherwise. Real ones are the subject of ``tests/e2e``.
"""

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
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.config.rollout import ServerConfig
from tepo_megatron.runtime.machine import read_cores
from tepo_megatron.sampler.vllm.plugin import ROUTES_VARIABLE
from tepo_megatron.sampler.vllm.plugin.patches import FORK_VARIABLE, leave_parent, take_cores
from tepo_megatron.sampler.vllm.server import Server


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


@pytest.mark.parametrize(("cores", "worker"), [("0", "BoundWorker"), ("nobind", "RoutedWorker")])
def test_a_server_that_is_to_return_experts_does_on_a_cpu_too(cores: str, worker: str) -> None:
    def made(on_gpu: bool, **options: Any) -> tuple[list[str], dict[str, str]]:
        config = ServerConfig(**options)
        server = Server(config, model_dir=Path("model"), dtype="float32", cores=cores, key="key", log=Path("log"))
        return server.command(on_gpu=on_gpu), server.environment(on_gpu=on_gpu)

    command, environment = made(False, routing_replay=True)
    assert "--enable-return-routed-experts" in command
    assert command[command.index("--worker-cls") + 1] == f"tepo_megatron.sampler.vllm.plugin.workers.{worker}"
    assert ROUTES_VARIABLE in environment
    command, _ = made(True, routing_replay=True)
    assert "--enable-return-routed-experts" in command
    assert "--worker-cls" not in command  # on a GPU it is vLLM's own
    command, environment = made(False)
    assert "--enable-return-routed-experts" not in command
    assert ROUTES_VARIABLE not in environment


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere servers start as vLLM has them")
@pytest.mark.parametrize(
    ("cores", "tp", "on_gpu", "forks"),
    [
        ("3", 1, False, True),
        ("0|1", 2, False, True),
        ("0-3", 1, False, True),
        ("0,1", 1, False, True),
        ("0,2|1,3-5", 2, False, True),
        ("nobind", 1, False, False),
        ("3-0", 1, False, False),
        ("0|1", 1, False, False),  # two engines of one worker
        ("0", 1, True, False),
    ],
)
def test_processes_are_forks_where_each_worker_has_its_cores(cores: str, tp: int, on_gpu: bool, forks: bool) -> None:
    server = Server(ServerConfig(tp=tp), model_dir=Path("model"), dtype="float32", cores=cores, key="key", log=Path("log"))
    command, environment = server.command(on_gpu=on_gpu), server.environment(on_gpu=on_gpu)
    assert (FORK_VARIABLE in environment) == forks
    assert ("tepo_megatron.sampler.vllm.plugin.workers.BoundWorker" in command) == forks
    assert ("--distributed-executor-backend" in command) == (forks and tp == 1)
    assert command[1:3] == ["-m", "tepo_megatron.sampler.vllm.plugin.start" if forks else "vllm.entrypoints.openai.api_server"]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere servers start as vLLM has them")
def test_a_core_that_the_machine_has_not_is_a_sentence() -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(ValueError, match=r"worker 1 of this server cannot run on core 4095: .* set rollout.server.cpu_threads"):
        take_cores("0|4095", 1)
    assert os.sched_getaffinity(0) == before


@given(st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=5), min_size=1, max_size=4), st.data())
def test_cores_are_read_as_they_are_written(workers: list[list[int]], data: st.DataObject) -> None:
    def written(core: int) -> tuple[str, list[int]]:
        more = data.draw(st.none() | st.integers(0, 3))
        return (str(core), [core]) if more is None else (f"{core}-{core + more}", list(range(core, core + more + 1)))

    parts = [[written(core) for core in cores] for cores in workers]
    text = "|".join(",".join(part for part, _ in worker) for worker in parts)
    assert read_cores(text) == [[core for _, meant in worker for core in meant] for worker in parts]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere servers start as vLLM has them")
def test_a_worker_runs_on_all_of_its_cores() -> None:
    code = (
        "import os; from tepo_megatron.sampler.vllm.plugin.patches import take_cores; cores = sorted(os.sched_getaffinity(0))\n"
    )
    code += "taken = take_cores('4095|' + ','.join(map(str, cores)), 1)\n"
    code += "print(taken == len(cores), os.sched_getaffinity(0) == {*cores})"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["True", "True"]


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
    """Where it no longer does, decision 020 and what follows from it can go: ``forks``, ``bound_worker``, and the name of the
    executor in ``server``.
    """
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    printed = subprocess.run([sys.executable, "-c", VLLM], env=environment, capture_output=True, text=True, check=True).stdout
    own, ours = json.loads(printed.splitlines()[-1])
    assert own == ["mp", "spawn"]
    assert ours == ["vllm.v1.executor.uniproc_executor.UniProcExecutor", "fork"]
