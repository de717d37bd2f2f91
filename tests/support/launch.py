"""Real gloo worlds on this machine, for tests.

def work(rank, world, columns): ...          # module-level function of a test file
results = run_dist(2, work, 16)              # list of what the ranks returned
"""

import importlib.util
import inspect
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_dist(world: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Run ``fn(rank, world, *args)`` on ``world`` fresh processes that share a gloo group, and return what they returned.

    ``fn`` is a module-level function of any file, importable or not. Every process has one thread. If a rank raises,
    RuntimeError carries its traceback and the other ranks are stopped.
    """
    # port 0: the operating system picks one, and it is held from then on, so two tests cannot meet
    store = dist.TCPStore("127.0.0.1", 0, world + 1, is_master=True, wait_for_workers=False)
    context = mp.get_context("spawn")
    outbox = context.SimpleQueue()
    where = (str(Path(inspect.getfile(fn)).resolve()), fn.__qualname__)
    ranks = [context.Process(target=_rank, args=(rank, world, store.port, where, args, outbox)) for rank in range(world)]
    for process in ranks:
        process.start()
    try:
        return _collect(ranks, outbox)
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _collect(ranks: list[Any], outbox: Any) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(ranks):
        while not outbox.empty():
            rank, result, error = pickle.loads(outbox.get())
            if error is not None:
                raise RuntimeError(f"rank {rank} of {len(ranks)} raised:\n{error}")
            results[rank] = result
        for rank, process in enumerate(ranks):
            process.join(0.02)
            if rank not in results and process.exitcode not in (None, 0) and outbox.empty():
                raise RuntimeError(f"rank {rank} of {len(ranks)} died with exit code {process.exitcode}")
    return [results[rank] for rank in range(len(ranks))]


def _rank(rank: int, world: int, port: int, where: tuple[str, str], args: tuple[Any, ...], outbox: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform.startswith("linux") else "lo0"
    torch.set_num_threads(1)
    try:
        store = dist.TCPStore("127.0.0.1", port, world + 1, is_master=False, wait_for_workers=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        outbox.put(_by_value(rank, _load(*where)(rank, world, *args), None))
        dist.barrier()  # a rank that leaves early would break its peers' connections
        dist.destroy_process_group()
    except Exception:
        outbox.put(_by_value(rank, None, traceback.format_exc()))


def _by_value(*items: Any) -> bytes:
    return pickle.dumps(items)  # a queue would pass tensors as shared memory, which dies with this process


def _load(path: str, name: str) -> Callable[..., Any]:
    """The function by its file: test files are not importable by name under pytest's importlib mode."""
    spec = importlib.util.spec_from_file_location(f"_dist_{Path(path).stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, name)
