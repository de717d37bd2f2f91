"""``engine.fp8``: what Megatron-Core is told."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.enums import Fp8Recipe
from megatron.core.fp8_utils import get_fp8_align_size, is_first_last_bf16_layer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from tepo_megatron.config import EngineConfig, Fp8Config
from tepo_megatron.trainer.megatron.model import fp8

RECIPES = ["delayed", "tensorwise", "blockwise", "mxfp8"]
recipes = st.sampled_from(RECIPES)


def megatron(config: Fp8Config, layers: int = 8) -> TransformerConfig:
    """Upstream's own class, with its checks; none of them needs Transformer Engine for these fields."""
    sizes = {"num_layers": layers, "hidden_size": 64, "num_attention_heads": 4}
    return TransformerConfig(**sizes, bf16=True, params_dtype=torch.bfloat16, **fp8.layer_options(config))


@pytest.mark.parametrize(("recipe", "params"), [("delayed", False), *product(RECIPES[1:], [False, True])])
@pytest.mark.parametrize("form", ["e4m3", "hybrid"])
def test_every_recipe_reaches_megatron(recipe: str, form: str, params: bool) -> None:
    config = Fp8Config(recipe=recipe, format=form, params=params)
    layers = megatron(config)
    assert (layers.fp8, layers.fp8_recipe, layers.fp8_param) == (form, Fp8Recipe(recipe), params)
    gather = DistributedDataParallelConfig(use_distributed_optimizer=True, **fp8.gather_options(config))
    optimizer = MegatronOptimizerConfig(bf16=True, use_distributed_optimizer=True, **fp8.optimizer_options(config))
    assert gather.fp8_param_gather is params
    assert optimizer.fp8_recipe == (recipe if params else None)
    # MXFP8 weights are gathered as bfloat16, in the gradients' buffer: both sides must know
    assert gather.reuse_grad_buf_for_mxfp8_param_ag is optimizer.reuse_grad_buf_for_mxfp8_param_ag
    assert gather.reuse_grad_buf_for_mxfp8_param_ag is (params and recipe == "mxfp8")


def test_without_a_recipe_megatron_has_no_fp8() -> None:
    layers = megatron(Fp8Config())
    assert layers.fp8 is None
    assert not layers.fp8_param
    assert fp8.gather_options(Fp8Config()) == {"fp8_param_gather": False, "reuse_grad_buf_for_mxfp8_param_ag": False}


def test_the_knobs_of_delayed_scaling() -> None:
    default = megatron(Fp8Config(recipe="delayed"))
    assert (default.fp8_amax_history_len, default.fp8_amax_compute_algo, default.fp8_margin) == (1024, "max", 0)
    chosen = Fp8Config(recipe="delayed", amax_history_len=16, amax_compute_algo="most_recent", margin=2)
    layers = megatron(chosen)
    assert (layers.fp8_amax_history_len, layers.fp8_amax_compute_algo, layers.fp8_margin) == (16, "most_recent", 2)


@given(st.sampled_from(RECIPES[1:]), st.integers(0, 4), st.integers(0, 3))
def test_layers_in_bfloat16_are_the_first_and_the_last(recipe: str, first: int, last: int) -> None:
    layers = megatron(Fp8Config(recipe=recipe, first_layers_bf16=first, last_layers_bf16=last))
    kept = [layer for layer in range(8) if is_first_last_bf16_layer(layers, layer)]
    assert kept == [*range(first), *range(8 - last, 8)]


@given(recipes, st.sampled_from([1, 2, 4, 8]), st.booleans())
def test_every_rank_gets_tokens_that_suit_fp8(recipe: str, tp: int, split: bool) -> None:
    parallel = {"tp": tp, "sequence_parallel": split and tp > 1}
    multiple = fp8.token_multiple(EngineConfig.model_validate({"parallel": parallel, "fp8": {"recipe": recipe}}))
    on_a_rank = multiple // (tp if parallel["sequence_parallel"] else 1)
    assert on_a_rank % get_fp8_align_size(Fp8Recipe(recipe)) == 0
    assert on_a_rank % {"blockwise": 128, "mxfp8": 32}.get(recipe, 16) == 0
    without = fp8.token_multiple(EngineConfig.model_validate({"parallel": parallel}))
    assert without == (tp if parallel["sequence_parallel"] else 1)
