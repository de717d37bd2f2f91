"""Settings that could not act are refused with what to change."""

from __future__ import annotations

import pytest

from tepo_megatron.config import RunConfig
from tepo_megatron.config.load import load_run
from tepo_megatron.weights.architecture import Experts, ModelSpec
from tests.support.reshard_models import MOE, small_spec

BIAS = "engine.moe_balance.kind=expert_bias"
DP2 = ["engine.parallel.dp=2", "rollout.prompts_per_step=8", "rollout.samples_per_prompt=8"]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["rollout.sampling.top_p=0.9"], r"sampling\.top_p = 0\.9 without sampling\.top_k: .* set sampling\.top_k = 100"),
        (["rollout.sampling.min_p=0.1"], r"sampling\.min_p = 0\.1 without sampling\.top_k"),
        (["rollout.sampling.bad_words=[idiot]"], r"sampling\.bad_words without sampling\.top_k"),
        (["rollout.sampling.top_k=1025"], r"sampling\.top_k = 1025: .* at most 1024 of them"),
        (["rollout.sampling.top_k=8", "rollout.server.speculative={}"], r"sampling\.top_k = 8 with server\.speculative"),
        (
            ["rollout.partial=true", "rollout.oversample=1.5", "rollout.sampling.stop=[x]"],
            r"partial = true with sampling\.stop",
        ),
        (["rollout.sampling.stop=['']"], r"one of the strings is empty"),
        (["rollout.sampling.top_p=0"], r"rollout\.sampling\.top_p"),
        (["rollout.sampling.min_p=1"], r"rollout\.sampling\.min_p"),
        (["engine.moe_balance.coefficient=0.01"], r"coefficient = 0.01 does nothing with kind = none; set kind = aux_loss"),
        ([BIAS, "engine.moe_balance.coefficient=0.01"], r"coefficient = 0.01 does nothing with kind = expert_bias"),
        (
            ["engine.moe_balance.kind=aux_loss", "engine.moe_balance.update_rate=0.01"],
            r"update_rate = 0.01 does nothing with kind = aux_loss; set kind = expert_bias",
        ),
        ([BIAS, "model.lora.rank=8"], r"expert_bias moves biases of the model, which model.lora leaves as it is"),
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
def test_what_cannot_act_is_refused(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        load_run(None, overrides)


def test_sampling_that_can_be_scored_is_accepted() -> None:
    given = ["rollout.sampling.top_p=0.9", "rollout.sampling.top_k=20", "rollout.sampling.min_p=0.01"]
    assert load_run(None, given).rollout.sampling.truncates
    stops = load_run(None, ["rollout.sampling.stop=['Question:']"])
    assert stops.rollout.sampling.needs_tokenizer
    assert not stops.rollout.sampling.truncates
    plain = load_run(None, [])
    assert not plain.rollout.sampling.needs_tokenizer
    assert not plain.rollout.sampling.truncates


def with_experts(architecture: str) -> ModelSpec:
    return small_spec(architecture=architecture, experts=MOE[architecture])


def test_a_model_must_have_what_is_balanced() -> None:
    small_spec().check_balance("none")
    with_experts("MixtralForCausalLM").check_balance("aux_loss")
    with_experts("Glm4MoeForCausalLM").check_balance("expert_bias")
    for kind in ("aux_loss", "expert_bias"):
        with pytest.raises(ValueError, match=f"kind = {kind} balances experts, and LlamaForCausalLM has none"):
            small_spec().check_balance(kind)
    with pytest.raises(ValueError, match=r"bias on each expert's score, and MixtralForCausalLM has none, in"):
        with_experts("MixtralForCausalLM").check_balance("expert_bias")


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
        spec.check_recompute(["core_attn", module], transformer_engine=layers == "te")
    else:
        with pytest.raises(ValueError, match=rf"engine\.recompute_modules has {module}, "):
            spec.check_recompute(["core_attn", module], transformer_engine=layers == "te")
