"""Balance of experts: what cannot act is refused with what to change."""

from __future__ import annotations

from pathlib import Path

import pytest

from tepo_megatron.config.loading.load import load_run
from tepo_megatron.weights.architecture import ModelSpec
from tepo_megatron.weights.layouts import check_balance
from tests.support.reshard_models import MOE, small_spec

BIAS = "engine.moe_balance.kind=expert_bias"


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["engine.moe_balance.coefficient=0.01"], r"coefficient = 0.01 does nothing with kind = none; set kind = aux_loss"),
        ([BIAS, "engine.moe_balance.coefficient=0.01"], r"coefficient = 0.01 does nothing with kind = expert_bias"),
        (
            ["engine.moe_balance.kind=aux_loss", "engine.moe_balance.update_rate=0.01"],
            r"update_rate = 0.01 does nothing with kind = aux_loss; set kind = expert_bias",
        ),
        ([BIAS, "model.lora.rank=8"], r"expert_bias moves biases of the model, which model.lora leaves as it is"),
    ],
)
def test_what_cannot_act_is_refused(overrides: list[str], sentence: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("name: x\n")
    with pytest.raises(ValueError, match=sentence):
        load_run(tmp_path / "run.yaml", overrides)


def with_experts(architecture: str) -> ModelSpec:
    return small_spec(architecture=architecture, experts=MOE[architecture])


def test_a_model_must_have_what_is_balanced() -> None:
    check_balance(small_spec(), "none")
    check_balance(with_experts("MixtralForCausalLM"), "aux_loss")
    check_balance(with_experts("Glm4MoeForCausalLM"), "expert_bias")
    for kind in ("aux_loss", "expert_bias"):
        with pytest.raises(ValueError, match=f"kind = {kind} balances experts, and LlamaForCausalLM has none"):
            check_balance(small_spec(), kind)
    with pytest.raises(ValueError, match=r"bias on each expert's score, and MixtralForCausalLM has none, in"):
        check_balance(with_experts("MixtralForCausalLM"), "expert_bias")
