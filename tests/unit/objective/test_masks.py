"""What is left out (rejection, OPSM, M2PO), and weights for a sampler: by the names of peers, and of decoupled PPO."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.config.objective.presets import CORRECTIONS
from tepo_megatron.config.objective.section import ObjectiveConfig
from tepo_megatron.core.objective.compose import build_objective
from tests.support.objective_batches import doubles, make_batch, masks, outputs_of, plain_step, surrogates, whole

# weights 0.4 and 3 in a sequence of two tokens: product 1.2, geometric mean 1.0954; and 6 alone
BY_NAME = {
    "tis_token": [0.4, 2, 2],
    "tis_sequence": [1.2, 1.2, 2],
    "mis_token": [0.4, 0, 0],
    "mis_sequence": [1.2, 1.2, 0],
    "icepop": [0, 3, 0],
    "rejection_sequence": [1, 1, 0],
    "rejection_geometric": [0, 0, 0],
}


def _shares(weights, **overrides):
    """What each token's gradient is, relative to A: of a response of two tokens and one of one, where π_θ = π_old.

    ``weights`` are π_old / π_sampler.
    """
    sampler = -2.0 - doubles(*weights).log()
    _, slopes, *_ = surrogates(overrides, [0.0] * 3, [1.0, -1.0], lengths=[2, 1], sampler=sampler)
    return [slope * sign for slope, sign in zip(slopes, (1, 1, -1), strict=True)]


@pytest.mark.parametrize("name", CORRECTIONS)
def test_corrections_by_name(name):
    assert _shares([0.4, 3.0, 6.0], **CORRECTIONS[name].changes) == pytest.approx(BY_NAME[name])


@pytest.mark.parametrize(
    ("weights", "rejection", "cap", "expected"),
    [
        # Without a lower bound only large ratios are rejected.
        ([0.4, 3.0, 0.3], {"level": "token", "low": 0.5, "high": 4.0}, None, [0, 1, 0]),
        ([0.4, 3.0, 0.3], {"level": "sequence", "low": 0.5, "high": 4.0}, None, [1, 1, 0]),
        ([0.4, 3.0, 0.3], {"level": "geometric", "low": 0.5, "high": 4.0}, None, [1, 1, 0]),
        ([1e-30, 1.0, 3.0], {"level": "token", "low": 0.0, "high": 2.0}, None, [1, 1, 0]),
        # It stands beside weights: the geometric mean is 1.0954, the weights are bounded by 2, and 6 is rejected.
        ([0.4, 3.0, 6.0], {"low": 0.9, "high": 1.2}, 2.0, [0.4, 2, 0]),
    ],
)
def test_rejection(weights, rejection, cap, expected):
    mismatch = None if cap is None else {"cap": cap}
    assert _shares(weights, rejection=rejection, mismatch=mismatch) == pytest.approx(expected)


@given(masks(), st.integers(0, 99))
def test_masks_that_nothing_meets_change_nothing(rows, seed):
    batch, scores = make_batch(rows, seed=seed)
    plain = whole(build_objective(ObjectiveConfig(preset="dapo")), batch, scores)
    wide = {"rejection": {"low": 1e-9, "high": 1e9}, "opsm": {"delta": 99.0}, "m2po": {"threshold": 99.0}}
    masked = whole(build_objective(ObjectiveConfig(preset="dapo", **wide)), batch, scores)
    assert torch.equal(plain[0], masked[0])
    assert torch.equal(plain[1][0], masked[1][0])
    assert masked[2]["mask/fraction"][0] == 0


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=20), st.floats(-10, 10))
def test_effective_sample_share(logs, shift):
    """Kish's (Σw)²/(N Σw²), whatever the scale of the weights."""
    old = torch.full((len(logs),), -30.0, dtype=torch.float64)
    batch, scores = plain_step([len(logs)], [1.0], old, old, sampler=old - shift - doubles(*logs))
    weights = doubles(*logs).exp()
    (output,) = outputs_of({"preset": "grpo"}, batch, scores)
    share, count = output.metrics["ess"]
    torch.testing.assert_close(share / count, weights.sum() ** 2 / (len(logs) * (weights**2).sum()), rtol=1e-6, atol=0)


def test_the_lottery_is_fair():
    """Drawing a tenth of many similar tokens takes about a tenth of either half of any field."""
    generator = torch.Generator().manual_seed(0)
    logprob, labels = -torch.rand(20_000, generator=generator), torch.arange(20_000) % 50
    batch, scores = plain_step([10_000] * 2, [1.0, -1.0], logprob, logprob, labels=labels)
    region = {"cov_low": -1e9, "cov_high": 1e9, "fraction": 0.1}
    outputs = outputs_of({"preset": "clip_cov", "trust_region": region}, batch, scores)
    wins = torch.cat([output.token_values["masked"] for output in outputs])
    assert wins.sum() == 2000
    for half in (torch.arange(20_000) < 10_000, labels < 25, logprob < -0.5, torch.arange(20_000) % 2 == 0):
        assert 0.08 < wins[half].double().mean() < 0.12


@given(st.integers(1, 300), st.floats(-2, 2, width=32))
def test_equal_advantages_have_no_covariance(count, value):
    """Otherwise a rounding of their mean would choose tokens."""
    old = -torch.rand(count)
    batch, scores = plain_step([1] * count, [value] * count, old, old)
    (output, *_) = outputs_of({"preset": "kl_cov"}, batch.select(range(count)), scores)
    assert output.metrics["mask/fraction"][0] == 0


VECTOR = st.lists(st.floats(-2, 2), min_size=6, max_size=6).map(lambda row: torch.tensor(row, dtype=torch.float64))


@given(VECTOR, VECTOR)
def test_the_token_statistic_has_the_covariance_as_its_mean(logits, advantage):
    """c(a), averaged over a ~ π, is Cov(log π, A) over a ~ π. Here π is uniform over as many tokens as there are actions."""
    old = logits.log_softmax(-1)
    batch, scores = plain_step([1] * 6, advantage, old, old)
    objective = build_objective(ObjectiveConfig())
    statistic = objective.token_values(scores, batch, objective.prepare(batch)).covariance_T
    expected = (old * advantage).mean() - old.mean() * advantage.mean()
    torch.testing.assert_close(statistic.mean(), expected, rtol=1e-9, atol=1e-12)


LOGITS = st.lists(st.floats(-0.7, 0.7), min_size=4, max_size=4)
ADVANTAGES = torch.tensor([1.0, -0.5, 0.25, -1.0])


def _gradients(config, behaviour, proximal, current):
    """The gradient of the surrogate at one token for each of four actions, by log π of that action; log-probs [4]."""
    delta = (current - proximal).tolist()
    return doubles(*surrogates({"preset": "decoupled_ppo", **config}, delta, ADVANTAGES, old=proximal, sampler=behaviour)[1])


def _policy(logits):
    return torch.log_softmax(torch.tensor(logits, dtype=torch.float64), 0)


@given(LOGITS, LOGITS, LOGITS)
def test_stale_samples_give_what_fresh_ones_would(behaviour, proximal, current):
    """The mean over actions of the behaviour policy is that of PPO over actions of the proximal policy, clip and all."""
    behaviour, proximal, current = (_policy(logits) for logits in (behaviour, proximal, current))
    decoupled = _gradients({"mismatch": {"high": 20.0}}, behaviour, proximal, current)
    fresh = _gradients({"mismatch": None}, proximal, proximal, current)
    torch.testing.assert_close(behaviour.exp() * decoupled, proximal.exp() * fresh)


@given(LOGITS, LOGITS)
def test_the_first_update_follows_the_policy_gradient(behaviour, current):
    """π_old = π_θ: the mean over stale actions is E[A ∇ log π] over actions of π_θ."""
    behaviour, current = _policy(behaviour), _policy(current)
    decoupled = _gradients({"mismatch": {"high": 20.0}}, behaviour, current, current)
    torch.testing.assert_close(behaviour.exp() * decoupled, current.exp() * ADVANTAGES.double())


def test_the_clip_is_around_the_proximal_policy_and_the_bound_is_on_the_stale_ratio():
    """w = 0.5, 3, 2, 6, the last of which is dropped; r = 1.1, 1.3, 0.7, 1.0, of which a narrower clip holds the first."""
    proximal = torch.full((4,), -2.0, dtype=torch.float64)
    behaviour = proximal - torch.tensor([0.5, 3.0, 2.0, 6.0], dtype=torch.float64).log()
    current = proximal + torch.tensor([1.1, 1.3, 0.7, 1.0], dtype=torch.float64).log()
    gradient = _gradients({}, behaviour, proximal, current)
    assert gradient.tolist() == pytest.approx([0.5 * 1.1, -3 * 1.3 * 0.5, 2 * 0.7 * 0.25, 0.0])
    clipped = {"trust_region": {"high": 0.05}}
    assert _gradients(clipped, behaviour, proximal, current).tolist() == pytest.approx([0.0, -1.95, 0.35, 0.0])
