"""Every preset against its formula, on [sequence, token] in fp64; metrics by hand; and what must not matter."""

import contextlib
import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tepo_megatron.config.objective.presets import PRESETS
from tepo_megatron.config.objective.section import ObjectiveConfig
from tepo_megatron.core.objective.checking import RULES, Step
from tepo_megatron.core.objective.compose import build_objective
from tepo_megatron.core.objective.ratio import sequence_sum
from tepo_megatron.core.types import Checks, TokenScores
from tepo_megatron.errors import NotFiniteError
from tests.support.host_waits import HostWaits
from tests.support.objective_batches import assert_same, doubles, make_batch, masks, plain_step, whole


def _pad(values, batch):
    """[T] to [S, longest], zeros behind."""
    return torch.nn.utils.rnn.pad_sequence(list(values.split(batch.lengths_S.tolist())), batch_first=True)


class _Dense:
    """A step on padded [sequence, token] values, for formulas as they are printed."""

    def __init__(self, batch, scores, advantages):
        self.m = _pad(batch.loss_mask_T, batch).double()
        self.logp, self.old = _pad(scores.logprob, batch), _pad(batch.old_logprobs_T, batch)
        self.delta = (self.logp - self.old) * self.m
        self.r = self.delta.exp()
        self.dH = (_pad(scores.entropy, batch) - _pad(batch.old_entropy_T, batch)).detach()
        self.mismatch = (self.old - _pad(batch.sampler_logprobs_T, batch)) * self.m
        self.A = advantages.double().unsqueeze(1).expand_as(self.m)
        self.teacher_advantage = (_pad(batch.teacher_logprobs_T, batch) - self.old) * self.m
        self.T = self.m.sum(1)
        self.S = (self.T > 0).sum()
        self.s = (self.delta.sum(1) / self.T.clamp(min=1)).exp().unsqueeze(1).expand_as(self.m)
        self.s_token = self.s.detach() * (self.delta - self.delta.detach()).exp()
        on = self.m.bool()
        self.cov = (self.old - self.old[on].mean()) * (self.A - self.A[on].float().mean())

    def clip(self, low=0.2, high=0.2, ratio=None):
        r = self.r if ratio is None else ratio
        return torch.min(r * self.A, r.clamp(1 - low, 1 + high) * self.A)

    def clip_by_length(self, low, high):
        root, s = self.T.clamp(min=1).sqrt().unsqueeze(1), self.s_token
        return torch.min(s * self.A, s.clamp((-low / root).exp(), (high / root).exp()) * self.A)

    def mean_over_tokens(self, values):
        """[S, 1]: of the response tokens of each sequence."""
        return ((self.m * values).sum(1) / self.T.clamp(min=1)).unsqueeze(1)

    def token_mean(self, values):
        return -(self.m * values).sum() / self.T.sum()

    def sequence_mean(self, values):
        return -((self.m * values).sum(1) / self.T.clamp(min=1)).sum() / self.S


def _tepo(d):
    kl = d.r * d.delta - d.r + 1
    return d.token_mean(d.clip_by_length(0.026, 0.035) - 1.0 * ((d.A > 0) & (d.dH < 0)) * kl)


def _kl_cov(d):
    chosen = d.m.bool() & (d.cov > 0)
    worst = torch.where(chosen, d.cov, -torch.inf).max()  # a fraction of 2e-4 of a small step is one token
    return d.token_mean(d.r * d.A - 1.0 * (chosen & (d.cov == worst)) * d.delta.abs())


def _fspo(d):
    total, most = (d.m * d.delta).sum(1), 0.03 * d.T.sqrt()
    return -((d.T > 0) * total.clamp(-most, most).exp() * d.A[:, 0]).sum() / d.S


def _gmpo(d):
    held = torch.where(d.A > 0, d.delta.clamp(max=0.4), torch.where(d.A < 0, d.delta.clamp(min=-0.4), d.delta))
    return -((d.T > 0) * d.mean_over_tokens(held).exp()[:, 0] * d.A[:, 0]).sum() / d.S


def _sapo(d):
    tau = 1.05 - 0.05 * (d.A > 0).double()
    return d.sequence_mean(4 / tau * torch.sigmoid(tau * (d.r - 1)) * d.A)


def _dppo(d, kept):
    return d.token_mean(torch.where(kept, d.r.detach().clamp(max=20.0) * d.A * d.logp, 0.0))


def _dppo_tv(d):
    moved = (d.logp.exp() - d.old.exp()).detach()
    return _dppo(d, torch.where(d.A > 0, moved <= 0.2, moved >= -0.2))


def _dppo_kl(d):
    p, q = d.logp.detach().exp(), d.old.exp()
    kl = q * (d.old - d.logp.detach()) + (1 - q) * ((1 - q) / (1 - p).clamp(min=2.0**-52)).log()
    return _dppo(d, (kl <= 0.05) | torch.where(d.A > 0, p <= q, p >= q))


def _opsm(d):
    gain = d.clip()
    dropped = (d.A < 0) & (-d.mean_over_tokens(d.delta) > 1e-4)
    return d.sequence_mean(torch.where(dropped, gain.detach(), gain))


def _m2po(d):
    gain, squares, kept = d.clip(), d.mismatch**2, d.m.bool()
    while kept.any() and squares[kept].mean() > 0.04:
        kept = kept & (squares < squares[kept].max())
    return d.token_mean(torch.where(kept, gain, gain.detach()))


def _ppo(d):
    return d.token_mean(d.clip())


def _on_policy_distill(d):
    d.A = d.teacher_advantage
    return _ppo(d)


FORMULAS = {
    "on_policy_distill": _on_policy_distill,
    **dict.fromkeys(("rloo", "max_rl", "reinforce_plus_plus_baseline", "gdpo"), _ppo),  # advantages: test_advantage.py
    "tepo": _tepo,
    "tepo_markov": lambda d: d.token_mean(d.clip_by_length(0.026, 0.035)),
    "grpo": lambda d: d.sequence_mean(d.clip()),
    "dapo": lambda d: d.token_mean(d.clip(0.2, 0.28)),
    "gspo": lambda d: d.sequence_mean(d.clip(3e-4, 4e-4, d.s)),
    "dr_grpo": lambda d: -(d.m * d.clip()).sum() / (1024 * d.S),
    "gspo_token": lambda d: d.sequence_mean(d.clip(3e-4, 4e-4, d.s_token)),
    "luspo": lambda d: -(d.T * d.clip(2e-3, 2.5e-3, d.s)[:, 0]).sum() / d.S,
    "gmpo": _gmpo,
    "fspo": _fspo,
    "holder_po": lambda d: d.sequence_mean(d.clip(3e-4, 4e-4, d.mean_over_tokens(d.r))),
    "sapo": _sapo,
    "dppo_tv": _dppo_tv,
    "dppo_kl": _dppo_kl,
    "two_sided_clip": lambda d: d.sequence_mean(torch.where(d.A < 0, torch.max(d.clip(), 3 * d.A), d.clip())),
    "opsm": _opsm,
    "m2po": _m2po,
    "decoupled_ppo": lambda d: d.token_mean(d.mismatch.exp() * (d.mismatch.exp() <= 5) * d.clip()),
    "kl_cov": _kl_cov,
    "cispo": lambda d: d.token_mean(d.r.detach().clamp(max=5.0) * d.A * d.logp),
}


@pytest.mark.parametrize("preset", FORMULAS)
@settings(max_examples=25)
@given(rows=masks(min_sequences=2), seed=st.integers(0, 99), spread=st.sampled_from([1e-4, 0.3, 3.0]))
def test_loss_and_gradient_are_the_formula(preset, rows, seed, spread):
    batch, scores = make_batch(rows, seed=seed, spread=spread)
    assume(preset != "kl_cov" or batch.loss_mask_T.sum() != 2)  # the covariances of two tokens tie
    objective = build_objective(ObjectiveConfig(preset=preset))
    loss, (gradient, *_), *_ = whole(objective, batch, scores)
    expected = FORMULAS[preset](_Dense(batch, scores, objective.advantages(batch)))
    (expected_gradient,) = torch.autograd.grad(expected, scores.logprob, materialize_grads=True)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("preset", PRESETS)
@settings(max_examples=10)
@given(rows=masks(), seed=st.integers(0, 99), spread=st.sampled_from([0.3, 1.5]))
def test_the_values_of_single_tokens_are_those_that_the_metrics_are_means_of(preset, rows, seed, spread):
    """And have no gradient: a run may keep them."""
    batch, scores = make_batch(rows, seed=seed, spread=spread)
    objective = build_objective(ObjectiveConfig(preset=preset))
    batch, _ = ready = Step(batch, scores).with_advantages(objective)
    found = ready.output(objective)
    on_T = batch.loss_mask_T
    for name, metric in {"ratio": "ratio/mean", "masked": "mask/fraction", "entropy_change": "entropy/delta"}.items():
        value_T = found.token_values[name]
        assert not value_T.requires_grad
        torch.testing.assert_close(value_T[on_T].double().sum(), found.metrics[metric][0], rtol=1e-9, atol=1e-12)
    assert torch.equal(found.token_values["logprob_update"][on_T], scores.logprob.detach()[on_T])
    without = objective(scores, batch.with_(old_entropy_T=None), objective.prepare(batch)) if preset == "grpo" else None
    assert without is None or "entropy_change" not in without.token_values


def test_every_preset_has_its_formula():
    """Clip-Cov draws tokens; it is tested below."""
    assert set(FORMULAS) | {"clip_cov"} == set(PRESETS)


def test_hand_computed_metrics():
    """Two response tokens with ratios 1.1 and 1.3, A = 1; one with ratio 0.7, A = −1. Entropy falls on the first only."""
    old, ratios = doubles(0.5, 0.2, 0.4).log(), doubles(1.1, 1.3, 0.7)
    new, sampler = old + ratios.log(), old - doubles(2.0, 0.9, 1.0).log()
    batch, scores = plain_step([2, 1], [1.0, -1.0], new, old, sampler=sampler, reference=new + doubles(1.5, 0.8, 1.2).log())
    batch = batch.with_(teacher_logprobs_T=new + doubles(0.5, 3.0, 1.2).log())
    scores = TokenScores(scores.logprob, doubles(0.9, 1.1, 0.9))
    terms = {"kl_mask": {"coefficient": 1.0}, "kl": {"coefficient": 0.04}, "distill": {"coefficient": 0.5}}
    mismatch = {"kind": "mask", "low": 0.8, "high": 1.25}
    choices = {"preset": "dapo", "mismatch": mismatch, **terms}
    output = Step(batch, scores).output(build_objective(ObjectiveConfig.model_validate(choices)))
    metrics = {name: (total.item(), count.item()) for name, (total, count) in output.metrics.items()}
    kl = [r * math.log(r) - r + 1 for r in (1.1, 1.3, 0.7)]
    teacher = [r * (p - 1 - math.log(p)) for r, p in ((1.1, 0.5), (1.3, 3.0), (0.7, 1.2))]
    quarters = [metrics.pop(f"distill/divergence_q{number}") for number in (1, 2, 3, 4)]  # of two tokens and of one
    assert quarters == [(pytest.approx(teacher[0] + teacher[2]), 2), (0, 0), (pytest.approx(teacher[1]), 1), (0, 0)]
    mean = {name: total / count for name, (total, count) in metrics.items()}
    expected = {
        "ratio/mean": 3.1 / 3,
        "clip/low": 1 / 3,
        "clip/high": 1 / 3,
        "kl/mean": sum(kl) / 3,
        "kl/masked": kl[0],
        "mask/fraction": 1 / 3,
        "entropy/mean": 2.9 / 3,
        "entropy/delta": -0.1 / 3,
        "entropy/delta_masked": -0.1,
        "entropy/delta_unmasked": 0.0,
        "mismatch/kl": (2.9 - 2 - math.log(2.0 * 0.9)) / 3,
        "mismatch/weight": 1.9 / 3,
        "mismatch/dropped": 1 / 3,
        "ess": 3.9**2 / (3 * (4 + 0.81 + 1)),
        "kl/reference": (3.5 - 3 - math.log(1.5 * 0.8 * 1.2)) / 3,
        "distill/divergence": sum(teacher) / 3,
        "clip/share": 2 / 3,
        "ratio/sigma": (math.log(1.1 * 1.3) ** 2 + math.log(0.7) ** 2) / 3,  # of two tokens and of one
    }
    shares = [mean.pop(f"clip/share_q{number}") for number in (1, 2, 3, 4)]
    assert shares == pytest.approx([1.0, 1.0, 0.5, 0.5])
    assert mean == pytest.approx(expected, abs=1e-12)
    assert {name: value.item() for name, value in output.extrema.items()} == pytest.approx({"ratio/min": 0.7, "ratio/max": 1.3})


@given(st.lists(st.tuples(st.integers(1, 4), st.sampled_from([-1.0, 0.0, 1.0])), min_size=1, max_size=9), st.integers(0, 99))
def test_quarters_of_the_length_have_equally_many_responses(responses, seed):
    """As of a list with four copies of each, where the values of those of one length are mixed."""
    lengths, advantages = zip(*responses, strict=True)
    draw = torch.Generator().manual_seed(seed)
    old, new = (torch.randn(sum(lengths), generator=draw, dtype=torch.float64) for _ in range(2))
    batch, scores = plain_step(lengths, advantages, new, old)
    output = Step(batch, scores).output(build_objective(ObjectiveConfig(preset="grpo")))
    pushed = sorted(length for length, advantage in responses if advantage)
    clipped = dict.fromkeys(pushed, 0)
    for length, advantage, move in zip(lengths, advantages, (new - old).exp().sub(1).split(lengths), strict=True):
        clipped[length] = clipped.get(length, 0) + int((move * advantage > 0.2).sum())
    copies = [length for length in pushed for _ in range(4)]
    for quarter in range(4):
        inside = copies[quarter * len(pushed) : (quarter + 1) * len(pushed)]
        expected = [sum(clipped[length] / pushed.count(length) for length in inside) / 4, sum(inside) / 4]
        assert torch.stack(output.metrics[f"clip/share_q{quarter + 1}"]).tolist() == pytest.approx(expected)


def not_at_a_bound(dense, *bounds):
    """No covariance so near to a bound that the oracle's rounding decides on which side it is."""
    return all(((dense.cov - bound).abs()[dense.m.bool()] > 1e-9).all() for bound in bounds)


@given(masks(min_sequences=3), st.integers(0, 99))
def test_clip_cov_takes_the_gradient_of_some_candidates_and_nothing_else(rows, seed):
    region = {"cov_low": 0.0, "fraction": 0.3}
    batch, scores = make_batch(rows, seed=seed)
    clip_cov = build_objective(ObjectiveConfig(preset="clip_cov", trust_region=region))
    plain = build_objective(ObjectiveConfig(preset="dapo", trust_region={"high": 0.2}))
    loss, (gradient, *_), metrics, _ = whole(clip_cov, batch, scores)
    plain_loss, (plain_gradient, *_), *_ = whole(plain, batch, scores)
    torch.testing.assert_close(loss, plain_loss)
    dense = _Dense(batch, scores, clip_cov.advantages(batch))
    assume(not_at_a_bound(dense, 0.0, 5.0))
    candidates = (dense.cov >= 0) & (dense.cov <= 5) & dense.m.bool()
    drawn = metrics["mask/fraction"][0].item()
    assert drawn == min(candidates.sum().item(), max(int(0.3 * batch.loss_mask_T.sum()), 1))
    differ = gradient != plain_gradient
    assert differ.sum() <= drawn
    assert (gradient[differ] == 0).all()
    assert not (_pad(differ, batch) & ~candidates).any()


@given(masks(min_sequences=2), st.integers(0, 99))
def test_first_update_after_a_rollout(rows, seed):
    """θ = old: the ratio is 1 and ΔH is 0, so the measured mask is empty, TEPO and its Markov form are one; the others act."""
    batch, scores = make_batch(rows, seed=seed)
    old = (batch.old_logprobs_T.clone().requires_grad_(), batch.old_entropy_T.clone().requires_grad_())
    scores = TokenScores(*old, scores.entropy_slope)
    tepo, markov = (whole(build_objective(ObjectiveConfig(preset=name)), batch, scores) for name in ("tepo", "tepo_markov"))
    assert tepo[2]["mask/fraction"][0] == 0
    assert tepo[2]["kl/mean"][0] == 0
    assert_same(tepo, markov)
    first_order = build_objective(ObjectiveConfig(kl_mask={"falling": "first_order"}))
    assert first_order.needs_entropy_slope
    assert not build_objective(ObjectiveConfig()).needs_entropy_slope
    expected = (
        batch.loss_mask_T & (first_order.advantages(batch)[batch.sequence_index_T] > 0) & (scores.entropy_slope < 0)
    ).sum()
    assert whole(first_order, batch, scores)[2]["mask/fraction"][0] == expected
    predicted = build_objective(ObjectiveConfig(kl_mask={"falling": "covariance"}))
    dense = _Dense(batch, scores, predicted.advantages(batch))
    assume(not_at_a_bound(dense, 0.0))
    expected = (dense.m.bool() & (dense.A > 0) & (dense.cov > 0)).sum()
    assert whole(predicted, batch, scores)[2]["mask/fraction"][0] == expected


ROWS = [[True] * 6, [False, False], [True, False, True], [True], [True] * 3, [True]]


@pytest.mark.parametrize("preset", PRESETS)
@settings(max_examples=15)
@given(data=st.data())
def test_loss_and_gradient_are_finite(preset, data):
    batch, scores = make_batch(ROWS, seed=data.draw(st.integers(0, 9)))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    signs = torch.tensor(data.draw(st.lists(st.sampled_from([-120.0, -20.0, 0.0, 20.0, 120.0]), min_size=16, max_size=16)))
    old = (10 * batch.old_logprobs_T).to(dtype)
    batch = batch.with_(
        old_logprobs_T=old,
        old_entropy_T=batch.old_entropy_T.to(dtype),
        sampler_logprobs_T=torch.where(batch.loss_mask_T, old - signs.flip(0).to(dtype), 0.0),
        advantages_S=torch.tensor([1.0, 1.0, -2.0, 0.0, -1.0, 3.0]),
    )
    scores = TokenScores((old + signs.to(dtype)).requires_grad_(), scores.entropy.detach().to(dtype).requires_grad_())
    objective = build_objective(ObjectiveConfig(preset=preset))
    loss, gradients, metrics, extrema = Step(batch, scores).summary([Step(batch, scores).output(objective)])
    assert loss.isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert all(value.isfinite().all() for value in (*metrics.values(), *extrema.values()))
    nothing = (~batch.loss_mask_T) | (batch.advantages_S[batch.sequence_index_T] == 0)
    if ObjectiveConfig(preset=preset).kl_cov is None and preset != "on_policy_distill":  # whose advantages are the teacher's
        assert (gradients[0][nothing] == 0).all()


@pytest.mark.parametrize("preset", sorted(set(PRESETS) - {"on_policy_distill"}))
def test_equal_rewards_teach_nothing(preset):
    """Advantages of exactly 0, and so no gradient, whatever the level of the rewards."""
    batch, scores = make_batch(ROWS, rewards=[0.1, 0.1, 0.1, 0.7, 0.7, 0.7], groups=[0, 0, 0, 1, 1, 1])
    objective = build_objective(ObjectiveConfig(preset=preset))
    assert (objective.advantages(batch) == 0).all()
    _, gradients, *_ = whole(objective, batch, scores)
    assert (gradients[0] == 0).all()


VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {"preset": name} for name in PRESETS},
    "tepo, covariance mask": {"kl_mask": {"falling": "covariance", "against": "reference"}},
    "tepo, mask against a teacher": {"kl_mask": {"against": "teacher"}},
    "tepo with a teacher's tokens": {"distill": {"coefficient": 0.5}},
    "tepo with a teacher's distributions": {"distill": {"of": "all", "coefficient": 0.5}},
    "tepo with a teacher's top k": {"distill": {"of": "top_k", "divergence": "jsd", "coefficient": 0.5}},
    "tepo, first-order mask": {"kl_mask": {"falling": "first_order"}},
    "entropy, adaptive": {"entropy": {"kind": "adaptive", "coefficient": 0.1, "target": 0.7}, "kl": {"coefficient": 0.04}},
    "icepop, sequence": {"preset": "grpo", "mismatch": {"kind": "mask", "level": "sequence", "low": 0.9, "high": 1.1}},
    "truncated, product ratio": {
        "ratio": {"kind": "sequence", "length_normalized": False},
        "mismatch": {"kind": "truncate", "cap": 1.1},
        "aggregation": {"kind": "constant", "per": "step"},
    },
    "many chosen by covariance": {"preset": "kl_cov", "kl_cov": {"fraction": 0.4, "estimator": "k2"}},
    "gdpo, weighted": {"preset": "gdpo", "advantage": {"weights": [1.0, 3.0]}},
    "whitened over tokens": {"preset": "grpo", "advantage": {"kind": "whitened", "over": "tokens"}},
    "rejection, geometric": {"preset": "dapo", "rejection": {"low": 0.9, "high": 1.05}},
    "rejection, sequence, with weights": {
        "preset": "dapo",
        "rejection": {"level": "sequence", "low": 0.8, "high": 1.2},
        "mismatch": {"kind": "truncate", "level": "geometric", "cap": 1.01},
    },
    "many drawn": {"preset": "clip_cov", "trust_region": {"fraction": 0.4, "cov_low": 0.0}},
    "prefix, bounds by length": {"ratio": {"kind": "prefix"}, "trust_region": {"scale": "length", "low": 0.03, "high": 0.05}},
}


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=6)
@given(rows=masks(), seed=st.integers(0, 99), spread=st.sampled_from([1e-4, 0.3, 1.5]))
def test_order_and_cuts_do_not_matter(variant, rows, seed, spread):
    """Nor do ranks and padding; gradients are finite and the same again."""
    objective = build_objective(ObjectiveConfig(**VARIANTS[variant]))
    for check in RULES.values():
        check(objective, make_batch(rows, seed=seed, spread=spread), seed)


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=8)
@given(rows=masks(), seed=st.integers(0, 99), data=st.data())
def test_the_host_does_not_wait_for_a_micro_batch(variant, rows, seed, data):
    """A score that is not finite is noted, as the error that is raised otherwise, and reaches no term."""
    objective = build_objective(ObjectiveConfig(**VARIANTS[variant]))
    batch, scores = ready = make_batch(rows, seed=seed).with_advantages(objective)
    context = objective.prepare(batch)
    names = ["logprob", "entropy", "entropy_slope", "divergence"]
    values = {name: getattr(scores, name).detach().clone() for name in names}
    inside = batch.loss_mask_T.nonzero().flatten().tolist()
    wrong = data.draw(st.dictionaries(st.sampled_from(inside), st.sampled_from([math.nan, math.inf, -math.inf]), max_size=3))
    for token, value in wrong.items():
        values[data.draw(st.sampled_from(names))][token] = value
    with contextlib.ExitStack() as raised:
        caught = raised.enter_context(pytest.raises(NotFiniteError)) if wrong else None
        expected = objective(TokenScores(**values), batch, context)
    checks = Checks()
    with HostWaits() as waits:
        output = objective(TokenScores(**values, checks=checks), batch, context)
    assert not waits.places
    (noted,) = Checks.first_errors([checks])
    assert (noted and str(noted)) == (caught and str(caught.value))
    assert output.numerator.isfinite()
    if not wrong:
        assert torch.equal(output.numerator, expected.numerator)
        assert torch.equal(output.numerator, ready.output(objective, context).numerator)


@pytest.mark.gpu_conditions
@given(seed=st.integers(0, 2**31), sequences=st.integers(1, 20), tokens=st.integers(1, 3000))
def test_the_order_of_adding_does_not_change_a_sequences_sum(seed: int, sequences: int, tokens: int) -> None:
    """A GPU adds by atomics, in any order; the ranks of a tensor-parallel group must agree about what is clipped."""
    generator = torch.Generator().manual_seed(seed)
    values_T, order = torch.randn(tokens, generator=generator) * 0.03, torch.randperm(tokens, generator=generator)
    index_T = torch.randint(0, sequences, (tokens,), generator=generator)
    sums_S = sequence_sum(values_T, index_T, sequences)
    assert sums_S.dtype == torch.float32
    assert torch.equal(sums_S, sequence_sum(values_T[order], index_T[order], sequences))
