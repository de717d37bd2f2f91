"""What is left out: rejection, OPSM, M2PO; and the corrections for a sampler by the names that peers give them."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.config.objective.presets import CORRECTIONS
from tepo_megatron.config.objective.section import ObjectiveConfig
from tepo_megatron.core.objective import build_objective
from tepo_megatron.core.objective.mechanisms import smallest_excluded
from tepo_megatron.core.types import TokenScores
from tests.support.objective_batches import make_batch, masks, summary, whole


def _gradient_share(weights, ratios, rows=((True, True), (True,)), advantages=(1.0, -1.0), **overrides):
    """What each token's gradient is, relative to −A / tokens; ``weights`` are π_old / π_sampler, ``ratios`` π_θ / π_old."""
    batch, scores = make_batch([list(row) for row in rows])
    sampler = batch.old_logprobs_T - torch.tensor(weights, dtype=torch.float64).log()
    batch = batch.with_(sampler_logprobs_T=sampler, advantages_S=torch.tensor(advantages))
    logprob = (batch.old_logprobs_T + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    preset = {"preset": "kl_cov", "kl_cov": None, **overrides}  # r A, divided by the number of tokens
    objective = build_objective(ObjectiveConfig(**preset))
    output = objective(TokenScores(logprob, scores.entropy), batch, objective.prepare(batch))
    _, (gradient, _), metrics, _ = summary([output], TokenScores(logprob, scores.entropy))
    return (-gradient * len(weights) / batch.advantages_S[batch.sequence_index_T]).tolist(), metrics


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


@pytest.mark.parametrize("name", CORRECTIONS)
def test_corrections_by_name(name):
    shares, _ = _gradient_share([0.4, 3.0, 6.0], [1.0, 1.0, 1.0], **CORRECTIONS[name].changes)
    assert shares == pytest.approx(BY_NAME[name])


def test_a_rejection_stands_beside_weights():
    """The geometric mean 1.0954 is within [0.9, 1.2]; the weights of its two tokens are bounded by 2, and 6 is rejected."""
    rejection = {"low": 0.9, "high": 1.2}
    shares, metrics = _gradient_share([0.4, 3.0, 6.0], [1.0] * 3, rejection=rejection, mismatch={"cap": 2.0})
    assert shares == pytest.approx([0.4, 2, 0])
    assert metrics["mask/fraction"].tolist() == [1, 3]


@pytest.mark.parametrize(("level", "kept"), [("token", [0, 1, 0]), ("sequence", [1, 1, 0]), ("geometric", [1, 1, 0])])
def test_levels_of_a_rejection(level, kept):
    shares, _ = _gradient_share([0.4, 3.0, 0.3], [1.0] * 3, rejection={"level": level, "low": 0.5, "high": 4.0})
    assert shares == kept


def test_without_a_lower_bound_only_large_ratios_are_rejected():
    shares, _ = _gradient_share([1e-30, 1.0, 3.0], [1.0] * 3, rejection={"level": "token", "low": 0.0, "high": 2.0})
    assert shares == [1, 1, 0]
    with pytest.raises(ValueError, match=r"rejection.low = 2 must be below rejection.high = 1"):
        ObjectiveConfig(rejection={"low": 2, "high": 1})


def test_opsm_leaves_out_bad_responses_that_the_policy_has_left():
    """Mean of log π_old − log π: −0.5 (ln 0.5 + ln 1.5) = 0.1438, 0.1054, −0.0953; the last is larger, but has A > 0."""
    rows, advantages = [(True, True), (True,), (True,), (True,)], (-1.0, -1.0, -1.0, 1.0)
    ratios = [0.5, 1.5, 0.9, 1.1, 0.5]
    shares, metrics = _gradient_share([1.0] * 5, ratios, rows, advantages, opsm={"delta": 0.12})
    assert shares == pytest.approx([0, 0, 0.9, 1.1, 0.5])
    assert metrics["mask/fraction"].tolist() == [2, 5]
    shares, _ = _gradient_share([1.0] * 5, ratios, rows, advantages, opsm={"delta": 0.1})
    assert shares == pytest.approx([0, 0, 0, 1.1, 0.5])


def test_m2po_leaves_out_the_largest_squares():
    """Squares of log weights 0.01, 0.09, 0.16: their mean 0.0867; without the last 0.05; without the last two 0.01."""
    weights = [math.exp(0.1), math.exp(-0.3), math.exp(0.4)]
    for threshold, kept in ((0.09, [1, 1, 1]), (0.08, [1, 1, 0]), (0.04, [1, 0, 0]), (0.009, [0, 0, 0])):
        shares, metrics = _gradient_share(weights, [1.0] * 3, m2po={"threshold": threshold})
        assert shares == kept
        assert metrics["mask/fraction"].tolist() == [3 - sum(kept), 3]


@given(st.lists(st.sampled_from([0.0, 0.01, 0.02, 0.3, 5.0, 400.0]), min_size=1, max_size=12), st.floats(1e-3, 10))
def test_m2po_keeps_as_many_as_the_threshold_allows(squares, threshold):
    """What is kept has a mean of at most the threshold, and with one more value, and its equals, it would not."""
    values = torch.tensor(squares, dtype=torch.float64)
    bound = smallest_excluded(values, threshold)
    kept, dropped = values[values < bound], values[values >= bound]
    assert not kept.numel() or kept.mean() <= threshold * (1 + 1e-12)
    if dropped.numel():
        assert torch.cat([kept, dropped[dropped == dropped.min()]]).mean() > threshold * (1 - 1e-12)


@given(masks(), st.integers(0, 99))
def test_masks_that_nothing_meets_change_nothing(rows, seed):
    batch, scores = make_batch(rows, seed=seed)
    plain = whole(build_objective(ObjectiveConfig(preset="dapo")), batch, scores)
    wide = {"rejection": {"low": 1e-9, "high": 1e9}, "opsm": {"delta": 99.0}, "m2po": {"threshold": 99.0}}
    masked = whole(build_objective(ObjectiveConfig(preset="dapo", **wide)), batch, scores)
    assert torch.equal(plain[0], masked[0])
    assert torch.equal(plain[1][0], masked[1][0])
    assert masked[2]["mask/fraction"][0] == 0
