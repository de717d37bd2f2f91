"""What would hide nothing, or compute nothing again, is refused with what to change."""

from __future__ import annotations

from pathlib import Path

import pytest

from tepo_megatron.config import RunConfig
from tepo_megatron.config.loading.load import load_run
from tepo_megatron.weights.architecture import Experts, ModelSpec
from tepo_megatron.weights.layouts import check_recompute

DP2 = ["engine.parallel.dp=2", "rollout.prompts_per_step=8", "rollout.samples_per_prompt=8"]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["engine.overlap_grad_reduce=true"], r"overlap_grad_reduce = true hides .* dp × cp = 1 there is none"),
        ([*DP2, "engine.bucket_size=1000"], r"bucket_size acts with overlap_grad_reduce = true alone"),
        ([*DP2, "engine.overlap_param_gather=true"], r"overlap_param_gather acts with overlap_grad_reduce = true alone"),
        (
            [*DP2, "engine.overlap_grad_reduce=true", "engine.overlap_param_gather=true"],
            r"only optimizer.distributed = true shares them",
        ),
        (["engine.recompute_modules=[mlp]"], r"recompute_modules = \['mlp'\] acts with recompute = selective alone"),
        (["engine.recompute=full", "engine.recompute_modules=[mlp]"], r"alone, and recompute = full"),
        (["engine.recompute=selective", "engine.recompute_modules=[]"], r"computes nothing again; set recompute = none"),
        (["engine.recompute=selective", "engine.recompute_modules=[norms]"], r'got "norms"; allowed: "core_attn", "mlp"'),
    ],
)
def test_what_cannot_act_is_refused(overrides: list[str], sentence: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("name: x\n")
    with pytest.raises(ValueError, match=sentence):
        load_run(tmp_path / "run.yaml", overrides)


def test_what_is_written_out_in_full_can_be_read_again() -> None:
    config = RunConfig.model_validate({"engine": {"recompute": "selective", "recompute_modules": ["mlp"]}})
    assert RunConfig.model_validate(config.model_dump()) == config
    assert config.engine.recomputed == ("mlp",)
    assert RunConfig.model_validate(RunConfig().model_dump()).engine.recomputed == ()


DENSE = ModelSpec("LlamaForCausalLM", 8, 256, 8, 4, 32, 512, 61, False, 1e-5, 1e4, None, 512)
MIXTURE = ModelSpec("MixtralForCausalLM", 8, 256, 8, 4, 32, 512, 61, False, 1e-5, 1e4, None, 512, experts=Experts(8, 2, True))
ACTS = {
    ("core_attn", "dense", "local"),
    ("core_attn", "dense", "te"),
    ("core_attn", "experts", "local"),
    ("core_attn", "experts", "te"),
    ("mlp", "dense", "local"),
    ("mlp", "dense", "te"),
    ("moe", "experts", "local"),
    ("moe", "experts", "te"),
    ("moe_act", "experts", "te"),
    ("layernorm", "experts", "te"),
}


@pytest.mark.parametrize("layers", ["local", "te"])
@pytest.mark.parametrize("model", ["dense", "experts"])
@pytest.mark.parametrize("module", ["core_attn", "mlp", "moe", "moe_act", "layernorm"])
def test_a_module_that_the_model_does_not_have_is_refused(module: str, model: str, layers: str) -> None:
    spec = DENSE if model == "dense" else MIXTURE
    if (module, model, layers) in ACTS:
        check_recompute(spec, ["core_attn", module], transformer_engine=layers == "te")
    else:
        with pytest.raises(ValueError, match=rf"engine\.recompute_modules has {module}, "):
            check_recompute(spec, ["core_attn", module], transformer_engine=layers == "te")
