"""What cannot be computed is refused with a sentence that names it."""

from dataclasses import replace

import pytest
import torch

from tepo_megatron.config.objective.presets import PRESETS
from tepo_megatron.config.objective.section import ObjectiveConfig
from tepo_megatron.core.objective.compose import build_objective
from tests.support.objective_batches import make_batch


@pytest.fixture
def step():
    objective = build_objective(ObjectiveConfig(kl={"coefficient": 0.04}))
    batch, scores = make_batch([[False, True, True], [True, False]])
    return objective, batch.with_(advantages_S=objective.advantages(batch)), scores


@pytest.mark.parametrize("field", ["old_logprobs_T", "sampler_logprobs_T", "old_entropy_T", "reference_logprobs_T"])
@pytest.mark.parametrize("value", [-torch.inf, torch.nan])
def test_values_that_are_not_finite_at_a_response_token(step, field, value):
    objective, batch, scores = step
    broken = getattr(batch, field).clone()
    broken[4] = value  # outside the mask: not read
    objective.prepare(batch.with_(**{field: broken}))
    broken[3] = value
    with pytest.raises(
        ValueError, match=rf"{field} is {value} at token 3 \(sequence 1, label \d+\).*take the token out of loss_mask_T"
    ):
        objective.prepare(batch.with_(**{field: broken}))
    logprob = scores.logprob.detach().clone()
    logprob[1] = value
    with pytest.raises(ValueError, match=rf"scores.logprob is {value} at token 1"):
        objective(replace(scores, logprob=logprob), batch, objective.prepare(batch))


def test_shapes_that_differ(step):
    objective, batch, scores = step
    with pytest.raises(ValueError, match=r"loss_mask_T has shape \(4,\) but tokens_T \(5,\)"):
        objective.prepare(batch.with_(loss_mask_T=batch.loss_mask_T[:4]))
    with pytest.raises(ValueError, match=r"scores.entropy has shape \(3,\)"):
        objective(replace(scores, entropy=scores.entropy[:3]), batch, objective.prepare(batch))
    with pytest.raises(ValueError, match=r"advantages_S has shape \(1,\) for 2 sequences"):
        objective.prepare(batch.with_(advantages_S=torch.zeros(1)))


def test_fields_that_are_missing(step):
    objective, batch, scores = step
    for missing, message in (
        ("advantages_S", r"objective.advantages\(batch\)"),
        ("old_logprobs_T", "policy before the update"),
        ("reference_logprobs_T", "score it with that model"),
    ):
        with pytest.raises(ValueError, match=message):
            objective.prepare(batch.with_(**{missing: None}))
    without = batch.with_(old_entropy_T=None)
    with pytest.raises(ValueError, match="needs old_entropy_T"):
        objective(scores, without, objective.prepare(without))
    adaptive = build_objective(ObjectiveConfig(entropy={"kind": "adaptive", "coefficient": 1.0, "target": 1.0}))
    with pytest.raises(ValueError, match="needs old_entropy_T"):
        adaptive.prepare(without)


def test_a_first_order_mask_needs_the_slope(step):
    _, batch, scores = step
    objective = build_objective(ObjectiveConfig(kl_mask={"falling": "first_order"}))
    context = objective.prepare(batch)
    with pytest.raises(ValueError, match=r"needs scores\.entropy_slope; score with logprob_and_entropy"):
        objective(replace(scores, entropy_slope=None), batch, context)
    broken = scores.entropy_slope.clone()
    broken[1] = torch.nan
    with pytest.raises(ValueError, match=r"scores\.entropy_slope is nan at token 1"):
        objective(replace(scores, entropy_slope=broken), batch, context)


def test_a_step_without_response_tokens(step):
    objective, batch, _ = step
    with pytest.raises(ValueError, match="no sequence of this optimizer step has a response token"):
        objective.prepare(batch.with_(loss_mask_T=torch.zeros(5, dtype=torch.bool)))


def test_an_unknown_preset_names_the_known_and_the_nearest():
    with pytest.raises(ValueError, match="nearest is 'grpo'") as caught:
        ObjectiveConfig(preset="gpro")
    assert all(name in str(caught.value) for name in PRESETS)
