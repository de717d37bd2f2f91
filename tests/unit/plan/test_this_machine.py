"""``tepo train`` asks the plan whether this machine's GPUs, host and servers' caches are enough."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tepo_megatron.config.load import load_run
from tepo_megatron.plan.shapes import resolve_spec
from tepo_megatron.run import checks
from tepo_megatron.run.step.placement import Placement
from tepo_megatron.runtime.machine import Machine

EXAMPLES = Path(__file__).parents[3] / "examples"
H200, LLAMA = (EXAMPLES / name / "run.yaml" for name in ("qwen2.5-7b-h200", "llama3.3-70b"))
FP32 = ("store_param_remainders=false", "exp_avg_dtype=float32", "exp_avg_sq_dtype=float32")
SPEC = resolve_spec("Qwen2.5-7B")[0]
ONE_GPU = Machine(gpus=1, has_nccl=True, local_ranks=1, ranks=1)


@pytest.fixture
def gpu_of(monkeypatch: pytest.MonkeyPatch) -> object:
    def set_memory(gib: float) -> None:
        monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
        monkeypatch.setattr("torch.cuda.get_device_properties", lambda gpu: SimpleNamespace(total_memory=gib * 2**30))

    return set_memory


def test_a_run_is_refused_by_the_memory_of_the_gpus_that_are_here(gpu_of) -> None:
    given = load_run(H200, [f"optimizer.{setting}" for setting in FP32])
    spec = SPEC
    gpu_of(139.0)
    Placement(load_run(H200, []), ONE_GPU).check_memory(spec)
    with pytest.raises(ValueError, match=r"does not fit: a training rank needs 152.7 GiB, .* It fits with optimizer.off"):
        Placement(given, ONE_GPU).check_memory(spec)
    gpu_of(200.0)  # whatever cluster.gpu_memory_gib says
    Placement(given, ONE_GPU).check_memory(spec)
    gpu_of(79.0)
    given = given.model_copy(update={"engine": given.engine.model_copy(update={"check_memory": False})})
    with pytest.warns(UserWarning, match="the run does not fit"):
        Placement(given, ONE_GPU).check_memory(spec)


def test_a_run_is_refused_by_the_memory_of_this_machine_s_host(gpu_of) -> None:
    gpu_of(139.0)
    run, spec = load_run(H200, ["train.async_save=false"]), SPEC
    Placement(run, replace(ONE_GPU, memory=70 * 2**30)).check_memory(spec)
    with pytest.raises(ValueError, match=r"1 training ranks on a node need 63 GiB of its host's memory, more than"):
        Placement(run, replace(ONE_GPU, memory=48 * 2**30)).check_memory(spec)
    large = load_run(H200, ["train.async_save=false", "cluster.host_memory_gib=1"])  # whatever it says
    Placement(large, replace(ONE_GPU, memory=70 * 2**30)).check_memory(spec)


def test_external_servers_are_not_judged_by_the_trainer_s_gpus(gpu_of) -> None:
    gpu_of(139.0)
    spec, few = SPEC, "rollout.server.gpu_memory_utilization=0.1"
    external = load_run(H200, [few, "rollout.server={placement: external, registry: /r}"])
    Placement(external, ONE_GPU).check_memory(spec)
    with pytest.raises(ValueError, match=r"a vLLM worker with rollout\.server\.tp = 1 has -3\.3 GiB for its KV cache"):
        Placement(load_run(H200, [few]), ONE_GPU).check_memory(spec)


def test_a_run_on_cpus_is_asked_about_its_servers_alone(monkeypatch: pytest.MonkeyPatch, gpu_of) -> None:
    """70B on a machine without a GPU may be slow; vLLM's cache there has a size of its own."""
    gpu_of(0.001)
    here, wide = Machine(gpus=0, has_nccl=False, local_ranks=1, ranks=1), "model.path=Qwen3-14B"
    for overrides in (
        ["rollout.server={max_model_len: 1024}"],
        ["rollout.server={max_model_len: 1024}", "data.max_prompt_tokens=1024"],  # a bound that its prompts may not reach
        ["rollout.server={cpu_kv_cache_gib: 13}"],
        ["rollout.server={placement: external, registry: /r}"],
        ["rollout.replay=/r"],
    ):
        small = load_run(None, [wide, *overrides])
        Placement(small, here).check_memory(resolve_spec("Qwen3-14B")[0])
    with pytest.raises(
        ValueError, match=r"only with room for one sequence .*, or raise .* or rollout\.server\.cpu_kv_cache_gib"
    ):
        Placement(load_run(None, [wide]), here).check_memory(resolve_spec("Qwen3-14B")[0])
    given = load_run(LLAMA)
    spec = resolve_spec(given.model.path)[0]
    Placement(given, Machine(gpus=0, has_nccl=False, local_ranks=8, ranks=64)).check_memory(spec)
    on_cpu = load_run(LLAMA, ["engine.platform=cpu"])
    Placement(on_cpu, Machine(gpus=8, has_nccl=True, local_ranks=8, ranks=64)).check_memory(spec)
    monkeypatch.setattr(checks, "this_machine", lambda: Machine(gpus=8, has_nccl=True, local_ranks=1, ranks=1))
    gpu_of(0.5)
    with pytest.raises(ValueError, match="the run does not fit: a training rank needs"):
        checks.check_model(load_run(None, []))  # as tepo train does, before anything is started
