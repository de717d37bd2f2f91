"""Real gloo worlds on this machine, for tests.

    def work(rank, world, columns): ...          # module-level function of a test file
    results = run_dist(2, work, 16)              # list of what the ranks returned
    run_world("routing", 4, "case.json")         # the program tests/support/worlds/routing.py on four ranks

Ranks are forks of one process that has imported torch, Megatron and the engine. It starts with the first world and ends with
this process. A world of four is there in half a second; four fresh processes would import for four seconds each.
"""

import importlib
import multiprocessing as mp
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined] # torch exports it without saying so

from tepo_megatron.runtime.rendezvous import share_gloo_thread

HOST = "127.0.0.1"
_OURS = ["tepo_megatron.sampler.rollout_file", "tepo_megatron.tools.faults.preloaded"]
IMPORTED = ["hypothesis", "pytest", "transformers", *_OURS]
"""What ranks find imported."""

LOG_CHARACTERS = 4000


def run_dist(world: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Run ``fn(rank, world, *args)`` on ``world`` processes that share a gloo group, and return what they returned.

    ``fn`` is a module-level function of a test or of ``tests.support``. Every process has one thread and this process'
    environment. If a rank raises, RuntimeError carries its traceback and the other ranks are stopped.
    """
    return _run(world, _in_group, fn, args)


def run_world(name: str, world: int, *arguments: object) -> None:
    """Run ``main()`` of ``tests.support.worlds.NAME`` with these arguments on every rank of a world, as torchrun would.

    The rank is told by torchrun's variables; the program makes its process group. Errors are raised as by :func:`run_dist`.
    """
    _run(world, _as_program, name, [str(argument) for argument in arguments])


def end_model_parallel() -> None:
    """Let the next engine of this world split the same ranks again. Every rank calls.

    Megatron forgets its groups and leaves them open, with about fifty threads a rank.
    """
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.barrier()  # no rank closes a connection that another one still reads
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def _in_group(rank: int, world: int, port: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    store = TCPStore(HOST, port, world + 1, is_master=False, wait_for_workers=False)
    share_gloo_thread()
    os.environ["WORLD_SIZE"] = str(world)  # an engine reads it
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    result = fn(rank, world, *args)
    dist.barrier()  # a rank that leaves early would break its peers' connections
    dist.destroy_process_group()
    return result


def _as_program(rank: int, world: int, port: int, name: str, arguments: list[str]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": HOST, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    sys.argv = [name, *arguments]
    importlib.import_module(f"tests.support.worlds.{name}").main()


def _run(world: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    # port 0: the operating system picks one, and it is held from then on, so two tests cannot meet
    store = TCPStore(HOST, 0, world + 1, is_master=True, wait_for_workers=False)
    context = imported()
    outbox = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, f"rank{rank}.log") for rank in range(world)]
        ranks = [
            context.Process(target=_rank, args=(rank, world, store.port, logs[rank], dict(os.environ), outbox, work, args))
            for rank in range(world)
        ]
        try:
            for process in ranks:
                process.start()
            return _collect(ranks, outbox, logs)
        finally:
            for process in ranks:
                if process.pid is not None:
                    process.kill()
                    process.join()


def imported() -> Any:
    """Forks of a process that has the imports; where there is a GPU, whose driver a fork cannot take along, fresh processes."""
    if torch.cuda.is_available():
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # read when torch is imported: there
        forkserver.ensure_running()
    return context


def _collect(ranks: list[Any], outbox: Any, logs: list[Path]) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(ranks):
        while not outbox.empty():
            rank, result, error = pickle.loads(outbox.get())
            if error is not None:
                raise RuntimeError(f"rank {rank} of {len(ranks)} raised:\n{error}\n{_end(logs[rank])}")
            results[rank] = result
        for rank, process in enumerate(ranks):
            process.join(0.02)
            if rank not in results and process.exitcode is not None and outbox.empty():
                code = process.exitcode
                raise RuntimeError(f"rank {rank} of {len(ranks)} died with exit code {code}\n{_end(logs[rank])}")
    return [results[rank] for rank in range(len(ranks))]


def _end(log: Path) -> str:
    return log.read_text(errors="replace")[-LOG_CHARACTERS:] if log.exists() else ""


def _rank(
    rank: int, world: int, port: int, log: Path, environment: dict[str, str], outbox: Any, work: Callable[..., Any], args: Any
) -> None:
    with log.open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.environ.clear()
    os.environ |= environment
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform.startswith("linux") else "lo0"
    torch.set_num_threads(1)
    try:
        outbox.put(_by_value(rank, work(rank, world, port, *args), None))
    except BaseException:  # SystemExit too: whoever leaves without a result has failed
        outbox.put(_by_value(rank, None, traceback.format_exc()))


def _by_value(*items: Any) -> bytes:
    return pickle.dumps(items)  # a queue would pass tensors as shared memory, which dies with this process
