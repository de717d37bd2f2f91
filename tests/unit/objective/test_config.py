"""Presets are data, overrides are partial, ranges belong to ratios; what cannot be computed is refused with a sentence."""

import warnings
from dataclasses import replace

import pytest
import torch

from tepo_megatron.config import RunConfig
from tepo_megatron.config.load import load_run
from tepo_megatron.config.objective.choices import Clip
from tepo_megatron.config.objective.presets import CORRECTIONS, PRESETS
from tepo_megatron.config.objective.section import ObjectiveConfig
from tepo_megatron.core.objective.compose import build_objective
from tests.support.objective_batches import make_batch
from tests.support.programs import run_python


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_build_without_a_warning_and_survive_a_round_trip(preset):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = ObjectiveConfig(preset=preset)
        assert ObjectiveConfig.model_validate(config.model_dump()) == config
        assert ObjectiveConfig.model_validate(config) is config
    assert not config.needs_reference


def test_overrides_are_partial():
    config = ObjectiveConfig.model_validate({"trust_region": {"high": 0.05}, "kl_mask": {"falling": "covariance"}})
    assert config.trust_region == Clip(scale="length", low=0.026, high=0.05)
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


@pytest.mark.parametrize("term", ["kl_mask", "kl", "kl_cov"])
def test_a_reference_model_is_needed_where_a_kl_term_is_against_it(term):
    for against in ("old", "reference"):
        assert ObjectiveConfig(**{term: {"against": against}}).needs_reference == (against == "reference")


AUTO = {"scale": "length", "low": "auto"}
MEANS = ({"kind": "token"}, {"kind": "sequence"}, {"kind": "power_mean", "p": 1.0})
FOR_SUMS = r"objective\.trust_region\.kind = 'length_clip' with objective\.ratio\.kind.*length_normalized = false"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"trust_region": {"scale": "fixed", "low": 1.0}}, "at or below 0"),
        ({"preset": "clip_cov", "trust_region": {"cov_low": 9.0}}, "above cov_high"),
        ({"mismatch": {"kind": "mask", "low": 6.0}}, "must be below mismatch.high"),
        ({"rejection": {"low": 2, "high": 1}}, "rejection.low = 2 must be below rejection.high = 1"),
        ({"preset": "grpo", "trust_region": {"scale": "length", "low": 0.03}}, r"objective\.ratio\.kind = 'token'"),
        ({"trust_region": {"scale": "fixed", "low": "auto"}}, r"set trust_region\.scale = length"),
        ({"trust_region": {"scale": "length", "share": 0.1}}, "set low or high = auto, or leave share out"),
        ({"trust_region": {**AUTO, "share": 0.5}}, r"less than 0\.5"),
        ({"trust_region": {**AUTO, "share": 0}}, "greater than 0"),
        *(({"trust_region": {"kind": "length_clip"}, "ratio": ratio}, FOR_SUMS) for ratio in MEANS),
        ({"preset": "fspo", "ratio": {"kind": "prefix"}}, FOR_SUMS),
        ({"preset": "on_policy_distill", "ratio": {"kind": "sequence"}}, "each token has an advantage of its own"),
        ({"preset": "holder_po", "advantage": {"kind": "teacher"}}, "set objective.ratio.kind = 'token' or 'sequence_token'"),
        ({"advantage": {"overlong": {"max_tokens": 8, "buffer_tokens": 8}}}, "must be below max_tokens"),
        ({"kl_mask": {"falling": "first_order", "tolerance": 0.0}}, r"tolerance = 0\.0 does nothing .*set falling = measured"),
        ({"kl_mask": {"coefficient": 0}}, "a coefficient of 0 adds nothing; give a positive one, or null for the whole"),
    ],
)
def test_impossible_values(given, message):
    with pytest.raises(ValueError, match=message):
        ObjectiveConfig.model_validate(given)


FAR = r"trust_region\.low = {:g} with scale = length .*{}; .*give scale = fixed"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"trust_region": {"scale": "fixed", "low": 0.2}}, r"'sequence_token' with a trust region of 0\.2.*3e-4 is usual"),
        ({"preset": "gspo", "trust_region": {"high": 0.06}}, "'sequence' with a trust region"),
        ({"ratio": {"kind": "token"}, "trust_region": {"scale": "fixed"}}, "token ratios leave that range"),
        ({"trust_region": {"low": 3e-4}}, FAR.format(3e-4, "hardly anything lies within")),
        ({"trust_region": {"low": 0.2}}, FAR.format(0.2, "hardly a response reaches it")),
    ],
)
def test_a_range_that_does_not_belong_to_its_ratio_is_warned_of(given, message):
    with pytest.warns(UserWarning, match=message):
        ObjectiveConfig(**given)


def test_the_table_of_presets_needs_no_torch():
    code = (
        "import sys; from tepo_megatron.cli.objective import app; app(['list'], standalone_mode=False);"
        "assert not {'torch', 'megatron'} & set(sys.modules)"
    )
    printed = run_python("-c", code).stdout
    assert all(name in printed for name in PRESETS)
    assert all(name in printed for name in CORRECTIONS)
    assert all(preset.source.split(";")[0] in printed for preset in PRESETS.values())
    assert "sg[min(r, 5)] A log π; ÷ Σ T" in printed
    assert "sequence_token" in printed
    assert "kl_mask" in printed


def test_a_mask_that_has_no_second_update_is_warned_of():
    with pytest.warns(UserWarning, match=r"kl_mask adds nothing with train\.minibatches = 1"):
        RunConfig(train={"minibatches": 1})
    with pytest.warns(UserWarning, match="at a step's only update no entropy has fallen yet"):
        RunConfig(train={"minibatches": 1}, objective={"kl_mask": {"against": "reference"}})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RunConfig(train={"minibatches": 2})
        RunConfig(train={"minibatches": 1}, objective={"kl_mask": {"against": "reference", "falling": "covariance"}})
        RunConfig(train={"minibatches": 1}, objective={"kl_mask": None})


@pytest.mark.parametrize(
    ("objective", "idle", "acts"),
    [
        ("{preset: grpo, kl: {against: old}}", "kl adds nothing.*: at a step's only update the KL from", "kl.estimator=k1"),
        ("{preset: kl_cov}", "kl_cov adds nothing", "kl_cov.against=reference"),
        ("{preset: opsm}", "opsm adds nothing.*: at a step's only update no response is less likely yet", "opsm=null"),
        ("{kl_mask: {falling: covariance}}", "kl_mask adds nothing", "kl_mask.estimator=k1"),
    ],
)
def test_a_term_that_has_no_second_update_is_warned_of(objective, idle, acts):
    settings = [f"objective={objective}", "train.minibatches=1"]
    with pytest.warns(UserWarning, match=rf"objective\.{idle}"):
        load_run(None, settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_run(None, [*settings, f"objective.{acts}"])
        load_run(None, [*settings, "train.epochs_per_batch=2"])


ADAPTIVE = {"kind": "adaptive", "coefficient": 1.0, "target": 1.0}


@pytest.fixture
def step():
    objective = build_objective(ObjectiveConfig(kl={"coefficient": 0.04}))
    batch, scores = make_batch([[False, True, True], [True, False]])
    return objective, batch.with_(advantages_S=objective.advantages(batch)), scores


@pytest.mark.parametrize("field", ["old_logprobs_T", "sampler_logprobs_T", "old_entropy_T", "reference_logprobs_T"])
@pytest.mark.parametrize("value", [-torch.inf, torch.nan])
def test_values_that_are_not_finite_at_a_response_token(step, field, value):
    objective, batch, _ = step
    broken = getattr(batch, field).clone()
    broken[4] = value  # outside the mask: not read
    objective.prepare(batch.with_(**{field: broken}))
    broken[3] = value
    message = rf"{field} is {value} at token 3 \(sequence 1, label \d+\).*take the token out of loss_mask_T"
    with pytest.raises(ValueError, match=message):
        objective.prepare(batch.with_(**{field: broken}))


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        ({}, {"loss_mask_T": torch.ones(4, dtype=torch.bool)}, r"loss_mask_T has shape \(4,\) but tokens_T \(5,\)"),
        ({}, {"old_logprobs_T": torch.zeros(3)}, r"old_logprobs_T has shape \(3,\)"),
        ({}, {"advantages_S": torch.zeros(1)}, r"advantages_S has shape \(1,\) for 2 sequences"),
        ({}, {"advantages_S": torch.tensor([0.0, torch.nan])}, "advantages_S holds values that are not finite"),
        ({}, {"advantages_S": None}, r"objective.advantages\(batch\)"),
        ({}, {"old_logprobs_T": None}, "policy before the update"),
        ({"kl": {"coefficient": 0.04}}, {"reference_logprobs_T": None}, "score it with that model"),
        ({}, {"old_entropy_T": None}, "needs old_entropy_T"),
        ({"kl_mask": None, "entropy": ADAPTIVE}, {"old_entropy_T": None}, "needs old_entropy_T"),
        ({}, {"loss_mask_T": torch.zeros(5, dtype=torch.bool)}, "no sequence of this optimizer step has a response token"),
    ],
)
def test_a_step_that_is_not_whole_is_refused(step, config, changes, message):
    _, batch, scores = step
    objective, broken = build_objective(ObjectiveConfig(**config)), batch.with_(**changes)
    with pytest.raises(ValueError, match=message):
        objective(scores, broken, objective.prepare(broken))


NAN_AT_1 = torch.where(torch.arange(5) == 1, torch.nan, 0.0).double()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"entropy": torch.ones(3)}, r"scores\.entropy has shape \(3,\)"),
        ({"logprob": NAN_AT_1}, r"scores\.logprob is nan at token 1"),
        ({"logprob": NAN_AT_1.nan_to_num(-torch.inf)}, r"scores\.logprob is -inf at token 1"),
        ({"entropy_slope": NAN_AT_1}, r"scores\.entropy_slope is nan at token 1"),
        ({"entropy_slope": None}, r"needs scores\.entropy_slope; score with logprob_and_entropy"),
    ],
)
def test_scores_that_a_first_order_mask_cannot_use_are_refused(step, changes, message):
    _, batch, scores = step
    objective = build_objective(ObjectiveConfig(kl_mask={"falling": "first_order"}))
    with pytest.raises(ValueError, match=message):
        objective(replace(scores, **changes), batch, objective.prepare(batch))


def test_an_unknown_preset_names_the_known_and_the_nearest():
    with pytest.raises(ValueError, match="nearest is 'grpo'") as caught:
        ObjectiveConfig(preset="gpro")
    assert all(name in str(caught.value) for name in PRESETS)
