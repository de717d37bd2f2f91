"""What is left out (rejection, OPSM, M2PO), and weights for a sampler: by the names of peers, of decoupled PPO, and of FP8."""

from functools import partial
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tepo_megatron.config.objective.choices import BuiltinRatio
from tepo_megatron.config.objective.presets import CORRECTIONS
from tepo_megatron.config.objective.section import ObjectiveConfig
from tepo_megatron.core.objective.checking import Step
from tepo_megatron.core.objective.compose import build_objective
from tests.support import own_kinds
from tests.support.objective_batches import doubles, outputs_of, plain_step, surrogates

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


@pytest.mark.parametrize("region", [{"kind": "none"}, {"kind": "clip_weight"}, {"kind": "band", "low": 9.0, "high": 9.0}])
@pytest.mark.parametrize("ratio", [kind.kind_name() for kind in get_args(BuiltinRatio)])
def test_chosen_tokens_alone_lose_their_gradient(ratio, region):
    """Also of a ratio that a response's tokens share, of a region that reads log π, and of one of the user's own."""
    plugins = [own_kinds.__file__] if region["kind"] == "band" else []
    shape = {"kind": ratio, "p": 2.0} if ratio == "power_mean" else {"kind": ratio}
    config = {"plugins": plugins, "ratio": shape, "trust_region": region}
    deltas, sampler = [0.1, -0.2, 0.3, 0.2], doubles(-2.0, -5.0, -2.0, -2.0)  # the second token is out of any range
    _, slopes, *_ = surrogates(config, deltas, [1.0, -1.0], lengths=[3, 1], sampler=sampler)
    for mask in ({"rejection": {"level": "token", "low": 0.5, "high": 2.0}}, {"m2po": {"threshold": 0.04}}):
        _, masked, *_ = surrogates({**config, **mask}, deltas, [1.0, -1.0], lengths=[3, 1], sampler=sampler)
        assert masked == pytest.approx([slopes[0], 0, *slopes[2:]])
        assert all(slopes)


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
    objective = build_objective(ObjectiveConfig(preset="kl_cov"))
    output = Step(batch, scores).pick([0]).output(objective, objective.prepare(batch))
    assert output.metrics["mask/fraction"][0] == 0


def test_of_equal_covariances_labels_are_chosen_until_the_fraction_is_full():
    """Of 1,000 certain tokens, two of each label; two more have a higher covariance, and all others a lower one."""
    old = torch.cat([torch.tensor([-3.0, -3.0]), torch.zeros(1000), torch.full((1000,), -0.1)])
    advantages = torch.cat([torch.full((2,), -1.0), torch.ones(1000), torch.full((1000,), -0.01)])
    batch, scores = plain_step([1] * 2002, advantages, old, old, labels=torch.arange(2002) // 2)
    objective = build_objective(ObjectiveConfig(preset="kl_cov", kl_cov={"fraction": 0.05}))
    masked_T = Step(batch, scores).output(objective).token_values["masked"].bool()
    assert masked_T[:2].all()
    assert 100 <= masked_T.sum() <= 101
    assert not masked_T[1002:].any()


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
    models = {"old": proximal, "sampler": behaviour, "teacher": _policy([0.3, -0.2, 0.1, 0.0])}
    return doubles(*surrogates({"preset": "decoupled_ppo", **config}, delta, ADVANTAGES, **models)[1])


def _policy(logits):
    return torch.log_softmax(torch.tensor(logits, dtype=torch.float64), 0)


@pytest.mark.parametrize("terms", [{}, {"distill": {"of": "sampled"}}, {"kl": {"against": "teacher", "weight": "importance"}}])
@given(behaviour=LOGITS, proximal=LOGITS, current=LOGITS)
def test_stale_samples_give_what_fresh_ones_would(terms, behaviour, proximal, current):
    """The mean over actions of the behaviour policy is that of PPO over actions of the proximal policy, clip and all."""
    behaviour, proximal, current = (_policy(logits) for logits in (behaviour, proximal, current))
    decoupled = _gradients({"mismatch": {"low": 0.0, "high": 20.0}, **terms}, behaviour, proximal, current)
    fresh = _gradients({"mismatch": None, **terms}, proximal, proximal, current)
    torch.testing.assert_close(behaviour.exp() * decoupled, proximal.exp() * fresh)


V, HIDDEN, PROMPTS = 6, 12, 2
HEAD_SCALE = 1.5


def rounded_to_fp8(weight: Tensor) -> Tensor:
    scale = weight.abs().amax() / 448
    return (weight / scale).to(torch.float8_e4m3fn).double() * scale


class World:
    """Every response to every prompt. ``states`` [sequences, length, hidden] are what the head sees."""

    def __init__(self, length: int, seed: int) -> None:
        draw = partial(torch.randn, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        self.tokens = torch.cartesian_prod(*[torch.arange(V)] * length).view(-1, length).repeat(PROMPTS, 1)
        prompt_states, token_states = draw(PROMPTS, HIDDEN), draw(V, HIDDEN)
        before = torch.cat([prompt_states.repeat_interleave(V**length, 0)[:, None], token_states[self.tokens[:, :-1]]], 1)
        self.states, self.rewards, self.head = before.cumsum(1), draw(len(self.tokens)), HEAD_SCALE * draw(V, HIDDEN)

    def logprobs(self, head: Tensor) -> Tensor:
        """[sequences, length]."""
        return (self.states @ head.t()).log_softmax(-1).gather(-1, self.tokens[..., None])[..., 0]

    def gradient(self, preset: str, mismatch: dict[str, Any] | None, sampler: Tensor) -> Tensor:
        """The objective's gradient with respect to the trainer's head, over responses that ``sampler`` draws.

        Advantages are the reward minus its mean for each prompt. They are multiplied by the response's probability: the
        surrogate is linear in them.
        """
        head, drawn = self.head.clone().requires_grad_(), self.logprobs(sampler)
        new = self.logprobs(head)
        old = new.detach()
        probabilities, rewards = old.sum(1).exp().view(PROMPTS, -1), self.rewards.view(PROMPTS, -1)
        advantages = (rewards - (probabilities * rewards).sum(1, keepdim=True)).view(-1) * drawn.sum(1).exp()
        lengths = [self.tokens.shape[1]] * len(self.tokens)
        step = Step(*plain_step(lengths, advantages, new.view(-1), old.view(-1), sampler=drawn.view(-1)))
        output = step.output(build_objective(ObjectiveConfig.model_validate({"preset": preset, "mismatch": mismatch})))
        return torch.autograd.grad(output.numerator, head)[0]

    def bias(self, preset: str, mismatch: dict[str, Any] | None) -> float:
        """The distance from the gradient under the trainer's own samples, as a share of its length."""
        exact = self.gradient(preset, None, self.head)
        return float((self.gradient(preset, mismatch, rounded_to_fp8(self.head)) - exact).norm() / exact.norm())


def truncate(level: str, cap: float) -> dict[str, Any]:
    return {"kind": "truncate", "level": level, "cap": cap}


@pytest.mark.parametrize("preset", ["tepo", "grpo"])
@pytest.mark.parametrize(("length", "level", "seed"), [(1, "token", 0), (1, "token", 4), (2, "sequence", 2)])
@pytest.mark.parametrize("cap", [2.0, 1.2])
def test_truncated_weights_take_most_of_the_bias_back(preset: str, length: int, level: str, seed: int, cap: float) -> None:
    """At the default cap, and at one that cuts some weights of these small worlds off. Without a bound they take all back."""
    world = World(length, seed)
    weights = (world.logprobs(world.head) - world.logprobs(rounded_to_fp8(world.head))).sum(1).exp()
    assert 1.2 < weights.max() < 2.0
    uncorrected = world.bias(preset, None)
    assert uncorrected > 0.05
    assert world.bias(preset, truncate(level, cap)) <= 0.25 * uncorrected
    assert world.bias(preset, truncate(level, 1e9)) < 1e-10


def test_weights_of_tokens_leave_what_the_tokens_before_them_contribute() -> None:
    """Each token is weighed given its beginning, which the sampler draws more or less often than the trainer would."""
    assert World(2, 2).bias("tepo", truncate("token", 1e9)) > 1e-3
