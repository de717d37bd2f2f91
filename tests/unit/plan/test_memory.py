"""What a plan knows of optimizer states on the host and in fewer bits, of servers on the same GPU, and of FP8 servers."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.config import RunConfig
from tepo_megatron.config.load import load_run
from tepo_megatron.plan import make_plan
from tepo_megatron.plan import memory as of_the_plan
from tepo_megatron.plan.memory import TrainingRanks
from tepo_megatron.plan.run_plan import Plan
from tepo_megatron.plan.shapes import resolve_spec
from tepo_megatron.run import checks
from tepo_megatron.run.step.placement import Placement
from tepo_megatron.runtime.machine import Machine
from tepo_megatron.trainer.megatron import policy
from tepo_megatron.trainer.megatron.model.fp8 import token_multiple as of_the_engine

EXAMPLES = Path(__file__).parents[3] / "examples"
H200, LLAMA = str(EXAMPLES / "qwen2.5-7b-h200/run.yaml"), str(EXAMPLES / "llama3.3-70b/run.yaml")
PARAMETERS, GIB = 7_615_616_512, 2**30
SPEC = resolve_spec("Qwen2.5-7B")[0]
FP32 = ("store_param_remainders=false", "exp_avg_dtype=float32", "exp_avg_sq_dtype=float32")


def plan(*overrides: str, path: str = H200) -> Plan:
    return make_plan(load_run(Path(path), list(overrides)))


def optimizer(*settings: str) -> list[str]:
    return [f"optimizer.{setting}" for setting in settings]


def test_7b_trains_and_samples_on_one_h200() -> None:
    found = plan()
    assert found.problems == ()
    assert found.config.engine.parallel.world_size == 1
    assert found.config.rollout.server.placement == "colocated"
    assert found.worst.optimizer == (2 + 2 + 2) * PARAMETERS
    assert found.worst.total < 0.9 * 139 * GIB
    (problem,) = plan(*optimizer(*FP32)).problems
    assert "the largest term is optimizer with 85.1 GiB" in problem
    away, reduced = re.findall(r"with (optimizer[^()]+) \(([\d.]+) GiB\)", problem)
    assert (away[0], reduced[1]) == ("optimizer.offload_fraction = 1.0", f"{found.worst.total / GIB:.1f}")
    assert f"{plan(*optimizer(*FP32, 'offload_fraction=1')).worst.total / GIB:.1f}" == away[1]


@given(st.floats(0, 1), st.sampled_from([("float32", 4), ("bfloat16", 2), ("float16", 2), ("fp8", 1)]), st.booleans())
def test_states_are_counted_where_they_are(fraction: float, moment: tuple[str, int], remainders: bool) -> None:
    dtype, size = moment
    reduced = remainders or dtype != "float32"
    lean = {"exp_avg_dtype": dtype, "store_param_remainders": remainders} if reduced else {"offload_fraction": fraction}
    config = RunConfig.model_validate({"model": {"dtype": "bfloat16"}, "optimizer": {"distributed": True, **lean}})
    ranks = TrainingRanks(SPEC, config)
    if reduced:
        assert ranks.state_bytes == (2 if remainders else 4) + size + 4
        assert ranks.host_state_bytes == 0
    else:
        assert ranks.state_bytes == pytest.approx(12 * (1 - fraction))
        assert ranks.host_state_bytes == 20 * fraction


def test_a_step_copies_as_much_at_once_as_the_engine_does() -> None:
    """Of both moments, in fp32: of a part, or of the largest tensor, which is the embedding of 152 064 × 3 584."""
    assert of_the_plan.PART_ELEMENTS == policy.PART_ELEMENTS
    found = plan()
    assert TrainingRanks(found.spec, found.config).step_copies(PARAMETERS) == 4 * 2 * 152_064 * 3_584
    assert found.worst.activations + found.worst.logits > 4 * 2 * 152_064 * 3_584
    short = plan("engine.micro_batch_tokens=64", "rollout.sampling.max_new_tokens=32", "data.max_prompt_tokens=32")
    assert (short.worst.activations, short.worst.transient) == (0, 4 * 2 * 152_064 * 3_584)


def test_states_on_the_host_cost_its_memory_and_a_step_time() -> None:
    here, away = plan(*optimizer(*FP32), "cluster.gpu_memory_gib=200"), plan(*optimizer(*FP32, "offload_fraction=1"))
    assert away.hosts[0].states == 20 * PARAMETERS
    assert away.time.adam == pytest.approx(4 * PARAMETERS * (8 / (0.7 * 55e9) + 1 / 2e9))
    assert here.time.adam == pytest.approx(4 * PARAMETERS * (4 + 24 + 2) / (0.7 * 4800e9))
    (problem,) = plan(*optimizer(*FP32, "offload_fraction=1"), "cluster.host_memory_gib=100").problems
    assert "1 training ranks on a node need 162 GiB of its host's memory, more than cluster.host_memory_gib = 100" in problem


def test_servers_on_the_same_gpu_cost_memory_while_they_sleep_and_time_when_they_wake() -> None:
    found = plan()
    assert found.worst.server == 3 * GIB
    left = found.worst.weights + found.worst.optimizer
    assert found.hosts[0].turns == left
    assert found.time.turns == pytest.approx(2 * left / (0.7 * 55e9))
    (problem,) = plan("rollout.server.gpu_memory_utilization=0.995").problems
    assert "the trainer keeps 1.5 GiB of its 139 for CUDA and NCCL; lower it to 0.98" in problem
    assert plan("rollout.server.gpu_memory_utilization=0.98").problems == ()


def test_fp8_servers_hold_linear_layers_in_one_byte() -> None:
    fp8 = ("rollout.server.quantization=fp8_per_block", "rollout.uncorrected=true")
    whole, half = plan(path=LLAMA), plan(*fp8, path=LLAMA)
    linear = 80 * 8192 * (2 * 8192 + 2 * 1024 + 3 * 28672)
    assert whole.server.weights - half.server.weights == linear / 4
    assert half.server.kv_cache - whole.server.kv_cache == linear / 4
    assert half.sync == whole.sync
    assert half.time.generation < whole.time.generation


@given(
    st.sampled_from(["none", "tensorwise", "blockwise", "mxfp8"]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 2]),
    st.booleans(),
)
def test_padding_is_that_of_the_engine(recipe: str, tp: int, cp: int, sequence_parallel: bool) -> None:
    parallel = {"tp": tp, "cp": cp, "sequence_parallel": sequence_parallel and tp > 1}
    fp8 = {"recipe": "none" if cp > 1 and recipe == "tensorwise" else recipe}
    config = RunConfig.model_validate(
        {"model": {"dtype": "bfloat16"}, "engine": {"platform": "cuda", "parallel": parallel, "fp8": fp8}}
    )
    assert TrainingRanks(SPEC, config).token_multiple == of_the_engine(config.engine)


# -- tepo train asks ---------------------------------------------------------------------------------------------------------

ONE_GPU = Machine(gpus=1, has_nccl=True, local_ranks=1, ranks=1)


@pytest.fixture
def gpu_of(monkeypatch: pytest.MonkeyPatch) -> object:
    def set_memory(gib: float) -> None:
        monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
        monkeypatch.setattr("torch.cuda.get_device_properties", lambda gpu: SimpleNamespace(total_memory=gib * 2**30))

    return set_memory


def test_a_run_is_refused_by_the_memory_of_the_gpus_that_are_here(gpu_of) -> None:
    given = load_run(Path(H200), optimizer(*FP32))
    spec = plan().spec
    gpu_of(139.0)
    Placement(load_run(Path(H200), []), ONE_GPU).check_memory(spec)
    with pytest.raises(ValueError, match=r"does not fit: a training rank needs 152.5 GiB, .* It fits with optimizer.off"):
        Placement(given, ONE_GPU).check_memory(spec)
    gpu_of(200.0)  # whatever cluster.gpu_memory_gib says
    Placement(given, ONE_GPU).check_memory(spec)
    gpu_of(79.0)
    given = given.model_copy(update={"engine": given.engine.model_copy(update={"check_memory": False})})
    with pytest.warns(UserWarning, match="the run does not fit"):
        Placement(given, ONE_GPU).check_memory(spec)


def test_a_run_on_cpus_is_not_asked_about(monkeypatch: pytest.MonkeyPatch, gpu_of) -> None:
    """70B on a machine without a GPU may be slow; it is asked only where something would be built on a GPU."""
    gpu_of(0.001)
    spec = plan(path=LLAMA).spec
    given = load_run(Path(LLAMA), [])
    Placement(given, Machine(gpus=0, has_nccl=False, local_ranks=8, ranks=64)).check_memory(spec)
    on_cpu = load_run(Path(LLAMA), ["engine.platform=cpu"])
    Placement(on_cpu, Machine(gpus=8, has_nccl=True, local_ranks=8, ranks=64)).check_memory(spec)
    monkeypatch.setattr(checks, "this_machine", lambda: Machine(gpus=8, has_nccl=True, local_ranks=1, ranks=1))
    gpu_of(0.5)
    with pytest.raises(ValueError, match="the run does not fit: a training rank needs"):
        checks.check_model(load_run(None, []))  # as tepo train does, before anything is started
