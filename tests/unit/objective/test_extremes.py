"""Every preset stays finite where policies are far apart, a sequence has no response token, or all rewards are equal."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tepo_megatron.config.objective.presets import PRESETS
from tepo_megatron.config.objective.section import ObjectiveConfig
from tepo_megatron.core.objective import build_objective
from tepo_megatron.core.types import TokenScores
from tests.support.objective_batches import make_batch, summary

ROWS = [[True] * 6, [False, False], [True, False, True], [True], [True] * 3, [True]]


@pytest.mark.parametrize("preset", PRESETS)
@settings(max_examples=15)
@given(data=st.data())
def test_loss_and_gradient_are_finite(preset, data):
    batch, scores = make_batch(ROWS, seed=data.draw(st.integers(0, 9)))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    signs = torch.tensor(data.draw(st.lists(st.sampled_from([-20.0, 0.0, 20.0]), min_size=16, max_size=16)))
    old = (10 * batch.old_logprobs_T).to(dtype)
    batch = batch.with_(
        old_logprobs_T=old,
        old_entropy_T=batch.old_entropy_T.to(dtype),
        sampler_logprobs_T=torch.where(batch.loss_mask_T, old - signs.flip(0).to(dtype), 0.0),
        advantages_S=torch.tensor([1.0, 1.0, -2.0, 0.0, -1.0, 3.0]),
    )
    scores = TokenScores((old + signs.to(dtype)).requires_grad_(), scores.entropy.detach().to(dtype).requires_grad_())
    objective = build_objective(ObjectiveConfig(preset=preset))
    loss, gradients, metrics, extrema = summary([objective(scores, batch, objective.prepare(batch))], scores)
    assert loss.isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert all(value.isfinite().all() for value in (*metrics.values(), *extrema.values()))
    nothing = (~batch.loss_mask_T) | (batch.advantages_S[batch.sequence_index_T] == 0)
    if ObjectiveConfig(preset=preset).kl_cov is None:
        assert (gradients[0][nothing] == 0).all()


@pytest.mark.parametrize("preset", PRESETS)
def test_equal_rewards_teach_nothing(preset):
    """Advantages of exactly 0, and so no gradient, whatever the level of the rewards."""
    batch, scores = make_batch(ROWS, rewards=[0.1, 0.1, 0.1, 0.7, 0.7, 0.7], groups=[0, 0, 0, 1, 1, 1])
    objective = build_objective(ObjectiveConfig(preset=preset))
    batch = batch.with_(advantages_S=objective.advantages(batch))
    assert (batch.advantages_S == 0).all()
    _, gradients, *_ = summary([objective(scores, batch, objective.prepare(batch))], scores)
    assert (gradients[0] == 0).all()
