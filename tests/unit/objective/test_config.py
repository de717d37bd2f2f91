"""Presets are data, overrides are partial, ranges belong to ratios."""

import subprocess
import sys
import warnings

import pytest

from tepo_megatron.config import RunConfig
from tepo_megatron.config.objective.choices import Clip
from tepo_megatron.config.objective.presets import CORRECTIONS, PRESETS
from tepo_megatron.config.objective.section import ObjectiveConfig


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_build_without_a_warning_and_survive_a_round_trip(preset):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = ObjectiveConfig(preset=preset)
        assert ObjectiveConfig.model_validate(config.model_dump()) == config
        assert ObjectiveConfig.model_validate(config) is config


def test_overrides_are_partial():
    config = ObjectiveConfig.model_validate({"trust_region": {"high": 5e-4}, "kl_mask": {"falling": "covariance"}})
    assert config.trust_region == Clip(low=3e-4, high=5e-4)
    assert config.kl_mask.model_dump() == {**ObjectiveConfig().kl_mask.model_dump(), "falling": "covariance"}
    assert config.ratio == ObjectiveConfig().ratio
    assert ObjectiveConfig(preset="kl_cov", kl_cov={"fraction": 0.1}).kl_cov.estimator == "abs"


def test_another_kind_brings_its_own_fields():
    config = ObjectiveConfig(trust_region={"kind": "clip_weight", "high": 1.0}, advantage={"kind": "leave_one_out"})
    assert config.trust_region.model_dump() == {"kind": "clip_weight", "low": None, "high": 1.0}
    with pytest.raises(ValueError, match=r"trust_region\.clip\.low\s+Field required"):
        ObjectiveConfig(preset="kl_cov", trust_region={"kind": "clip"})
    with pytest.raises(ValueError, match=r"no_std\.eps\s+Extra inputs"):
        ObjectiveConfig(preset="dr_grpo", advantage={"eps": 1e-3})


def test_null_switches_off_and_a_regulariser_can_be_switched_on():
    assert ObjectiveConfig(kl_mask=None) == ObjectiveConfig(preset="tepo_markov").model_copy(update={"preset": "tepo"})
    config = ObjectiveConfig(preset="grpo", kl={"coefficient": 0.04}, entropy={"coefficient": 0.01}, mismatch={"cap": 3.0})
    assert config.kl.against == "reference"
    assert (config.entropy.kind, config.mismatch.kind) == ("fixed", "truncate")


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("term", ["kl_mask", "kl", "kl_cov"])
def test_a_reference_model_is_needed_where_a_kl_term_is_against_it(preset, term):
    assert not ObjectiveConfig(preset=preset).needs_reference
    assert not ObjectiveConfig(preset=preset, **{term: {"against": "old"}}).needs_reference
    assert ObjectiveConfig(preset=preset, **{term: {"against": "reference"}}).needs_reference


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"trust_region": {"low": 1.0}}, "at or below 0"),
        ({"trust_region": {"low": -0.1}}, "greater than or equal to 0"),
        ({"trust_region": {"dual": 1.0}}, "greater than 1"),
        ({"preset": "clip_cov", "trust_region": {"cov_low": 9.0}}, "above cov_high"),
        ({"mismatch": {"kind": "mask", "low": 6.0}}, "must be below mismatch.high"),
        ({"rejection": {"low": 2, "high": 1}}, "rejection.low = 2 must be below rejection.high = 1"),
        ({"advantage": {"overlong": {"max_tokens": 8, "buffer_tokens": 8}}}, "must be below max_tokens"),
        ({"kl_mask": {"falling": "first_order", "tolerance": 0.0}}, r"tolerance = 0\.0 does nothing .*set falling = measured"),
        ({"trust_regoin": {}}, "Extra inputs"),
        (
            {"kl_mask": {"coefficient": 0}},
            "a coefficient of 0 adds nothing; give a positive one, or null for the whole section",
        ),
        ({"entropy": {"coefficient": 0}}, "a coefficient of 0 adds nothing"),
        ({"kl_mask": {"falling": "covariance", "tolerance": 0.1}}, r"tolerance = 0\.1 does nothing .*set falling = measured"),
        ({"trust_region": {"high": float("inf")}}, "finite"),
        ({"mismatch": {"cap": float("inf")}}, "finite"),
        ({"ratio": {"kind": "tokens"}}, "'token', 'sequence', 'sequence_token'"),
    ],
)
def test_impossible_values(given, message):
    with pytest.raises(ValueError, match=message):
        ObjectiveConfig.model_validate(given)


def test_a_range_that_does_not_belong_to_its_ratio_is_warned_of():
    with pytest.warns(UserWarning, match=r"'sequence_token' with a trust region of 0\.2.*3e-4 is usual"):
        ObjectiveConfig(trust_region={"low": 0.2})
    with pytest.warns(UserWarning, match="'sequence' with a trust region"):
        ObjectiveConfig(preset="gspo", trust_region={"high": 0.06})
    with pytest.warns(UserWarning, match="token ratios leave that range"):
        ObjectiveConfig(ratio={"kind": "token"})


def test_the_table_of_presets_needs_no_torch():
    code = (
        "import sys; from tepo_megatron.cli.objective import app; app(['list'], standalone_mode=False);"
        "assert not {'torch', 'megatron'} & set(sys.modules)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert all(name in printed for name in PRESETS)
    assert all(name in printed for name in CORRECTIONS)
    assert all(preset.source.split(";")[0] in printed for preset in PRESETS.values())
    assert "sg[min(r, 5)] A log π; ÷ Σ T" in printed
    assert "sequence_token" in printed
    assert "kl_mask" in printed


def test_a_mask_that_has_no_second_update_is_warned_of():
    with pytest.warns(UserWarning, match=r"kl_mask adds nothing with train\.minibatches = 1"):
        RunConfig(train={"minibatches": 1})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RunConfig(train={"minibatches": 2})
        RunConfig(train={"minibatches": 1}, objective={"kl_mask": {"against": "reference"}})
        RunConfig(train={"minibatches": 1}, objective={"kl_mask": None})
