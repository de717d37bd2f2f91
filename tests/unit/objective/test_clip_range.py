"""Clip ranges that follow a response's length, and bounds that follow the last step's ratios."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.config import RunConfig
from tepo_megatron.config.objective.section import ObjectiveConfig
from tepo_megatron.core.objective.checking import Step
from tepo_megatron.core.objective.compose import build_objective
from tepo_megatron.core.objective.trust_region import next_clip_range
from tepo_megatron.core.types import bound_for_share, count_moves
from tests.support.objective_batches import make_batch, masks

AUTO = {"kind": "clip", "scale": "length", "low": "auto", "high": "auto"}
FIXED = {"kind": "clip", "scale": "length", "low": 0.4, "high": 0.5}
RATIOS = st.sampled_from(
    [{"kind": kind, "length_normalized": mean} for kind in ("sequence", "sequence_token", "prefix") for mean in (True, False)]
)


def dense(config, batch, scores, advantages):
    """The surrogate's loss, sequence by sequence in loops, and (move, sign of A) of every response token."""
    total, tokens, moves = torch.zeros((), dtype=torch.float64), 0, []
    ratio = config.ratio
    for number in range(batch.num_sequences):
        inside = (batch.sequence_index_T == number) & batch.loss_mask_T
        delta = (scores.logprob - batch.old_logprobs_T)[inside].double()
        advantage = advantages[number].double()
        for index in range(len(delta)):
            part = delta[: index + 1] if ratio.kind == "prefix" else delta
            log = part.sum() / len(part) if ratio.length_normalized else part.sum()
            root = len(part) ** 0.5
            factor = 1 / root if ratio.length_normalized else root
            if ratio.kind != "sequence":
                log = log.detach() + delta[index] - delta[index].detach()
            low, high = config.trust_region.bounds(None)
            bounded = log.clamp(-low * factor, high * factor)
            total = total + torch.minimum(log.exp() * advantage, bounded.exp() * advantage)
            moves.append((float(log.detach()) / factor, float(advantage)))
            tokens += 1
    return -total / tokens, moves


@given(rows=masks(), ratio=RATIOS, seed=st.integers(0, 99), spread=st.sampled_from([0.01, 0.5]))
def test_the_bounds_follow_the_length(rows, ratio, seed, spread):
    batch, scores = make_batch(rows, seed=seed, spread=spread)
    config = ObjectiveConfig.model_validate({"ratio": ratio, "trust_region": FIXED, "kl_mask": None})
    objective = build_objective(config)
    batch, _ = ready = Step(batch, scores).with_advantages(objective)
    output = ready.output(objective)
    expected, _ = dense(config, batch, scores, batch.advantages_S)
    loss = output.numerator / output.denominator
    torch.testing.assert_close(loss, expected.to(loss.dtype), rtol=1e-9, atol=1e-12)
    ours = torch.autograd.grad(loss, scores.logprob)[0]
    torch.testing.assert_close(ours, torch.autograd.grad(expected, scores.logprob)[0], rtol=1e-9, atol=1e-12)


@given(rows=masks(min_sequences=3), ratio=RATIOS, seed=st.integers(0, 99), cut=st.integers(1, 2))
def test_moves_are_counted_alike_over_every_cut_and_give_the_quantile(rows, ratio, seed, cut):
    batch, scores = make_batch(rows, seed=seed, spread=0.3)
    config = ObjectiveConfig.model_validate({"ratio": ratio, "trust_region": AUTO, "kl_mask": None})
    objective = build_objective(config)
    batch, _ = ready = Step(batch, scores).with_advantages(objective)
    context = objective.prepare(batch)
    whole = ready.output(objective, context).moves
    parts = [range(cut), range(cut, batch.num_sequences)]
    cuts = [ready.pick(part).output(objective, context).moves for part in parts]
    assert torch.equal(torch.stack(cuts).sum(0), whole)
    _, moves = dense(config, batch, scores, batch.advantages_S)
    for row, sign in enumerate((-1, 1)):
        mine = torch.tensor([move * sign for move, advantage in moves if advantage * sign > 0], dtype=torch.float64)
        assert whole[row].sum() == len(mine)
        bound = bound_for_share(whole[row], 0.25)
        if bound is None:
            assert (mine > 0).double().mean() < 0.25 or not len(mine)
        else:
            assert (mine > bound * 1.03).double().mean() <= 0.25 <= (mine >= bound / 1.03).double().mean()


@given(st.lists(st.floats(1e-6, 100), min_size=200, max_size=400, unique=True), st.floats(0.02, 0.4))
def test_a_bound_leaves_its_share_outside(moves, share):
    move_N = torch.tensor(moves, dtype=torch.float64)
    bound = bound_for_share(count_moves(move_N, torch.ones(len(moves), dtype=torch.bool)), share)
    exact = move_N.sort(descending=True).values[min(round(share * len(moves)), len(moves) - 1)]
    nearby = ((move_N / bound).log().abs() < 0.03).double().mean()
    assert abs(float((move_N > bound).double().mean()) - share) <= nearby + 1 / len(moves), exact


def test_ratios_without_a_spread_give_no_bound():
    nothing = count_moves(torch.zeros(10), torch.ones(10, dtype=torch.bool))
    assert bound_for_share(nothing, 0.1) is None
    assert bound_for_share(torch.zeros_like(nothing), 0.1) is None
    region = ObjectiveConfig(trust_region=AUTO).trust_region
    assert next_clip_range(region, torch.stack([nothing, nothing]), (0.1, 0.2)) == (0.1, 0.2)
    moved = count_moves(torch.full((10,), 0.5), torch.ones(10, dtype=torch.bool))
    assert next_clip_range(region, torch.stack([nothing, moved]), None) == pytest.approx((0.03, 0.5), rel=0.03)


@pytest.mark.parametrize(
    ("objective", "train", "sentence"),
    [
        ({"preset": "grpo", "trust_region": {"scale": "length", "low": 0.03}}, {}, "objective.ratio.kind = 'token'"),
        ({"trust_region": {"low": "auto"}}, {}, "set trust_region.scale = length"),
        ({"trust_region": {"scale": "length", "share": 0.1}}, {}, "set low or high = auto, or leave share out"),
        ({"trust_region": {"scale": "length", "low": "auto", "share": 0.5}}, {}, "less than 0.5"),
        ({"trust_region": {"scale": "length", "low": "auto", "share": 0}}, {}, "greater than 0"),
        ({"trust_region": AUTO}, {"minibatches": 1}, "set train.minibatches = 4"),
        ({"preset": "fspo", "ratio": {"kind": "prefix"}}, {}, "objective.trust_region.kind = 'length_clip'"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_range_that_cannot_act_is_refused(objective, train, sentence):
    with pytest.raises(ValueError, match=sentence.replace(".", r"\.")):
        RunConfig.model_validate({"objective": objective, "train": train})


@pytest.mark.parametrize(("low", "effect"), [(3e-4, "hardly anything lies within"), (2.0, "hardly a response reaches it")])
def test_a_range_far_from_usual_is_reported(low, effect):
    with pytest.warns(UserWarning, match=f"trust_region.low = {low:g} with scale = length .*{effect}"):
        ObjectiveConfig(trust_region={**FIXED, "low": low})
