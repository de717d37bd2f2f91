"""Parameters of models against published counts, and of a rank against the layouts of all ranks."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings

from tepo_megatron.config import ParallelConfig
from tepo_megatron.plan.shapes import ModelSplit, active_parameters, model_parameters, resolve_spec
from tepo_megatron.weights.layouts import megatron_ranks
from tests.support.reshard_models import Case, cases

PUBLISHED = {
    "Llama-3.3-70B-Instruct": 70_553_706_496,
    "Qwen2.5-72B": 72_706_203_648,
    "Qwen2.5-7B": 7_615_616_512,
    "Mixtral-8x7B-v0.1": 46_702_792_704,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-30B-A3B": 30_532_122_624,
}
"""Elements of all tensors of the published safetensors."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_known_models_have_as_many_parameters_as_published(name: str) -> None:
    spec, assumption = resolve_spec(f"/nowhere/{name}")
    assert model_parameters(spec) == PUBLISHED[name]
    assert assumption is not None
    assert name in assumption


def test_a_folder_on_this_machine_is_read_and_an_unknown_one_refused(tmp_path: Path) -> None:
    spec, assumption = resolve_spec("builtin:tiny")
    assert (model_parameters(spec), assumption) == (607_360, None)
    with pytest.raises(ValueError, match=r"'Llama-9' is not known here.*config.json is enough"):
        resolve_spec(str(tmp_path / "Llama-9"))


def test_of_the_experts_a_token_meets_the_chosen_ones() -> None:
    """Published, rounded: 12.9 and 3.3 billion."""
    for name, billions in (("Mixtral-8x7B-v0.1", 12.9), ("Qwen3-30B-A3B", 3.3)):
        assert active_parameters(resolve_spec(name)[0]) / 1e9 == pytest.approx(billions, abs=0.06)


@given(cases())
@settings(max_examples=40, deadline=None)
def test_every_rank_holds_what_the_layouts_say_with_the_padding_of_its_vocabulary(case: Case) -> None:
    source, stages = case.source, case.source.pp
    layers = 2 * stages
    spec = replace(case.spec, num_layers=layers, dense_layers=min(case.spec.dense_layers, layers - 1))
    counts = ModelSplit(spec, ParallelConfig(tp=source.tp, pp=stages, dp=source.dp, ep=source.ep, etp=source.etp)).stages()
    for rank, layout in enumerate(megatron_ranks(spec, replace(source, stages=None))):
        trained = [math.prod(shape) for name, shape in layout.params.items() if not name.endswith("expert_bias")]
        assert counts[rank * stages // source.world_size].total == sum(trained)
