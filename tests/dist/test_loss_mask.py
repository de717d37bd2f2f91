"""Responses of several turns: loss and gradients come of the tokens that the model wrote, an environment's are context.

Compared with a dense twin in float64, whose loss mask is made from the turns and not from the packed batch, on one rank and
on two.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tepo_megatron.config import RunConfig
from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tests.support.launch import end_model_parallel, run_dist
from tests.support.model_worlds import assert_first_moments
from tests.support.small_llama import VOCABULARY, write_llama

TURNS = [[-2, 3, -4, 2], [5], [1, -7, 1, -1, 6], [4, -9, 2], [2, -1, 2, -1, 2], [-12, 1], [9, -2, 3], [3]]
"""Tokens of each turn of each response; the environment's are negative."""

SPLITS = [{"dp": 2}, {"tp": 2, "sequence_parallel": True}, {"cp": 2}]


def rollouts() -> list[Rollout]:
    generator = np.random.default_rng(5)
    made = []
    for number, turns in enumerate(TURNS):
        mask = np.concatenate([np.full(abs(size), size > 0) for size in turns])
        ids = generator.integers(1, VOCABULARY, 2 + mask.size)
        logprobs, version = np.where(mask, -1.0, 0.0), WeightsVersion(0)
        made.append(Rollout("p", 0, ids[:2], ids[2:], logprobs, "stop", version, reward=float(number % 3 == 1), loss_mask=mask))
    return made


def train(model: Path, out: Path, parallel: dict[str, Any]) -> dict[str, Any]:

    from tepo_megatron.trainer.megatron.engine import Engine

    config = RunConfig.model_validate(
        {
            "model": {"path": str(model)},
            "engine": {"platform": "cpu", "parallel": parallel, "micro_batch_tokens": 50},
            "optimizer": {"lr": 1e-3, "clip_grad": 0.0, "warmup_steps": 0},
            "rollout": {"sampling": {"temperature": 1.0}},
        }
    )
    engine = Engine(config, model)
    batch = engine.score(engine.batch_from_root(rollouts() if engine.ranks.rank == 0 else None))
    result = engine.update(batch)
    engine.checkpoints.save(out, step=1, state={})
    end_model_parallel()
    entropy = result.sums["entropy/mean"]
    return {"logprobs": batch.old_logprobs_T, "norm": result.grad_norm, "entropy": entropy[0] / entropy[1]}


def train_all(rank: int, world: int, folder: Path, splits: list[dict[str, Any]]) -> list[dict[str, Any]]:
    warnings.filterwarnings("ignore")
    os.environ["WORLD_SIZE"] = str(world)
    return [train(folder / "model", folder / f"out-{world}-{at}", split) for at, split in enumerate(splits)]


def twin(model: Path) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], float]:
    """Log-probs of the model's tokens of each response, gradients, and the mean entropy at these tokens."""
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    sampled = rollouts()
    rewards = torch.tensor([each.reward for each in sampled], dtype=torch.float64)
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    loss, tokens, entropy = torch.zeros((), dtype=torch.float64), 0, 0.0
    found: list[torch.Tensor] = []
    for rollout, advantage, turns in zip(sampled, advantages, TURNS, strict=True):
        ids = torch.tensor([*rollout.prompt_ids, *rollout.response_ids])
        logprobs_TV = oracle(ids[None]).logits[0, :-1].log_softmax(-1)
        at = 2
        own: list[int] = []
        for size in turns:
            own += range(at, at + size)  # nothing of an environment's, whose size is negative
            at += abs(size)
        logprob = torch.stack([logprobs_TV[place - 1, ids[place]] for place in own])
        found.append(logprob.detach())
        loss -= advantage * logprob.sum()
        tokens += len(own)
        entropy -= float((logprobs_TV.exp() * logprobs_TV).sum(-1).detach()[[place - 1 for place in own]].sum())
    (loss / tokens).backward()
    return found, {name: param.grad for name, param in oracle.named_parameters() if param.grad is not None}, entropy / tokens


def test_loss_and_gradients_come_of_the_models_tokens_alone(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    write_llama(tmp_path / "model", spike=1.0, model_type="llama")
    logprobs, gradients, entropy = twin(tmp_path / "model")
    norm = float(torch.stack([each.norm() for each in gradients.values()]).norm())
    runs = {1: run_dist(1, train_all, tmp_path, [{}])[0], 2: run_dist(2, train_all, tmp_path, SPLITS)[0]}
    masks = [
        np.concatenate([[False], each.loss_mask if each.loss_mask is not None else [True] * each.response_ids.size, [False]])
        for each in rollouts()
    ]
    for world, reports in runs.items():
        for at, report in enumerate(reports):
            own = report["logprobs"][torch.from_numpy(np.concatenate(masks))].double()
            torch.testing.assert_close(own, torch.cat(logprobs), atol=2e-5, rtol=0)
            assert report["norm"] == pytest.approx(norm, rel=1e-4)
            assert report["entropy"] == pytest.approx(entropy, rel=1e-5)
            assert_first_moments(tmp_path / f"out-{world}-{at}" / "step_000001", gradients, norm=norm)
