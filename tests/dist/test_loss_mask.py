"""Responses of several turns: loss and gradients come of the tokens that the model wrote, an environment's are context.

Compared with a dense reference in float64, whose loss mask is made from the turns and not from the packed batch, on one rank
and on two.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from tepo_megatron.config.objective.section import ObjectiveConfig
from tepo_megatron.core.objective.compose import Objective
from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tests.support.engines import Split, Worlds, assert_first_moments, make_engine, save_checkpoint
from tests.support.random_models import VOCABULARY, write_llama

TURNS = [[-2, 3, -4, 2], [5], [1, -7, 1, -1, 6], [4, -9, 2], [2, -1, 2, -1, 2], [-12, 1], [9, -2, 3], [3]]
"""Tokens of each turn of each response; the environment's are negative."""

SPLITS = [Split(), Split(dp=2), Split(tp=2, sp=True), Split(cp=2)]


MASKS = [np.concatenate([np.full(abs(size), size > 0) for size in turns]) for turns in TURNS]
"""Of each response, which tokens the model wrote."""


def rollouts() -> list[Rollout]:
    generator = np.random.default_rng(5)
    made = []
    for number, mask in enumerate(MASKS):
        ids = generator.integers(1, VOCABULARY, 2 + mask.size)
        logprobs, version = np.where(mask, -1.0, 0.0), WeightsVersion(0)
        rated: dict[str, Any] = {"reward": float(number % 3 == 1), "reward_parts": {f"of_source_{number % 2}": 1.0}}
        made.append(Rollout("p", 0, ids[:2], ids[2:], logprobs, "stop", version, **rated, loss_mask=mask))
    return made


def train(split: Split, folder: Path) -> dict[str, Any]:
    engine = make_engine(
        {
            "model": {"path": str(folder / "model")},
            "engine": {"parallel": split.parallel, "micro_batch_tokens": 50},
            "optimizer": {"lr": 1e-3, "clip_grad": 0.0, "warmup_steps": 0},
            "rollout": {"sampling": {"temperature": 1.0}},
        },
        Objective(ObjectiveConfig()),  # one's own, which may read components of rewards
    )
    is_root = engine.ranks.rank == 0
    with pytest.raises(ValueError, match="has no reward"):  # on every rank
        engine.batch_from_root([replace(rollout, reward=None) for rollout in rollouts()] if is_root else None)
    with patch.object(Objective, "advantages", autospec=True, side_effect=Objective.advantages) as asked:
        batch = engine.score(engine.batch_from_root(rollouts() if is_root else None))
    assert asked.call_count == is_root, "ranks that each compute advantages may round them differently"
    result = engine.update(batch)
    save_checkpoint(engine, folder / split.name, step=1, state={})
    entropy = result.sums["entropy/mean"]
    return {"logprobs": batch.old_logprobs_T, "norm": result.grad_norm, "entropy": entropy[0] / entropy[1]}


def reference(model: Path) -> tuple[torch.Tensor, dict[str, torch.Tensor], float]:
    """Log-probs of the model's tokens of all responses, gradients, and the mean entropy at these tokens."""
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    sampled = rollouts()
    rewards = torch.tensor([each.reward for each in sampled], dtype=torch.float64)
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    logprobs, losses, entropies = [], [], []
    for rollout, advantage, mask in zip(sampled, advantages, MASKS, strict=True):
        ids = torch.tensor([*rollout.prompt_ids, *rollout.response_ids])
        places = 2 + torch.from_numpy(mask).nonzero()[:, 0]
        logprobs_TV = oracle(ids[None]).logits[0].log_softmax(-1)[places - 1]
        logprobs.append(logprobs_TV.gather(1, ids[places, None])[:, 0])
        losses.append(-advantage * logprobs[-1])
        entropies.append(-(logprobs_TV.exp() * logprobs_TV).sum(-1).detach())
    torch.cat(losses).mean().backward()
    gradients = {name: param.grad for name, param in oracle.named_parameters() if param.grad is not None}
    return torch.cat(logprobs).detach(), gradients, float(torch.cat(entropies).mean())


def test_loss_and_gradients_come_of_the_models_tokens_alone(tmp_path: Path) -> None:
    write_llama(tmp_path / "model", spike=1.0, model_type="llama")
    logprobs, gradients, entropy = reference(tmp_path / "model")
    norm = float(torch.stack([each.norm() for each in gradients.values()]).norm())
    worlds = Worlds(tmp_path, SPLITS, train)
    is_own_T = torch.from_numpy(np.concatenate([[False, *mask, False] for mask in MASKS]))  # at the token before
    for split in SPLITS:
        report = worlds.report(split)
        torch.testing.assert_close(report["logprobs"][is_own_T].double(), logprobs, atol=2e-5, rtol=0)
        assert report["norm"] == pytest.approx(norm, rel=1e-4)
        assert report["entropy"] == pytest.approx(entropy, rel=1e-5)
        assert_first_moments(worlds.checkpoint(split), gradients, norm=norm)
