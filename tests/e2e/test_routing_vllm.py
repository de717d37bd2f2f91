"""Routing replay with a real vLLM server: the trainer's log-probs are the sampler's where its routers choose other experts.

Experts come in pairs whose rows in the router all but tie. The server's rows are swapped, so that in each layer it takes the
one of a pair where the trainer takes the other, as rounding alone would have it.
"""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tepo_megatron.config.rollout import ServerConfig
from tepo_megatron.core.rollout import Response, Rollout
from tepo_megatron.sampler.fleet.fleet import Fleet
from tepo_megatron.sampler.rollout_file import write_rollouts
from tests.support.launch import run_world
from tests.support.random_models import EOS, random_model

LONG = (1, *(3 + at % 57 for at in range(280)))
"""Two blocks of 128 tokens of the prefix cache, and more."""

PROMPTS = [(1, 5, 6, 7), LONG, (1, 9), LONG]
SHAPE = (4, 3)
"""Layers, and experts per token."""


@dataclass(frozen=True)
class Drawn:
    folder: Path
    groups: list[list[Response]]


def make_models(folder: Path) -> None:
    trained = deepcopy(random_model("Qwen3Moe", 1))
    trained.config.max_position_embeddings = 512
    served = deepcopy(trained)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for ours, theirs in zip(trained.model.layers, served.model.layers, strict=True):
            gate = ours.mlp.gate.weight
            gate[1::2] = gate[::2] + 1e-6 * torch.randn(gate[::2].shape, generator=generator)
            theirs.mlp.gate.weight.copy_(gate[[1, 0, 3, 2, 5, 4]])
    trained.save_pretrained(folder / "trained")
    served.save_pretrained(folder / "served")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Drawn:
    folder = tmp_path_factory.mktemp("routing_vllm")
    make_models(folder)
    config = ServerConfig(max_model_len=400, max_num_seqs=16, routing_replay=True)
    with Fleet(config, model_dir=folder / "served", dtype="float32", stop_token_ids=[EOS], log_dir=folder) as fleet:
        groups = fleet.generate(PROMPTS, n=3, temperature=1.0, max_new_tokens=12, seed=1)
    return Drawn(folder, groups)


def rollouts_of(groups: list[list[Response]]) -> list[Rollout]:
    return [
        Rollout(
            f"p{at}",
            at,
            PROMPTS[at],
            response.response_ids,
            response.logprobs,
            response.finish_reason,
            response.versions,
            routed_experts=response.routed_experts,
        )
        for at, group in enumerate(groups)
        for response in group
    ]


def replayed(folder: Path, rollouts: list[Rollout]) -> dict[str, Any]:
    """What one rank of the trainer makes of these, with replay and without."""
    write_rollouts(folder / "rollouts" / "trained", 0, rollouts)
    config = {
        "model": {"path": str(folder / "trained")},
        "rollout": {"sampling": {"temperature": 1.0}, "server": {"routing_replay": True}},
    }
    run = {"config": config, "out": str(folder), "resume": None}
    (folder / "case.json").write_text(json.dumps({"runs": [run], "rollouts": str(folder / "rollouts")}))
    run_world("routing", 1, folder / "case.json")
    return json.loads((folder / "report.json").read_text())


def test_the_trainers_logprobs_are_the_samplers_with_its_experts(drawn: Drawn) -> None:
    rollouts = rollouts_of(drawn.groups)
    report = replayed(drawn.folder, rollouts)
    gaps: dict[str, np.ndarray] = {}
    for name in ("own", "replayed"):
        scored, offset, found = np.array(report[name]), 0, []
        for rollout in rollouts:
            first, count = offset + rollout.prompt_ids.size - 1, rollout.response_ids.size
            found.append(scored[first : first + count] - rollout.sampler_logprobs)
            offset += rollout.prompt_ids.size + count
        gaps[name] = np.abs(np.concatenate(found))
    assert gaps["replayed"].max() < 1e-4
    assert gaps["own"].mean() > 0.01
    assert report["routing"]["moe/replay_differs"] > 0.9


def test_records_are_of_all_tokens_but_the_last_also_of_those_in_the_prefix_cache(drawn: Drawn) -> None:
    for prompt, group in zip(PROMPTS, drawn.groups, strict=True):
        for response in group:
            routes = response.routed_experts
            assert routes is not None
            assert routes.dtype == np.uint8
            assert routes.shape == (len(prompt) + response.response_ids.size - 1, *SHAPE)
    first, *others = [group[n].routed_experts for group in (drawn.groups[1], drawn.groups[3]) for n in range(3)]
    assert first is not None
    for other in others:
        assert other is not None
        np.testing.assert_array_equal(np.sort(first[: len(LONG)]), np.sort(other[: len(LONG)]))
