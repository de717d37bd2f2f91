"""What an FP8 sampler does to the gradient, and what the mismatch correction takes back: exactly, by enumeration.

The trainer's policy is softmax(W h) over V tokens; h depends on the prompt and on the tokens before. The sampler has W rounded
to e4m3 with one scale, as vLLM's fp8_per_tensor keeps it. All responses of one length are listed, and each one's share of the
loss weighs as much as the sampler draws it, so there is no sampling noise: what differs from the gradient under the trainer's
own probabilities is bias.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tepo_megatron.config import ObjectiveConfig
from tepo_megatron.core.objective.compose import build_objective
from tepo_megatron.core.types import Batch, TokenScores

V, HIDDEN, PROMPTS = 6, 12, 2
HEAD_SCALE = 1.5


def rounded_to_fp8(weight: Tensor) -> Tensor:
    scale = weight.abs().amax() / 448
    return (weight / scale).to(torch.float8_e4m3fn).double() * scale


@dataclass
class World:
    """Every response to every prompt. ``states`` [sequences, length, hidden] are what the head sees."""

    tokens: Tensor
    states: Tensor
    rewards: Tensor
    head: Tensor

    def logprobs(self, head: Tensor) -> Tensor:
        """[sequences, length]."""
        return (self.states @ head.t()).log_softmax(-1).gather(-1, self.tokens[..., None])[..., 0]

    def entropies(self, head: Tensor) -> Tensor:
        logits = self.states @ head.t()
        return torch.distributions.Categorical(logits=logits).entropy()

    def advantages(self) -> Tensor:
        """Reward minus its mean under the trainer's policy, for each prompt."""
        probabilities = self.logprobs(self.head).sum(1).exp().view(PROMPTS, -1)
        rewards = self.rewards.view(PROMPTS, -1)
        return (rewards - (probabilities * rewards).sum(1, keepdim=True)).view(-1)


def make_world(length: int, seed: int) -> World:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    responses = torch.cartesian_prod(*[torch.arange(V)] * length).view(-1, length).repeat(PROMPTS, 1)
    prompt_states, token_states = draw(PROMPTS, HIDDEN), draw(V, HIDDEN)
    before = torch.cat([prompt_states.repeat_interleave(V**length, 0)[:, None], token_states[responses[:, :-1]]], 1)
    return World(responses, before.cumsum(1), draw(len(responses)), HEAD_SCALE * draw(V, HIDDEN))


def batch_of(world: World, sampler: Tensor) -> Batch:
    """A prompt of one token and the response, of every sequence, packed: all positions but the last are in the mask."""
    sequences, length = world.tokens.shape

    def spread(values: Tensor) -> Tensor:
        return torch.cat([values, values.new_zeros(sequences, 1)], 1).view(-1)

    prompts = torch.zeros(sequences, 1, dtype=torch.int64)
    return Batch(
        tokens_T=torch.cat([prompts, world.tokens], 1).view(-1),
        labels_T=spread(world.tokens),
        loss_mask_T=spread(torch.ones_like(world.tokens)).bool(),
        cu_seqlens=(length + 1) * torch.arange(sequences + 1, dtype=torch.int32),
        sampler_logprobs_T=spread(world.logprobs(sampler)),
        rewards_S=world.rewards,
        groups_S=torch.arange(PROMPTS).repeat_interleave(V**length),
        advantages_S=world.advantages(),
        old_logprobs_T=spread(world.logprobs(world.head)),
        old_entropy_T=spread(world.entropies(world.head)),
    )


def expected_gradient(world: World, preset: str, mismatch: dict[str, Any] | None, sampler: Tensor) -> Tensor:
    """The objective's gradient with respect to the trainer's head, over responses that ``sampler`` draws."""
    objective = build_objective(ObjectiveConfig.model_validate({"preset": preset, "mismatch": mismatch}))
    batch = batch_of(world, sampler)
    context = objective.prepare(batch)
    head = world.head.clone().requires_grad_()
    logprobs, entropies = world.logprobs(head), world.entropies(head)
    drawn_with = world.logprobs(sampler).sum(1).exp()
    loss = torch.zeros((), dtype=torch.float64)
    for sequence in range(batch.num_sequences):
        scores = TokenScores(*(torch.cat([each[sequence], each.new_zeros(1)]) for each in (logprobs, entropies)))
        loss = loss + drawn_with[sequence] * objective(scores, batch.select([sequence]), context).numerator
    return torch.autograd.grad(loss, head)[0]


def bias(world: World, preset: str, mismatch: dict[str, Any] | None) -> float:
    """The distance from the gradient under the trainer's own samples, as a share of its length."""
    own = expected_gradient(world, preset, None, world.head)
    return float((expected_gradient(world, preset, mismatch, rounded_to_fp8(world.head)) - own).norm() / own.norm())


def policy_gradient(world: World) -> Tensor:
    """∇ of the expected reward, from its definition."""
    head = world.head.clone().requires_grad_()
    probabilities = world.logprobs(head).sum(1).exp()
    return torch.autograd.grad((probabilities * world.rewards).sum(), head)[0]


def truncate(level: str, cap: float) -> dict[str, Any]:
    return {"kind": "truncate", "level": level, "cap": cap}


presets = pytest.mark.parametrize("preset", ["tepo", "grpo"])
worlds = pytest.mark.parametrize(("length", "level", "seed"), [(1, "token", 0), (1, "token", 4), (2, "sequence", 2)])


@presets
@worlds
def test_the_reference_is_the_policy_gradient(preset: str, length: int, level: str, seed: int) -> None:
    """Under the trainer's own samples; up to what the denominator counts."""
    world = make_world(length, seed)
    found, exact = expected_gradient(world, preset, None, world.head), -policy_gradient(world)
    torch.testing.assert_close(found, exact * (found.norm() / exact.norm()), rtol=1e-9, atol=1e-9)


@presets
@worlds
@pytest.mark.parametrize("cap", [2.0, 1.2])
def test_truncated_weights_take_most_of_the_bias_back(preset: str, length: int, level: str, seed: int, cap: float) -> None:
    """At the default cap, and at one that cuts some weights of these small worlds off."""
    world = make_world(length, seed)
    weights = (world.logprobs(world.head) - world.logprobs(rounded_to_fp8(world.head))).sum(1).exp()
    assert 1.2 < weights.max() < 2.0
    uncorrected = bias(world, preset, None)
    assert uncorrected > 0.05
    assert bias(world, preset, truncate(level, cap)) <= 0.25 * uncorrected


@presets
@worlds
def test_weights_without_a_bound_take_all_of_it_back(preset: str, length: int, level: str, seed: int) -> None:
    assert bias(make_world(length, seed), preset, truncate(level, 1e9)) < 1e-10


def test_weights_of_tokens_leave_what_the_tokens_before_them_contribute() -> None:
    """Each token is weighed given its beginning, which the sampler draws more or less often than the trainer would."""
    assert bias(make_world(2, 2), "tepo", truncate("token", 1e9)) > 1e-3
