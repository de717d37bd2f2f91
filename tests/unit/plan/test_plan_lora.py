"""What a plan knows of LoRA: neither gradients nor optimizer states of frozen weights, and a 70B model on one node."""

from __future__ import annotations

from pathlib import Path

import pytest

from tepo_megatron.config import LoraConfig, ParallelConfig
from tepo_megatron.config.load import load_run
from tepo_megatron.launch.job import mounts, on_nodes, roles
from tepo_megatron.plan import make_plan
from tepo_megatron.plan.shapes import ModelSplit, model_parameters, resolve_spec
from tepo_megatron.weights.adapters import adapted_tensors, adapter_shapes
from tepo_megatron.weights.table import tensor_shapes
from tests.support.reshard_models import MOE, small_spec

RECIPE = str(Path(__file__).parents[3] / "examples/llama3.3-70b-lora/run.yaml")
GIB = 2**30


def plan(*overrides: str):
    return make_plan(load_run(RECIPE, list(overrides)))


def test_70b_fits_one_node_of_eight_gpus_with_lora_alone() -> None:
    found = plan()
    assert found.problems == ()
    assert found.config.cluster.train_nodes == 1
    assert found.config.cluster.rollout_nodes == 0
    assert found.config.engine.parallel.world_size == 8
    assert found.worst.total < 50 * GIB
    everything = plan("model.lora=null")
    assert "the largest term is optimizer with 98.6 GiB" in everything.problems[0]
    assert found.worst.activations == everything.worst.activations
    assert found.worst.gradients < everything.worst.gradients / 90


def test_the_reference_of_a_kl_term_costs_no_copy() -> None:
    kl = ("objective.kl.coefficient=0.1", "objective.kl.against=reference")
    assert plan(*kl).worst == plan().worst
    assert plan(*kl, "model.lora=null").worst.reference > 16 * GIB


def test_adapters_are_counted_as_they_are_made() -> None:
    spec, lora = resolve_spec("Llama-3.3-70B-Instruct")[0], LoraConfig(rank=16)
    by_hand = {"q": 2 * 8192, "k": 8192 + 1024, "v": 8192 + 1024, "o": 2 * 8192, "gate": 8192 + 28672, "up": 8192 + 28672}
    by_hand["down"] = 28672 + 8192
    assert model_parameters(spec, lora) == 80 * 16 * sum(by_hand.values())
    # A of what is split by rows, and B of what is split by columns, are whole on each rank
    split = 16 * (5 * 8192 + (8192 + 2 * 1024 + 2 * 28672) // 8 + 2 * 8192 + (8192 + 28672) // 8)
    assert ModelSplit(spec, ParallelConfig(tp=8, pp=4)).stages(lora) == [(20 * split, 0)] * 4


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_experts_are_counted_apart(ep: int) -> None:
    spec, lora = small_spec(architecture="MixtralForCausalLM", experts=MOE["MixtralForCausalLM"]), LoraConfig(rank=2)
    shapes = tensor_shapes(spec)
    wanted = adapter_shapes(shapes, adapted_tensors(shapes, ["all-linear"]), 2)
    experts = sum(a * b for name, (a, b) in wanted.items() if ".experts." in name)
    (found,) = ModelSplit(spec, ParallelConfig(ep=ep, dp=ep)).stages(lora)
    assert found.experts * ep == experts
    assert found.dense + experts == model_parameters(spec, lora)


def test_the_job_of_the_recipe_is_one_node_that_trains_and_samples() -> None:
    config = on_nodes(load_run(RECIPE, ["model.lora.path=adapters"]))
    (role,) = roles(config)
    assert role.nodes == 1
    assert "--nproc" in role.script
    assert config.model.lora is not None
    assert config.model.lora.path == Path.cwd() / "adapters"
    assert f"{Path.cwd()}/adapters:{Path.cwd()}/adapters" in mounts(config)
