"""The patches that let Megatron run on a CPU, and what a process sets on a GPU."""

import contextlib
import ctypes
import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tepo_megatron.config import EngineConfig
from tepo_megatron.config.load import load_run
from tepo_megatron.trainer.megatron.gpu import CONNECTIONS_VARIABLE, prepare_process
from tepo_megatron.trainer.megatron.parallel import platform as platform_cpu
from tepo_megatron.trainer.megatron.parallel.platform import collective_timeout
from tests.support.engines import make_engine
from tests.support.launch import run_dist
from tests.support.processes import python_programs
from tests.support.programs import TIMEOUT_S
from tests.support.random_models import draw_rollouts, write_llama

MODE = "while Megatron runs"
PATCHES = [f"{getattr(owner, '__name__', owner)}.{name}" for owner, name, _ in platform_cpu.Platform.cpu_patches()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("model"), tie_word_embeddings=True)


def train_one_step(rank: int, world: int, model: Path, missing: str | None) -> None:
    """Two pipeline stages with full recomputation, and Adam's states on the host; without one of the patches."""
    kept = [patch for patch, key in zip(platform_cpu.Platform.cpu_patches(), PATCHES, strict=True) if key != missing]
    platform_cpu.Platform.cpu_patches = staticmethod(lambda: kept)  # type: ignore[method-assign]
    if missing == MODE:
        platform_cpu.Platform.megatron = lambda self: contextlib.nullcontext()  # type: ignore[method-assign]
    engine = make_engine(
        {
            "model": {"path": str(model), "dtype": "bfloat16"},
            "optimizer": {"distributed": True, "offload_fraction": 0.5},
            "engine": {"parallel": {"pp": world}, "recompute": "full", "micro_batch_tokens": 8},
            "train": {"steps": 1, "minibatches": 1},
        }
    )
    waiting = len(torch.cuda._queued_calls)
    engine.update(engine.score(engine.batch_from_root(draw_rollouts([5] * 3))))
    assert len(torch.cuda._queued_calls) == waiting


@pytest.mark.slow
@pytest.mark.parametrize("missing", [None, *PATCHES, MODE])
def test_megatron_trains_with_all_patches_and_fails_without_one(model: Path, missing: str | None) -> None:
    """If this fails without one, upstream no longer needs the patch: remove it."""
    with pytest.raises(RuntimeError, match=r"rank [01] of 2 raised:") if missing else contextlib.nullcontext():
        run_dist(2, train_one_step, model, missing)


BUILDS_AGAIN = """
import sys
from pathlib import Path
from unittest.mock import DEFAULT, patch
from megatron.core import parallel_state
from tepo_megatron.config import RunConfig
from tepo_megatron.runtime.heartbeat import Heartbeat
from tepo_megatron.trainer.megatron.policy import PolicyBuilder
from tepo_megatron.trainer.protocol import trainer_kind

model = Path(sys.argv[1])
config = RunConfig.model_validate({"model": {"path": sys.argv[1], "dtype": "float32"}})

def build():
    return trainer_kind().make_trainer(config, model, teachers={}, shares_gpus=False, heartbeat=Heartbeat())

make = parallel_state.create_group
groups = patch.object(parallel_state, "create_group", wraps=make, side_effect=[*[DEFAULT] * 5, KeyboardInterrupt])
for interrupted in (groups, patch.object(PolicyBuilder, "policy", side_effect=KeyboardInterrupt)):
    try:
        with interrupted:
            build()
    except KeyboardInterrupt:
        build().close()
        print("built")
"""


def test_a_build_that_was_interrupted_leaves_no_groups_to_the_next(model: Path) -> None:
    with python_programs({}, forks=True) as start:
        process = start("-c", BUILDS_AGAIN, model)
        out, err = process.communicate(TIMEOUT_S)
    assert (out.count("built"), process.returncode) == (2, 0), err


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_another_line_of_megatron_is_refused(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: kind == "cuda")
    monkeypatch.setattr(torch.cuda, "set_device", Mock(side_effect=AssertionError("a device was set")))
    monkeypatch.setattr(platform_cpu, "installed_version", lambda _: "0.17.0")
    with pytest.raises(RuntimeError, match=r"megatron-core 0\.17\.0 is not supported; install 0\.16\.x"):
        platform_cpu.select_platform(EngineConfig(platform=kind))


def test_a_machine_with_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match="this machine has a GPU"):
        platform_cpu.select_platform(EngineConfig(platform="cpu"))


A100, H100, B200, RTX_5090 = (8, 0), (9, 0), (10, 0), (12, 0)


def driver(capability: tuple[int, int] | None) -> Mock:
    """Loads NVIDIA's library on a machine with this GPU; ``None``: without the library."""

    def tell(gpu: Any, *places: Any) -> int:
        for place, value in zip(places, capability, strict=True):
            place._obj.value = value
        return 0

    done = Mock(return_value=0)
    library = Mock(nvmlInit_v2=done, nvmlDeviceGetHandleByIndex_v2=done, nvmlDeviceGetCudaComputeCapability=tell)
    return Mock(return_value=library) if capability else Mock(side_effect=OSError("cannot open shared object file"))


@pytest.mark.parametrize(
    ("preset", "parallel", "capability", "expected"),
    [
        *((None, parallel, capability, "1") for parallel in ("tp=2", "cp=2") for capability in (A100, H100)),
        *((None, parallel, capability, None) for parallel in ("tp=2", "cp=2") for capability in (B200, RTX_5090, None)),
        *((None, parallel, H100, None) for parallel in ("tp=1", "dp=2", "pp=2")),
        ("8", "tp=2", H100, "8"),
    ],
)
def test_it_is_for_tensor_and_context_parallelism_before_blackwell(
    preset: str | None, parallel: str, capability: tuple[int, int] | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
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
