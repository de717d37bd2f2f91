"""A mechanism that the project does not have: its function and a place in the list are all that it takes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.config.objective.section import ObjectiveConfig
from tepo_megatron.core.objective import compose, mechanisms
from tepo_megatron.core.objective.checking import Step
from tepo_megatron.core.objective.compose import build_objective
from tepo_megatron.core.objective.values import StepValues
from tests.support.objective_batches import assert_same, make_batch, masks, whole


def hold_surprises(config: ObjectiveConfig, step: StepValues) -> mechanisms.Mechanism:
    """No surrogate for the tokens that were less likely than the step's median; instead, 3 · δ²."""
    median = step.old_logprob_R.median()
    return mechanisms.Mechanism(
        lambda values: values.old_logprob_T < median, lambda values: 3 * values.delta_T**2, detaches=True
    )


@pytest.fixture(autouse=True, scope="module")
def with_a_new_mechanism():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compose, "MECHANISMS", (*mechanisms.MECHANISMS, hold_surprises))
        yield


# the gradient of the surrogate flows through the ratio in the first two, through log π in the last
presets = pytest.mark.parametrize("preset", ["tepo_markov", "dapo", "cispo"])


@presets
@given(rows=masks(min_sequences=2), seed=st.integers(0, 99))
def test_its_tokens_have_its_penalty_and_no_other_gradient(preset, rows, seed):
    batch, scores = make_batch(rows, seed=seed)
    objective = build_objective(ObjectiveConfig(preset=preset))
    loss, (gradient, _), metrics, _ = whole(objective, batch, scores)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compose, "MECHANISMS", mechanisms.MECHANISMS[:-1])
        plain_loss, (plain_gradient, _), *_ = whole(objective, batch, scores)
    mask, tokens = batch.loss_mask_T, batch.loss_mask_T.sum()
    chosen = mask & (batch.old_logprobs_T < batch.old_logprobs_T[mask].median())
    delta = (scores.logprob - batch.old_logprobs_T).detach()
    torch.testing.assert_close(loss - plain_loss, (3 * delta**2)[chosen].sum() / tokens)
    torch.testing.assert_close(gradient, torch.where(chosen, 6 * delta / tokens, plain_gradient), rtol=1e-9, atol=1e-12)
    assert metrics["mask/fraction"].tolist() == [chosen.sum().item(), tokens.item()]


@presets
@given(rows=masks(min_sequences=2), seed=st.integers(0, 99))
def test_what_it_knows_of_the_step_reaches_every_micro_batch(preset, rows, seed):
    batch, scores = make_batch(rows, seed=seed)
    objective = build_objective(ObjectiveConfig(preset=preset))
    expected = whole(objective, batch, scores)
    batch = batch.with_(advantages_S=objective.advantages(batch))
    context = objective.prepare(batch)
    outputs = []
    for sequence in range(len(rows)):
        micro, micro_scores = Step(batch, scores).pick([sequence])
        outputs.append(objective(micro_scores, micro, context))
    assert_same(Step(batch, scores).summary(outputs), expected)
