"""Plans of models with experts: what a token meets, who shares optimizer states, and what cannot be trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from tepo_megatron.config.load import load_run
from tepo_megatron.plan import make_plan
from tepo_megatron.plan.memory import GIB, TrainingRanks
from tepo_megatron.plan.run_plan import Plan
from tepo_megatron.plan.time import forward_flops

RECIPE = Path(__file__).parents[3] / "examples" / "qwen2.5-7b" / "run.yaml"
SPLIT = ("dp=4", "tp=2", "sequence_parallel=true", "ep=4", "etp=1")


def plan(*parallel: str, model: str = "Mixtral-8x7B-v0.1") -> Plan:
    """Without servers, whose part is the bridge's planner's."""
    overrides = [
        f"model.path=/nowhere/{model}",
        "cluster.train_nodes=1",
        "rollout.replay=/nowhere",
        "optimizer.distributed=true",
        *(f"engine.parallel.{setting}" for setting in parallel),
    ]
    return make_plan(load_run(RECIPE, overrides))


def test_states_of_experts_are_shared_among_those_that_hold_the_same() -> None:
    """8 ranks in 4 expert-parallel groups hold each expert twice; the rest of the model is cut in 2 and held 4 times."""
    found = plan(*SPLIT)
    layers, hidden, ffn = 32, 4096, 14336
    experts = layers * 8 // 4 * 3 * hidden * ffn
    attention = layers * (2 * hidden * hidden + 2 * hidden * 1024) // 2
    dense = attention + layers * (8 * hidden + 2 * hidden) + hidden + 2 * 32000 // 2 * hidden
    assert found.stage_parameters == (experts + dense,)
    assert found.worst.optimizer == pytest.approx(12 * (dense / 4 + experts / 2))


def test_flops_and_activations_are_those_of_the_chosen_experts() -> None:
    found = plan(*SPLIT)
    spec, config = found.spec, found.config
    attention = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 2 * 4096)
    chosen = 32 * (8 * 4096 + 2 * 3 * 4096 * 14336)
    head = 32000 * 4096 + 4096
    assert forward_flops(spec, 0) == 2 * (attention + chosen + head)
    kept = TrainingRanks(spec, config).layer_activations
    assert kept["gate and up"] == 2 * 2 * 2 * 14336 / 2, "bfloat16, two matrices, two experts, half of the tokens"
    assert kept["experts' inputs"] == 2 * 2 * 4096 / 2
    assert any("every expert gets as many tokens" in text for text in found.assumptions)


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (("tp=2", "dp=2"), "tp = 2 with experts needs sequence parallelism"),
        (("dp=4", "tp=1", "ep=3"), r"ep × etp = 3 × 1 does not divide the 4 ranks"),
        (("dp=4", "tp=2", "sequence_parallel=true", "etp=1"), "etp = 1 differs from tp = 2"),
    ],
)
def test_what_could_not_be_trained_is_refused(parallel: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan("sequence_parallel=false", *parallel)


def test_experts_are_for_models_that_have_some() -> None:
    with pytest.raises(ValueError, match="ep = 2 is for models with experts; unset it for Qwen2ForCausalLM"):
        plan("tp=1", "dp=2", "ep=2", "sequence_parallel=false", model="Qwen2.5-7B")


def test_records_of_routes_are_counted_on_the_host() -> None:
    """Mixtral's take 64 bytes a token: 32 layers of two experts."""
    settings = ("train.steps=1", "rollout.prompts_per_step=32", "rollout.samples_per_prompt=8")
    overrides = [f"engine.parallel.{setting}" for setting in SPLIT] + [
        "model.path=/nowhere/Mixtral-8x7B-v0.1",
        "cluster.train_nodes=1",
        "cluster.rollout_nodes=1",
        "optimizer.distributed=true",
        *settings,
    ]
    without, found = (
        make_plan(load_run(RECIPE, [*overrides, f"rollout.server.routing_replay={on}"])) for on in ("false", "true")
    )
    record = 32 * 8 * found.lengths.mean * 64
    assert [host.routes for host in without.hosts] == [0]
    assert [host.total - other.total for host, other in zip(found.hosts, without.hosts, strict=True)] == [2 * record]
    assert [TrainingRanks(found.spec, each.config).root_routes(100) for each in (found, without)] == [6400, 0]
    ahead = load_run(
        RECIPE,
        [
            *overrides,
            "rollout.server.routing_replay=true",
            "train.schedule=overlap",
            "train.max_staleness=2",
            "rollout.uncorrected=true",
        ],
    )
    assert TrainingRanks(found.spec, ahead).root_routes(100) == 4 * 6400
    tight = [*overrides, "rollout.server.routing_replay=true", f"cluster.host_memory_gib={8 * found.hosts[0].total / GIB}"]
    assert any(
        "set rollout.server.routing_replay = false" in problem for problem in make_plan(load_run(RECIPE, tight)).problems
    )
