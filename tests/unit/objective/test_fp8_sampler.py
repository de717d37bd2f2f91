"""What an FP8 sampler does to the gradient, and what the mismatch correction takes back: exactly, by enumeration.

The trainer's policy is softmax(W h) over V tokens; h depends on the prompt and on the tokens before. The sampler has W rounded
to e4m3 with one scale, as vLLM's fp8_per_tensor keeps it. All responses of one length are listed, and each one's share of the
loss weighs as much as the sampler draws it, so there is no sampling noise: what differs from the gradient under the trainer's
own probabilities is bias.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tepo_megatron.config import ObjectiveConfig
from tepo_megatron.core.objective.compose import build_objective
from tepo_megatron.core.types import Batch, TokenScores
from tests.support.objective_batches import plain_step

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

    @classmethod
    def random(cls, length: int, seed: int) -> World:
        generator = torch.Generator().manual_seed(seed)
        draw = partial(torch.randn, generator=generator, dtype=torch.float64)
        responses = torch.cartesian_prod(*[torch.arange(V)] * length).view(-1, length).repeat(PROMPTS, 1)
        prompt_states, token_states = draw(PROMPTS, HIDDEN), draw(V, HIDDEN)
        before = torch.cat([prompt_states.repeat_interleave(V**length, 0)[:, None], token_states[responses[:, :-1]]], 1)
        return cls(responses, before.cumsum(1), draw(len(responses)), HEAD_SCALE * draw(V, HIDDEN))

    def logprobs(self, head: Tensor) -> Tensor:
        """[sequences, length]."""
        return (self.states @ head.t()).log_softmax(-1).gather(-1, self.tokens[..., None])[..., 0]

    def batch(self, sampler: Tensor) -> Batch:
        """The responses of every sequence without prompts, packed; advantages are the reward minus its mean for each prompt."""
        probabilities, rewards = self.logprobs(self.head).sum(1).exp().view(PROMPTS, -1), self.rewards.view(PROMPTS, -1)
        advantages = (rewards - (probabilities * rewards).sum(1, keepdim=True)).view(-1)
        old, drawn = self.logprobs(self.head).view(-1), self.logprobs(sampler).view(-1)
        lengths = [self.tokens.shape[1]] * len(self.tokens)
        return plain_step(lengths, advantages, old, old, sampler=drawn, labels=self.tokens.view(-1))[0]

    def gradient(self, preset: str, mismatch: dict[str, Any] | None, sampler: Tensor) -> Tensor:
        """The objective's gradient with respect to the trainer's head, over responses that ``sampler`` draws."""
        objective = build_objective(ObjectiveConfig.model_validate({"preset": preset, "mismatch": mismatch}))
        batch = self.batch(sampler)
        context = objective.prepare(batch)
        head = self.head.clone().requires_grad_()
        logprobs = self.logprobs(head)
        loss = torch.zeros((), dtype=torch.float64)
        for number, probability in enumerate(self.logprobs(sampler).sum(1).exp()):
            scores = TokenScores(logprobs[number], torch.ones_like(logprobs[number]))
            loss = loss + probability * objective(scores, batch.select([number]), context).numerator
        return torch.autograd.grad(loss, head)[0]

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
    world = World.random(length, seed)
    weights = (world.logprobs(world.head) - world.logprobs(rounded_to_fp8(world.head))).sum(1).exp()
    assert 1.2 < weights.max() < 2.0
    uncorrected = world.bias(preset, None)
    assert uncorrected > 0.05
    assert world.bias(preset, truncate(level, cap)) <= 0.25 * uncorrected
    assert world.bias(preset, truncate(level, 1e9)) < 1e-10


def test_weights_of_tokens_leave_what_the_tokens_before_them_contribute() -> None:
    """Each token is weighed given its beginning, which the sampler draws more or less often than the trainer would."""
    assert World.random(2, 2).bias("tepo", truncate("token", 1e9)) > 1e-3
