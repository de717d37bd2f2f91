"""Rollout routing replay under every kind of split: with the experts of a record, chosen at random, Megatron computes what
transformers computes with them in float64, forward and backward, also where the forward pass is computed again. In some the
routers have an auxiliary loss too, over the whole mini-batch: the same however ranks and micro-batches cut it.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tepo_megatron.core.rollout import Rollout
from tepo_megatron.core.types import Batch
from tepo_megatron.trainer.packing import pack
from tests.support.engines import Split, Worlds, assert_first_moments, score_with_and_without_replay, short_rollouts
from tests.support.float64 import Oracle, oracle_of
from tests.support.random_models import random_model

LAYERS = 4
EXPERTS = {"Mixtral": (4, 2), "Qwen3Moe": (8, 3)}
"""All, and those that a token passes."""


@dataclass(frozen=True, kw_only=True)
class Routed(Split):
    model: str = "Mixtral"
    recompute: str = "none"
    """With ``moe``, router and experts alone are computed again in the backward pass."""
    aux_loss: float = 0.0


SPLITS = [
    Routed(),
    Routed(model="Qwen3Moe", recompute="full", aux_loss=1.0),
    Routed(pp=2, recompute="full"),
    Routed(cp=2, ep=2, recompute="moe", aux_loss=1.0),
    Routed(model="Qwen3Moe", tp=2, dp=2, ep=4, etp=1, sp=True, recompute="moe", distributed=True, aux_loss=1.0),
    Routed(tp=2, pp=2, vpp=2, sp=True, recompute="full", aux_loss=1.0),
]
NAMED = pytest.mark.parametrize("split", SPLITS, ids=lambda split: split.name)


def rollouts(model: str) -> list[Rollout]:
    """For all tokens but the last, experts that no router had any reason to choose."""
    count, per_token = EXPERTS[model]

    def routes(generator: torch.Generator, tokens: int) -> np.ndarray:
        order = torch.rand(tokens - 1, LAYERS, count, generator=generator).argsort(-1)
        return order[..., :per_token].to(torch.uint8).numpy()

    return short_rollouts(routes=routes, prompt=3)


@cache
def batch_of(model: str) -> Batch:
    return pack(rollouts(model))


@cache
def oracle(folder: Path, replayed: bool, aux_loss: float = 0.0) -> Oracle:
    batch = batch_of(folder.name)
    return oracle_of(folder, batch if replayed else batch.with_(routed_experts_T=None), aux_loss=aux_loss)


def train(split: Routed, folder: Path) -> dict[str, Any]:
    recompute: dict[str, Any] = {"recompute": split.recompute}
    if split.recompute == "moe":
        recompute = {"recompute": "selective", "recompute_modules": ["moe"]}
    config: dict[str, Any] = {
        "model": {"path": str(folder / split.model)},
        "engine": {"parallel": split.parallel, "micro_batch_tokens": 70, **recompute},
        "optimizer": {"lr": 1e-3, "clip_grad": 0.0, "distributed": split.distributed},
    }
    if split.aux_loss:
        config["engine"]["moe_balance"] = {"kind": "aux_loss", "coefficient": split.aux_loss}
    return score_with_and_without_replay(config, rollouts(split.model), folder / split.name)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds[Routed]:
    folder = tmp_path_factory.mktemp("routing")
    for name in EXPERTS:
        random_model(name, num_hidden_layers=LAYERS).save_pretrained(folder / name)
    return Worlds(folder, SPLITS, train)


@NAMED
def test_scores_are_those_of_the_recorded_experts(worlds: Worlds[Routed], split: Routed) -> None:
    report, mask_T, model = worlds.report(split), batch_of(split.model).loss_mask_T, worlds.folder / split.model
    for name, replayed in (("replayed", True), ("own", False)):
        expected_T = oracle(model, replayed).logprobs_T[mask_T]
        torch.testing.assert_close(report[name].double()[mask_T], expected_T, atol=2e-5, rtol=0)
    apart_T = oracle(model, True).logprobs_T - oracle(model, False).logprobs_T
    assert apart_T[mask_T].abs().mean() > 0.1


@NAMED
def test_loss_and_gradients_are_those_of_the_recorded_experts(worlds: Worlds[Routed], split: Routed) -> None:
    """Also of the routers, which learn to weigh them."""
    expected, (loss, norm) = oracle(worlds.folder / split.model, True, split.aux_loss), worlds.report(split)["update"]
    assert loss == pytest.approx(expected.loss, rel=1e-5)
    assert norm == pytest.approx(expected.norm, rel=1e-5)
    assert_first_moments(worlds.checkpoint(split), expected.gradients)


@NAMED
def test_metrics_count_loads_and_what_replay_changed(worlds: Worlds[Routed], split: Routed) -> None:
    report, batch, model = worlds.report(split), batch_of(split.model), worlds.folder / split.model
    count, _ = EXPERTS[split.model]
    recorded_T = torch.ones(batch.num_tokens, dtype=torch.bool).index_fill(0, batch.cu_seqlens[1:].long() - 1, False)
    expected: dict[str, list[float]] = {"max_violation": [], "load_entropy": [], "replay_differs": []}
    for own_Tk, chosen_Tk in oracle(model, True).choices:
        share_E = torch.bincount(chosen_Tk.flatten(), minlength=count).double() / chosen_Tk.numel()
        expected["max_violation"].append(float(share_E.max() * count - 1))
        expected["load_entropy"].append(float(-(share_E * share_E.log()).sum() / np.log(count)))
        expected["replay_differs"].append(float(_differ(own_Tk, chosen_Tk)[recorded_T].double().mean()))
    found = report["routing"]
    for name, values in expected.items():
        assert found[f"moe/{name}"] == pytest.approx(np.mean(values))
        assert [found[f"moe/layer_{layer:02}/{name}"] for layer in range(LAYERS)] == pytest.approx(values)
    if split.aux_loss:
        assert found["moe/aux_loss"] == pytest.approx(oracle(model, True, split.aux_loss).aux_loss, rel=1e-5)
        bare, balanced = (oracle(model, True, weight).gradients for weight in (0.0, split.aux_loss))
        routers = [name for name in bare if name.endswith("gate.weight")]
        assert len(routers) == LAYERS
        assert all((balanced[name] - bare[name]).norm() > 0.05 * bare[name].norm() for name in routers)
    assert ("moe/aux_loss" in found) == bool(split.aux_loss)
    assert found["moe/max_violation/worst"] == pytest.approx(max(expected["max_violation"]))
    assert "moe/replay_differs" not in report["without"]
    assert report["nothing"] == {}


def _differ(left: Tensor, right: Tensor) -> Tensor:
    return (left.sort().values != right.sort().values).any(1)
