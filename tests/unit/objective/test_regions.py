"""Trust regions and ratios, response by response; bounds that follow a response's length or the last steps' ratios."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.config.objective.choices import Clip, ClipRange
from tepo_megatron.config.objective.section import ObjectiveConfig
from tepo_megatron.core.objective.checking import Step
from tepo_megatron.core.objective.compose import build_objective
from tepo_megatron.core.objective.trust_region import next_clip_range
from tepo_megatron.core.types import bound_for_share, count_moves, sums_outside
from tests.support.objective_batches import make_batch, masks, outputs_of, plain_step, surrogates, whole

RATIOS = [0.5, 0.9, 1.1, 1.5, 4.0] * 2
SIGNS = [1.0] * 5 + [-1.0] * 5
LOGS = [math.log(ratio) for ratio in RATIOS]


@pytest.mark.parametrize(
    ("region", "gradients", "low", "high"),
    [
        (
            {"kind": "clip", "low": 0.2, "high": 0.3},
            [0.5, 0.9, 1.1, 0, 0, 0, -0.9, -1.1, -1.5, -4],
            [0] * 5 + [1, 0, 0, 0, 0],
            [0, 0, 0, 1, 1] + [0] * 5,
        ),
        (  # A < 0 and r = 4: bounded by 3 A, without gradient, and counted as clipped above
            {"kind": "clip", "low": 0.2, "high": 0.3, "dual": 3.0},
            [0.5, 0.9, 1.1, 0, 0, 0, -0.9, -1.1, -1.5, 0],
            [0] * 5 + [1, 0, 0, 0, 0],
            [0, 0, 0, 1, 1] + [0] * 4 + [1],
        ),
        (  # every token keeps its gradient
            {"kind": "clip_weight", "low": 0.2, "high": 1.0},
            [0.8, 0.9, 1.1, 1.5, 2, -0.8, -0.9, -1.1, -1.5, -2],
            [1, 0, 0, 0, 0] * 2,
            [0, 0, 0, 0, 1] * 2,
        ),
        (  # δ is bounded on the side that the advantage favours
            {"kind": "log_clip", "low": 0.3, "high": 0.4},
            [0.5, 0.9, 1.1, 0, 0, 0, -0.9, -1.1, -1.5, -4],
            [0] * 5 + [1, 0, 0, 0, 0],
            [0, 0, 0, 1, 1] + [0] * 5,
        ),
    ],
)
def test_bounds_of_a_token(region, gradients, low, high):
    """Their values are those of the presets' formulas."""
    _, slopes, at_low, at_high = surrogates({"trust_region": region}, LOGS, SIGNS)
    assert slopes == pytest.approx(gradients)
    assert (at_low, at_high) == (low, high)


def test_the_band_of_a_sequence_grows_with_the_root_of_its_length():
    """Sums of −1 and 0.05 over four tokens, 0.2 and 0.07 over nine: a width of 0.03 gives ±0.06 and ±0.09."""
    sums, lengths = [-1.0, 0.05, 0.2, 0.07], [4, 4, 9, 9]
    deltas = [total / length for total, length in zip(sums, lengths, strict=True) for _ in range(length)]
    config = {"ratio": {"kind": "sequence", "length_normalized": False}, "trust_region": {"kind": "length_clip", "width": 0.03}}
    gains, slopes, low, high = surrogates(config, deltas, [1.0, 1.0, 1.0, 1.0], lengths=lengths)
    expected = [math.exp(bounded) * length for bounded, length in zip([-0.06, 0.05, 0.09, 0.07], lengths, strict=True)]
    assert gains == pytest.approx(expected)
    assert [slope != 0 for slope in slopes] == [False] * 4 + [True] * 4 + [False] * 9 + [True] * 9
    assert (low, high) == ([4, 0, 0, 0], [0, 0, 9, 0])


def test_a_product_that_overflows_is_clipped_and_has_no_gradient():
    config = {
        "ratio": {"kind": "sequence", "length_normalized": False},
        "trust_region": {"kind": "clip", "scale": "fixed", "low": 0.2, "high": 0.3},
    }
    gains, slopes, _, high = surrogates(config, [500.0] * 4, [1.0, 0.0], lengths=[2, 2])
    assert gains == pytest.approx([2 * 1.3, 0.0])
    assert slopes == [0.0] * 4
    assert high[0] == 2


def test_a_token_counts_until_its_probability_has_moved_too_far():
    """p_old = 0.5: p = 0.75 and 0.25 are beyond 0.2, and count only where A pulls them back. Their binary KL is 0.1438410, that
    of 0.6 is 0.0204110.
    """
    old = torch.full((6,), 0.5, dtype=torch.float64).log()
    deltas = [math.log(p / 0.5) for p in (0.75, 0.25, 0.75, 0.25, 0.6, 0.75)]
    signs = [1.0, 1.0, -1.0, -1.0, 1.0, 0.0]
    for region, gradients, at_high in (
        ({"measure": "tv", "threshold": 0.2, "cap": 1.3}, [0, 0.5, -1.3, 0, 1.2, 0], [1, 0, 0, 0, 0, 0]),
        ({"measure": "kl", "threshold": 0.0204}, [0, 0.5, -1.5, 0, 0, 0], [1, 0, 0, 0, 1, 0]),
        ({"measure": "kl", "threshold": 0.1438}, [0, 0.5, -1.5, 0, 1.2, 0], [1, 0, 0, 0, 0, 0]),
        ({"measure": "kl", "threshold": 0.1439}, [1.5, 0.5, -1.5, -0.5, 1.2, 0], [0, 0, 0, 0, 0, 0]),
    ):
        _, slopes, _, high = surrogates({"trust_region": {"kind": "divergence", **region}}, deltas, signs, old=old)
        assert slopes == pytest.approx(gradients)
        assert high == at_high


@given(
    st.lists(st.floats(-20, 20), min_size=1, max_size=9),
    st.just(0.0) | st.floats(-10, 10),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_the_power_mean_is_that_of_plain_arithmetic(deltas, p, dtype):
    """Its gradient is the share of each token in the sum of powers. The last value is outside the mask, and not read."""
    old, delta = torch.full((len(deltas) + 1,), -2.0, dtype=dtype), torch.tensor([*deltas, 1e6], dtype=dtype)
    logprob = (old + delta).requires_grad_()
    batch, scores = plain_step([len(old)], [1.0], logprob, old)
    batch.loss_mask_T[-1] = False
    config = {"preset": "kl_cov", "kl_cov": None, "ratio": {"kind": "power_mean", "p": p}}
    (output,) = outputs_of(config, batch, scores)
    exact = (logprob - old).detach()[:-1].double()
    if abs(p) < 1e-3:  # where the textbook's formula has no digits left, the next term of the series at p = 0
        expected = exact.mean() + p / 2 * exact.var(correction=0)
    else:
        expected = (torch.logsumexp(p * exact, 0) - math.log(len(exact))) / p
    loose = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-7, "atol": 1e-2 * min(abs(p), 1e-3) + 1e-9}
    log = output.token_values["ratio"][0].double().log()
    torch.testing.assert_close(log, expected, **loose)
    gradient = torch.autograd.grad(-output.numerator, logprob)[0].double()
    shares = torch.softmax(p * exact, 0) * log.exp() * len(deltas)
    torch.testing.assert_close(gradient[:-1], shares, rtol=1e-4, atol=1e-6 * float(shares.max() + 1))
    assert gradient[-1] == 0


@given(masks(), st.integers(0, 99), st.sampled_from([1e-4, 2e-3, 0.3]))
def test_tepo_without_its_mask_is_luspo_with_another_denominator(rows, seed, spread):
    """With one range: Σ_i T_i · TEPO = S · LUSPO, in value and gradient."""
    batch, scores = make_batch(rows, seed=seed, spread=spread)
    region = {"scale": "fixed", "low": 2e-3, "high": 2.5e-3}
    tepo = whole(build_objective(ObjectiveConfig(preset="tepo", kl_mask=None, trust_region=region)), batch, scores)
    luspo = whole(build_objective(ObjectiveConfig(preset="luspo")), batch, scores)
    sequences = sum(any(row) for row in rows)
    torch.testing.assert_close(tepo[0] * batch.loss_mask_T.sum(), luspo[0] * sequences, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(tepo[1][0] * batch.loss_mask_T.sum(), luspo[1][0] * sequences, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["prefix", "sequence", "sequence_token"])
def test_the_product_of_many_ratios_leaves_the_loss_finite(kind):
    """In fp32, with the gradient of the other response as in fp64."""
    lengths, gradients = [9000, 3], []
    for dtype in (torch.float32, torch.float64):
        old = torch.full((sum(lengths),), -2.0, dtype=dtype)
        logprob = (old + torch.tensor([0.02, 0.01]).repeat_interleave(torch.tensor(lengths))).to(dtype).requires_grad_()
        config = {"preset": "dapo", "ratio": {"kind": kind, "length_normalized": False}}
        loss = sum(output.numerator for output in outputs_of(config, *plain_step(lengths, [-1.0, 1.0], logprob, old)))
        assert loss.isfinite()
        gradients.append(torch.autograd.grad(loss, logprob)[0][-3:].double())
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


@given(st.floats(-200, -61), st.floats(-1, 1))
def test_an_estimate_beyond_its_bound_pulls_no_token(distance, delta):
    """The teacher's, far above the policy: half of the true gradient, which almost cancels, would be e^60."""
    old = torch.full((2,), -200.0)
    logprob = (old + delta).requires_grad_()
    batch, scores = plain_step([2], [0.0], logprob, old)
    batch = batch.with_(teacher_logprobs_T=logprob.detach() - torch.tensor([distance, 0.0]))
    (output,) = outputs_of({"preset": "grpo", "distill": {"coefficient": 0.5}}, batch, scores)
    assert torch.autograd.grad(output.numerator, logprob)[0].abs().max() < 1


def _objective(ratio, **overrides):
    return build_objective(ObjectiveConfig(preset="tepo_markov", ratio=ratio, **overrides))


@given(
    masks(),
    st.integers(0, 99),
    st.sampled_from([1e-4, 0.2]),
    st.sampled_from([{}, {"rejection": {"level": "token", "low": 0.97, "high": 1.02}}, {"m2po": {"threshold": 1e-3}}]),
)
def test_token_form_and_sequence_form_have_the_same_gradient(rows, seed, spread, token_mask):
    """One advantage per sequence, token-level aggregation, also under the clip and a token mask."""
    batch, scores = make_batch(rows, seed=seed, spread=spread)
    token_form = whole(_objective({"kind": "sequence_token"}, **token_mask), batch, scores)
    sequence_form = whole(_objective({"kind": "sequence"}, **token_mask), batch, scores)
    torch.testing.assert_close(token_form[0], sequence_form[0], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(token_form[1], sequence_form[1], rtol=1e-9, atol=1e-14)


def test_a_token_weight_tells_the_forms_apart():
    """A dropped token gets no gradient in the token form; in the sequence form all tokens share what is left."""
    batch, scores = make_batch([[True] * 4, [True] * 4], groups=[0, 0], spread=1e-4)
    sampler = batch.old_logprobs_T.clone()
    sampler[2] -= 5.0  # π_old / π_sampler = e⁵, outside IcePop's range
    batch = batch.with_(sampler_logprobs_T=sampler)
    mismatch = {"kind": "mask"}
    token_form = whole(_objective({"kind": "sequence_token"}, mismatch=mismatch), batch, scores)[1][0]
    sequence_form = whole(_objective({"kind": "sequence"}, mismatch=mismatch), batch, scores)[1][0]
    assert token_form[2] == 0
    assert sequence_form[2] != 0
    torch.testing.assert_close(token_form[:4].sum(), sequence_form[:4].sum(), rtol=1e-3, atol=0)
    torch.testing.assert_close(sequence_form[:4], (token_form[:4].sum() / 4).expand(4), rtol=1e-3, atol=0)


AUTO = {"kind": "clip", "scale": "length", "low": "auto", "high": "auto"}
FIXED = {"kind": "clip", "scale": "length", "low": 0.4, "high": 0.5}
SEQUENCE_RATIOS = st.sampled_from(
    [{"kind": kind, "length_normalized": mean} for kind in ("sequence", "sequence_token", "prefix") for mean in (True, False)]
)


CLIPS = st.sampled_from(
    [
        (FIXED, None),
        (FIXED, ClipRange(0.1, 0.2, 0.3, -0.2, 2.5)),  # from a checkpoint of a run with auto bounds
        (AUTO, ClipRange()),
        (AUTO, ClipRange(0.4, 0.5, 0.3, -0.2, 2.5)),
        (AUTO, ClipRange(0.4, None, -1.0, 0.0, 1.5)),
        ({**AUTO, "low": 0.4}, ClipRange(0.1, 0.5, 0.3, 0.7, 3.0)),
    ]
)


def dense(config, batch, scores, advantages, clip_range=None):
    """The surrogate's loss, sequence by sequence in loops, and (move, A, 1024 log₂ n) of every response token."""
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
            low, high = config.trust_region.bounds(clip_range)
            _, _, *measured, log2_length = clip_range or ClipRange()
            region = config.trust_region
            slopes = [slope if bound == "auto" else 0 for bound, slope in zip((region.low, region.high), measured, strict=True)]
            low_factor, high_factor = (factor * (len(part) / 2**log2_length) ** slope for slope in slopes)
            bounded = log.clamp(-low * low_factor, high * high_factor)
            total = total + torch.minimum(log.exp() * advantage, bounded.exp() * advantage)
            move = float(log.detach()) / (low_factor if advantage < 0 else high_factor)
            moves.append((move, float(advantage), round(1024 * math.log2(len(part)))))
            tokens += 1
    return -total / tokens, moves


@given(rows=masks(), ratio=SEQUENCE_RATIOS, seed=st.integers(0, 99), spread=st.sampled_from([0.01, 0.5]), clip=CLIPS)
def test_the_bounds_follow_the_length(rows, ratio, seed, spread, clip):
    batch, scores = make_batch(rows, seed=seed, spread=spread)
    region, clip_range = clip
    config = ObjectiveConfig.model_validate({"ratio": ratio, "trust_region": region, "kl_mask": None})
    objective = build_objective(config)
    batch, _ = ready = Step(batch, scores).with_advantages(objective)
    output = ready.output(objective, objective.prepare(batch, clip_range=clip_range))
    expected, _ = dense(config, batch, scores, batch.advantages_S, clip_range)
    loss = output.numerator / output.denominator
    torch.testing.assert_close(loss, expected.to(loss.dtype), rtol=1e-9, atol=1e-12)
    ours = torch.autograd.grad(loss, scores.logprob)[0]
    torch.testing.assert_close(ours, torch.autograd.grad(expected, scores.logprob)[0], rtol=1e-9, atol=1e-12)
    if isinstance(region := config.trust_region, Clip) and region.is_auto:
        measured = region.of_auto_sides(clip_range)
        figures = [*region.bounds(clip_range), *measured[2:4], 2**measured.log2_length]
        names = ("bound_low", "bound_high", "slope_low", "slope_high", "length")
        sums = [output.metrics[f"clip/{name}"] for name in names]
        assert [float(total / count) for total, count in sums] == pytest.approx(figures)


@given(rows=masks(min_sequences=3), ratio=SEQUENCE_RATIOS, seed=st.integers(0, 99), cut=st.integers(1, 2), clip=CLIPS)
def test_moves_are_counted_alike_over_every_cut_and_give_the_quantile(rows, ratio, seed, cut, clip):
    batch, scores = make_batch(rows, seed=seed, spread=0.3)
    region, clip_range = clip
    config = ObjectiveConfig.model_validate({"ratio": ratio, "trust_region": region, "kl_mask": None})
    objective = build_objective(config)
    batch, _ = ready = Step(batch, scores).with_advantages(objective)
    context = objective.prepare(batch, clip_range=clip_range)
    whole = ready.output(objective, context).moves
    parts = [range(cut), range(cut, batch.num_sequences)]
    cuts = [ready.pick(part).output(objective, context).moves for part in parts]
    assert torch.equal(torch.stack(cuts).sum(0), whole)
    _, moves = dense(config, batch, scores, batch.advantages_S, clip_range)
    for row, sign in enumerate((-1, 1)):
        mine = torch.tensor([move * sign for move, advantage, _ in moves if advantage * sign > 0], dtype=torch.float64)
        lengths = [length for _, advantage, length in moves if advantage * sign > 0]
        assert whole[row].sum(1).tolist() == [len(mine), sum(lengths), sum(length**2 for length in lengths)]
        bound = bound_for_share(whole[row], 0.25)
        if bound is None:
            assert (mine > 0).double().mean() < 0.25 or not len(mine)
        else:
            assert (mine > bound * 1.03).double().mean() <= 0.25 <= (mine >= bound / 1.03).double().mean()
            assert sums_outside(whole[row], bound)[0] == pytest.approx(0.25 * len(mine))


def test_ratios_without_a_spread_give_no_bound():
    nothing = count_moves(torch.zeros(10), torch.ones(10, dtype=torch.bool))
    moved = count_moves(torch.full((10,), 0.5), torch.ones(10, dtype=torch.bool))
    assert bound_for_share(nothing, 0.1) is None
    assert bound_for_share(torch.zeros_like(nothing), 0.1) is None
    region = Clip(**AUTO)
    current = ClipRange(0.1, 0.2, 0.3, 0.4)
    assert next_clip_range(region, torch.stack([nothing, nothing]), current) == current
    one_sided = next_clip_range(region, torch.stack([nothing, moved]), None)
    high = one_sided.high
    assert high == pytest.approx(0.5, rel=0.03)
    assert one_sided == ClipRange(None, high)
    assert region.bounds(one_sided) == (0.03, high)
    assert next_clip_range(region, torch.stack([moved, nothing]), one_sided) == ClipRange(high, high)


@pytest.mark.parametrize("side", [0, 1])
def test_a_fixed_bound_may_stand_beside_an_automatic_one_and_a_rare_share_moves_it_by_a_limit(side):
    moved = count_moves(torch.full((10,), 0.5), torch.ones(10, dtype=torch.bool))
    fixed, other = ("low", "high") if side == 0 else ("high", "low")
    region = Clip(**{**AUTO, fixed: 0.0, "share": 1e-4})
    # the second one from a checkpoint of two automatic bounds
    for current in (ClipRange(**{other: 0.1}), ClipRange(0.1, 0.1, 0.2, 0.2)):
        after = next_clip_range(region, torch.stack([moved, moved]), current)
        assert after[side] is None
        assert after[2 + side] == 0
        assert region.bounds(after)[side] == 0
        assert region.bounds(after)[1 - side] == pytest.approx(0.1 * math.exp(2.5))


@given(start=st.floats(1e-3, 1.0), scale=st.floats(1e-3, 1.0), seed=st.integers(0, 99))
def test_a_step_moves_a_bound_by_what_is_outside(start, scale, seed):
    moves = scale * torch.randn(50, generator=torch.Generator().manual_seed(seed)).abs()
    counts = count_moves(moves, torch.ones(50, dtype=torch.bool))
    region = Clip(**AUTO)
    low, high, *_ = next_clip_range(region, torch.stack([counts, counts]), ClipRange(start, start))
    least, most = (float((moves > start * edge).double().mean()) for edge in (1.03, 1 / 1.03))
    assert low == high
    assert 0.25 * (least / 0.1 - 1) - 1e-9 <= math.log(low / start) <= 0.25 * (most / 0.1 - 1) + 1e-9


def test_over_steps_of_few_responses_the_wanted_share_is_outside():
    """A step has 16 responses of 50 tokens, and a scale of its own that also grows, as with gradients of few groups."""
    generator = torch.Generator().manual_seed(0)
    region = Clip(**AUTO)
    shares, of_quantiles, quantile = [], [], math.inf
    current: ClipRange | None = None
    for step in range(200):
        scale = 0.02 * math.exp(0.01 * step + 0.5 * float(torch.randn((), generator=generator)))
        moves = scale * torch.randn(16, generator=generator).abs()
        counts = 50 * count_moves(moves, torch.ones(16, dtype=torch.bool))
        if step > 1:
            shares.append(float((moves > current.high).double().mean()))
            of_quantiles.append(float((moves > quantile).double().mean()))
        current = next_clip_range(region, torch.stack([counts, counts]), current)
        quantile = bound_for_share(counts, 0.1)
    mean, mean_of_quantiles = (sum(values) / len(values) for values in (shares, of_quantiles))
    assert mean == pytest.approx(0.1, abs=0.015)
    assert mean_of_quantiles > 0.15


LENGTHS = [1, 2, 8, 64, 1024]


@given(
    responses=st.lists(st.tuples(st.sampled_from(LENGTHS), st.sampled_from([0.0, 0.5, 2.0])), min_size=5, max_size=20),
    slope=st.floats(-0.8, 0.8),
    log2_length=st.floats(0, 12),
)
def test_a_step_turns_a_bound_about_the_mean_length(responses, slope, log2_length):
    """Tokens of 0, half of the bound or twice the bound; the others have A > 0, and one length."""
    log2, moves = (torch.tensor(values) for values in zip(*[(math.log2(n), 0.3 * move) for n, move in responses], strict=True))
    where_T = torch.ones(len(moves), dtype=torch.bool)
    counts = torch.stack([count_moves(moves, where_T, log2), count_moves(torch.zeros(3), where_T[:3], torch.full((3,), 5.0))])
    before = ClipRange(0.3, 0.1, slope, 0.2, log2_length)
    after = next_clip_range(Clip(**AUTO), counts, before)

    ratio = (moves > 0.3).double() / 0.1
    if (moves > 0).double().mean() < 0.1:
        ratio[:] = 1  # nothing is learned
    mean = float(log2.double().mean())
    spread = float((log2.double() ** 2).mean()) - mean**2 + 0.25**2
    line = (float((log2 * ratio).mean()) - mean * float(ratio.mean())) / spread / math.log(2)
    turned = max(-2.0, min(2.0, slope + max(-0.1, min(0.1, 0.1 * line))))
    assert after.low_slope == pytest.approx(turned)
    for n in LENGTHS:
        x = math.log2(n)
        log = math.log(0.3) + slope * (x - log2_length) * math.log(2)
        log += min(0.25 * (float(ratio.mean()) - 1), 2.5) + (turned - slope) * (x - mean) * math.log(2)
        assert math.log(after.low) + after.low_slope * (x - after.log2_length) * math.log(2) == pytest.approx(log, abs=1e-9)
        kept = math.log(0.1) + 0.2 * (x - log2_length) * math.log(2)
        assert math.log(after.high) + 0.2 * (x - after.log2_length) * math.log(2) == pytest.approx(kept, abs=1e-9)
    assert after.log2_length == pytest.approx((float(log2.sum()) + 15) / (len(moves) + 3))


@pytest.mark.parametrize("power", [-0.25, 0.0, 0.4])
def test_over_steps_no_length_has_more_outside_than_another(power):
    """Moves grow by the length: a step has 64 responses of 8 to 512 tokens, whose tokens move alike if ``power`` is 0."""
    generator = torch.Generator().manual_seed(0)
    region, current = Clip(**AUTO), ClipRange(0.03, 0.03)
    outside, ranges = [], []
    for _ in range(250):
        log2 = 3 + 6 * torch.rand(64, generator=generator).double()
        moves = 0.02 * (power * log2).exp2() * torch.randn(64, generator=generator).abs()
        moves = moves / (current.high_slope * (log2 - current.log2_length)).exp2()
        counts = count_moves(moves, torch.ones(64, dtype=torch.bool), log2)
        outside.append((moves > current.high).double() * torch.stack([log2 < 6, log2 >= 6]))
        current = next_clip_range(region, torch.stack([counts, counts]), current)
        ranges.append(current)
    shares = torch.stack(outside[50:]).sum((0, 2)) / 32 / 200
    assert shares.tolist() == pytest.approx([0.1, 0.1], abs=0.02)
    slopes = torch.tensor([clip_range.high_slope for clip_range in ranges[50:]])
    assert float(slopes.mean()) == pytest.approx(power, abs=0.04)
    assert float(slopes.std()) < 0.1
    assert all(clip_range[0] == clip_range[1] and clip_range[2] == clip_range[3] for clip_range in ranges)


def test_equal_lengths_do_not_turn_a_bound_and_a_turn_has_limits():
    region, where_T = Clip(**AUTO), torch.ones(10, dtype=torch.bool)
    moves = torch.tensor([0.5] * 5 + [0.1] * 5)
    counts = count_moves(moves, where_T, torch.full((10,), 6.0))
    assert next_clip_range(region, torch.stack([counts, counts]), ClipRange(0.2, 0.2)).high_slope == 0
    counts = count_moves(moves, where_T, torch.tensor([8.0] * 5 + [3.0] * 5))
    current = ClipRange(0.2, 0.2)
    slopes = []
    for _ in range(30):
        current = next_clip_range(region, torch.stack([counts, counts]), ClipRange(0.2, 0.2, *current[2:]))
        slopes.append(current.high_slope)
    assert slopes == pytest.approx([min(0.1 * step, 2.0) for step in range(1, 31)])


@pytest.mark.parametrize("start", [1e-12, 1e6])
def test_a_bound_outside_of_what_is_counted_comes_back(start):
    moves = 0.1 * torch.randn(50, generator=torch.Generator().manual_seed(0)).abs()
    counts = count_moves(moves, torch.ones(50, dtype=torch.bool))
    current = ClipRange(start, start)
    for _ in range(100):
        current = next_clip_range(Clip(**AUTO), torch.stack([counts, counts]), current)
    assert float((moves > current.high).double().mean()) == pytest.approx(0.1, abs=0.03)
