"""Distillation losses of TRL 1.16 (GKD), NeMo-RL and verl (both as of 2026), as formulas on log-probs [token, vocabulary]."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import kl_div

from tepo_megatron.config.objective.section import ObjectiveConfig
from tepo_megatron.core.objective.compose import build_objective
from tepo_megatron.core.scores import logprob_and_entropy
from tepo_megatron.core.types import Divergence, TeacherLogits
from tests.support.objective_batches import make_batch, masks

VOCABULARY = 11


def _trl(beta, student, teacher, mask):
    """`generalized_jsd_loss` with labels, `reduction="batchmean"`; β = 0 and 1 are NeMo-RL's `DistillationLossFn` too."""
    if beta in (0, 1):
        ends = (student, teacher) if beta == 0 else (teacher, student)
        value = kl_div(*ends, reduction="none", log_target=True)
    else:
        mixed = torch.log((1 - beta) * student.exp() + beta * teacher.exp())
        to_teacher, to_student = (kl_div(mixed, end, reduction="none", log_target=True) for end in (teacher, student))
        value = beta * to_teacher + (1 - beta) * to_student
    return value[mask].sum() / mask.sum()


PEERS = {0: Divergence("forward_kl"), 1: Divergence("reverse_kl"), 0.3: Divergence("jsd", 0.3), 0.5: Divergence("jsd", 0.5)}
"""By TRL's β."""


def _step(rows, seed):
    """A first update without rewards: the policy is the old one. Returns the step, the logits (a leaf) and the teacher's."""
    batch, _ = make_batch(rows, seed=seed, rewards=[0.0] * len(rows))
    generator = torch.Generator().manual_seed(seed)
    shape = (2, len(batch.labels_T), VOCABULARY)
    logits, teacher = 2 * torch.randn(shape, generator=generator, dtype=torch.float64)
    logp, teacher_logp = (x.log_softmax(-1).gather(1, batch.labels_T[:, None] % VOCABULARY)[:, 0] for x in (logits, teacher))
    batch = batch.with_(labels_T=batch.labels_T % VOCABULARY, old_logprobs_T=logp, teacher_logprobs_T=teacher_logp)
    return batch, logits.requires_grad_(), teacher


def _ours(config, batch, logits, teacher, divergence=None):
    held = None if divergence is None else TeacherLogits(teacher, divergence)
    scores = logprob_and_entropy(logits, batch.labels_T, mask_T=batch.loss_mask_T, teacher=held)
    objective = build_objective(ObjectiveConfig(**config))
    batch = batch.with_(advantages_S=objective.advantages(batch))
    output = objective(scores, batch, objective.prepare(batch))
    return output.numerator / output.denominator


def _with_gradient(loss, logits):
    return loss.detach(), torch.autograd.grad(loss, logits)[0]


@pytest.mark.parametrize("peers_beta", PEERS)
@given(rows=masks(), seed=st.integers(0, 999))
def test_a_divergence_of_distributions_is_the_peers_loss(peers_beta, rows, seed):
    """Without rewards: the mean over all response tokens of the step."""
    divergence = PEERS[peers_beta]
    batch, logits, teacher = _step(rows, seed)
    beta = {"beta": divergence.beta} if divergence.kind == "jsd" else {}
    config = {"preset": "dapo", "distill": {"of": "all", "coefficient": 1.0, "divergence": divergence.kind, **beta}}
    ours = _with_gradient(_ours(config, batch, logits, teacher, divergence), logits)
    peers = _with_gradient(_trl(peers_beta, logits.log_softmax(-1), teacher.log_softmax(-1), batch.loss_mask_T), logits)
    torch.testing.assert_close(ours, peers, rtol=1e-9, atol=1e-12)


@given(rows=masks(), seed=st.integers(0, 999))
def test_the_sampled_token_is_verls_estimator(rows, seed):
    """verl's `k3` has the value of ``of: sampled``; its policy gradient on −`k1` is that of ``on_policy_distill``."""
    batch, logits, teacher = _step(rows, seed)
    mask, labels = batch.loss_mask_T, batch.labels_T[:, None]
    logp = logits.log_softmax(-1).gather(1, labels)[:, 0]
    gap = batch.teacher_logprobs_T - logp
    k3 = ((gap.exp() - gap - 1) * mask).sum() / mask.sum()
    ours = _ours({"preset": "dapo", "distill": {"coefficient": 1.0}}, batch, logits, teacher)
    torch.testing.assert_close(ours, k3, rtol=1e-9, atol=1e-12)

    reward = gap.detach()
    policy_gradient = -(reward * (logp - logp.detach()).exp() * mask).sum() / mask.sum()
    ours = _ours({"preset": "on_policy_distill"}, batch, logits, teacher)
    torch.testing.assert_close(_with_gradient(ours, logits), _with_gradient(policy_gradient, logits), rtol=1e-9, atol=1e-12)
