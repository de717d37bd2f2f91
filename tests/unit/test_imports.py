"""Importing does nothing: no patch, no process group, no change of the environment; and config needs no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.programs import TIMEOUT_S

SCRIPT = """
import importlib, os, pkgutil, warnings
warnings.filterwarnings("ignore")
import torch, torch.distributed, megatron.core
watched = [torch.cuda, torch.Tensor, torch.distributed]
before = [dict(vars(owner)) for owner in watched]
environment = dict(os.environ)
import tepo_megatron
for module in pkgutil.walk_packages(tepo_megatron.__path__, "tepo_megatron."):
    of_other_environments = ("tepo_megatron.rollout.plugin.", "tepo_megatron.launch.slurm_logs")  # with vLLM, with NeMo-Run
    if not module.name.startswith(of_other_environments) and not module.name.endswith("__main__"):
        importlib.import_module(module.name)
for owner, names in zip(watched, before):
    changed = [name for name, value in vars(owner).items() if name in names and names[name] is not value]
    assert not changed, (owner, changed)
assert not torch.distributed.is_initialized()
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
