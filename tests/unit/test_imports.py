"""Importing does nothing: no patch, no process group, no look at the environment; and config needs no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.programs import TIMEOUT_S

SCRIPT = """
import importlib.util, os, pkgutil, sys, warnings
warnings.filterwarnings("ignore")
import torch, torch.distributed, megatron.core

watched = [torch.cuda, torch.Tensor, torch.distributed]
before = [dict(vars(owner)) for owner in watched]
environment = dict(os.environ)

ours = os.path.dirname(importlib.util.find_spec("tepo_megatron").origin) + os.sep
ways_to_it = (os.__file__, "<frozen os>", "<frozen _collections_abc>", "/_collections_abc.py", "/triton/knobs.py")
reads = []

def note(name):
    # Who asks: the first frame that is not one of the ways to the environment. What a library reads for itself is its own.
    frame = sys._getframe(2)
    while frame.f_code.co_filename.endswith(ways_to_it):
        frame = frame.f_back
    if frame.f_code.co_filename.startswith(ours):
        reads.append(f"{frame.f_code.co_filename}:{frame.f_lineno} reads {name}")

class Watched(type(os.environ)):
    def __getitem__(self, name):
        note(name)
        return super().__getitem__(name)

    def __iter__(self):
        note("all of it")
        return super().__iter__()

os.environ.__class__ = Watched
try:
    import triton.knobs
except ModuleNotFoundError:
    pass  # then the modules that need it are not importable either
else:
    for function in ("getenv", "getenv_bool"):  # Triton asks the C library
        def watch(name, *default, of=getattr(triton.knobs, function)):
            note(name)
            return of(name, *default)
        setattr(triton.knobs, function, watch)

import tepo_megatron
for module in pkgutil.walk_packages(tepo_megatron.__path__, "tepo_megatron."):
    of_other_environments = ("tepo_megatron.sampler.vllm.plugin.", "tepo_megatron.launch.slurm_logs")
    if not module.name.startswith(of_other_environments) and not module.name.endswith("__main__"):
        importlib.import_module(module.name)
for owner, names in zip(watched, before):
    changed = [name for name, value in vars(owner).items() if name in names and names[name] is not value]
    assert not changed, (owner, changed)
assert not torch.distributed.is_initialized()
assert not reads, reads
assert {k: v for k, v in os.environ.items() if environment.get(k) != v} == {}
"""


def run(script: str) -> None:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_importing_every_module_changes_nothing() -> None:
    run(SCRIPT)


def test_config_and_cli_need_no_torch() -> None:
    run(
        "import sys, tepo_megatron.config.load, tepo_megatron.cli.main\n"
        "assert not {'torch', 'megatron', 'vllm'} & set(sys.modules)"
    )
