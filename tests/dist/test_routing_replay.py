"""Rollout routing replay under every kind of split: with the experts of a record, chosen at random, Megatron computes what
transformers computes with them in float64, forward and backward, also where the forward pass is computed again. In some the
routers have an auxiliary loss too, over the whole mini-batch: the same however ranks and micro-batches cut it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tepo_megatron.core.types import Batch
from tepo_megatron.sampler.rollout_file import read_rollouts, write_rollouts
from tepo_megatron.trainer.packing import pack
from tests.support.float64 import Oracle, oracle_of
from tests.support.launch import run_world
from tests.support.model_worlds import assert_first_moments, save_model, short_rollouts

LAYERS = 4
EXPERTS = {"Mixtral": (4, 2), "Qwen3Moe": (8, 3)}
"""All, and those that a token passes."""

AGAIN = {"recompute": "selective", "recompute_modules": ["moe"]}
"""Router and experts are computed again in the backward pass."""


@dataclass(frozen=True)
class Split:
    name: str
    model: str
    world: int
    parallel: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    distributed: bool = False
    aux_loss: float = 0.0


SPLITS = [
    Split("one", "Mixtral", 1),
    Split("one-qwen", "Qwen3Moe", 1, engine={"recompute": "full"}, aux_loss=1.0),
    Split("pp2-again", "Mixtral", 2, {"pp": 2}, {"recompute": "full"}),
    Split("cp2-ep2-again", "Mixtral", 2, {"cp": 2, "ep": 2}, AGAIN, aux_loss=1.0),
    Split("tp2-dp2-ep4", "Qwen3Moe", 4, {"tp": 2, "dp": 2, "ep": 4, "etp": 1, "sequence_parallel": True}, AGAIN, True, 1.0),
    Split(
        "tp2-pp2-vpp2",
        "Mixtral",
        4,
        {"tp": 2, "pp": 2, "vpp": 2, "sequence_parallel": True},
        {"recompute": "full"},
        aux_loss=1.0,
    ),
]
NAMED = pytest.mark.parametrize("split", [pytest.param(split, id=split.name) for split in SPLITS])


def random_routes(generator: torch.Generator, tokens: int, model: str) -> np.ndarray:
    """For all tokens but the last, experts that no router had any reason to choose."""
    count, per_token = EXPERTS[model]
    order = torch.rand(tokens - 1, LAYERS, count, generator=generator).argsort(-1)
    return order[..., :per_token].to(torch.uint8).numpy()


class Worlds:
    """Runs all splits of one world size in one world, once, on demand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._run_world = cache(self._start)
        self.oracle = cache(self._oracle)
        self.batch = cache(lambda model: pack(read_rollouts(folder / "rollouts" / model, 0)))

    def report(self, split: Split) -> dict[str, Any]:
        return json.loads((self.out(split) / "report.json").read_text())

    def out(self, split: Split) -> Path:
        self._run_world(split.world)
        return self.folder / split.name

    def _start(self, size: int) -> None:
        runs = []
        for split in (split for split in SPLITS if split.world == size):
            out = self.folder / split.name
            out.mkdir()
            balance = {"kind": "aux_loss", "coefficient": split.aux_loss} if split.aux_loss else {}
            config = {
                "model": {"path": str(self.folder / split.model)},
                "engine": {"parallel": split.parallel, "micro_batch_tokens": 70, "moe_balance": balance, **split.engine},
                "optimizer": {"lr": 1e-3, "clip_grad": 0.0, "distributed": split.distributed},
                "rollout": {"sampling": {"temperature": 1.0}, "server": {"routing_replay": True}},
            }
            runs.append({"config": config, "out": str(out), "resume": None})
        case = self.folder / f"world-{size}.json"
        case.write_text(json.dumps({"runs": runs, "rollouts": str(self.folder / "rollouts")}))
        run_world("routing", size, case)

    def _oracle(self, model: str, replayed: bool, aux_loss: float = 0.0) -> Oracle:
        batch: Batch = self.batch(model)
        return oracle_of(self.folder / model, batch if replayed else batch.with_(routed_experts_T=None), aux_loss=aux_loss)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    folder = tmp_path_factory.mktemp("routing")
    for name in EXPERTS:
        save_model(name, folder / name, layers=LAYERS)
        routes = partial(random_routes, model=name)
        write_rollouts(folder / "rollouts" / name, 0, short_rollouts(routes=routes, prompt=3))
    return Worlds(folder)


@NAMED
def test_scores_are_those_of_the_recorded_experts(worlds: Worlds, split: Split) -> None:
    report, mask_T = worlds.report(split), worlds.batch(split.model).loss_mask_T
    for name, replayed in (("replayed", True), ("own", False)):
        expected_T = worlds.oracle(split.model, replayed).logprobs_T[mask_T]
        torch.testing.assert_close(torch.tensor(report[name]).double()[mask_T], expected_T, atol=2e-5, rtol=0)
    apart_T = worlds.oracle(split.model, True).logprobs_T - worlds.oracle(split.model, False).logprobs_T
    assert apart_T[mask_T].abs().mean() > 0.1


@NAMED
def test_loss_and_gradients_are_those_of_the_recorded_experts(worlds: Worlds, split: Split) -> None:
    """Also of the routers, which learn to weigh them."""
    oracle, (loss, norm) = worlds.oracle(split.model, True, split.aux_loss), worlds.report(split)["update"]
    assert loss == pytest.approx(oracle.loss, rel=1e-5)
    assert norm == pytest.approx(oracle.norm, rel=1e-5)
    assert_first_moments(worlds.out(split) / "checkpoints" / "step_000001", oracle.gradients)


@NAMED
def test_metrics_count_loads_and_what_replay_changed(worlds: Worlds, split: Split) -> None:
    report, batch = worlds.report(split), worlds.batch(split.model)
    count, _ = EXPERTS[split.model]
    recorded_T = torch.ones(batch.num_tokens, dtype=torch.bool).index_fill(0, batch.cu_seqlens[1:].long() - 1, False)
    expected: dict[str, list[float]] = {"max_violation": [], "load_entropy": [], "replay_differs": []}
    for own_Tk, chosen_Tk in worlds.oracle(split.model, True).choices:
        share_E = torch.bincount(chosen_Tk.flatten(), minlength=count).double() / chosen_Tk.numel()
        expected["max_violation"].append(float(share_E.max() * count - 1))
        expected["load_entropy"].append(float(-(share_E * share_E.log()).sum() / np.log(count)))
        expected["replay_differs"].append(float(_differ(own_Tk, chosen_Tk)[recorded_T].double().mean()))
    found = report["routing"]
    for name, values in expected.items():
        assert found[f"moe/{name}"] == pytest.approx(np.mean(values))
        assert [found[f"moe/layer_{layer:02}/{name}"] for layer in range(LAYERS)] == pytest.approx(values)
    if split.aux_loss:
        assert found["moe/aux_loss"] == pytest.approx(worlds.oracle(split.model, True, split.aux_loss).aux_loss, rel=1e-5)
        bare, balanced = (worlds.oracle(split.model, True, weight).gradients for weight in (0.0, split.aux_loss))
        routers = [name for name in bare if name.endswith("gate.weight")]
        assert len(routers) == LAYERS
        assert all((balanced[name] - bare[name]).norm() > 0.05 * bare[name].norm() for name in routers)
    assert ("moe/aux_loss" in found) == bool(split.aux_loss)
    assert found["moe/max_violation/worst"] == pytest.approx(max(expected["max_violation"]))
    assert "moe/replay_differs" not in report["without"]
    assert report["nothing"] == {}


def _differ(left: Tensor, right: Tensor) -> Tensor:
    return (left.sort().values != right.sort().values).any(1)
