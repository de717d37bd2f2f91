"""Routing replay with a real vLLM server: the trainer's log-probs are the sampler's where its routers choose other experts.

Experts come in pairs whose rows in the router all but tie. The server's rows are swapped, so that in each layer it takes the
one of a pair where the trainer takes the other, as rounding alone would have it.
"""

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tepo_megatron.config.rollout import ServerConfig
from tepo_megatron.core.rollout import Response, Rollout
from tepo_megatron.sampler.fleet.fleet import Fleet
from tepo_megatron.trainer.packing import pack
from tests.support.engines import score_with_and_without_replay
from tests.support.launch import run_dist
from tests.support.programs import FEW_BLOCKS
from tests.support.random_models import EOS, random_model, rollouts_of

LONG = (1, *(3 + at % 57 for at in range(280)))
"""Two blocks of 128 tokens of the prefix cache, and more."""

PROMPTS = [(1, 5, 6, 7), LONG, (1, 9), LONG]
SHAPE = (4, 3)
"""Layers, and experts per token."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("routing_vllm")
    trained = deepcopy(random_model("Qwen3Moe", 1))
    trained.config.max_position_embeddings = 512
    served = deepcopy(trained)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for ours, theirs in zip(trained.model.layers, served.model.layers, strict=True):
            gate = ours.mlp.gate.weight
            gate[1::2] = gate[::2] + 1e-6 * torch.randn(gate[::2].shape, generator=generator)
            theirs.mlp.gate.weight.copy_(gate[[1, 0, 3, 2, 5, 4, 7, 6]])
    trained.save_pretrained(folder / "trained")
    served.save_pretrained(folder / "served")
    return folder


@pytest.fixture(scope="module")
def groups(folder: Path) -> list[list[Response]]:
    config = ServerConfig(max_model_len=400, max_num_seqs=16, routing_replay=True, extra_args=(FEW_BLOCKS,))
    with Fleet(config, model_dir=folder / "served", dtype="float32", stop_token_ids=[EOS], log_dir=folder) as fleet:
        return fleet.generate(PROMPTS, n=3, temperature=1.0, max_new_tokens=12, seed=1)


def replayed(_rank: int, _world: int, folder: Path, rollouts: list[Rollout]) -> dict[str, Any]:
    return score_with_and_without_replay({"model": {"path": str(folder / "trained")}}, rollouts, folder / "out")


def test_the_trainers_logprobs_are_the_samplers_with_its_experts(folder: Path, groups: list[list[Response]]) -> None:
    rollouts = rollouts_of(groups, PROMPTS)
    (report,) = run_dist(1, replayed, folder, rollouts)
    batch = pack(rollouts)
    gaps = {name: (report[name] - batch.sampler_logprobs_T)[batch.loss_mask_T].abs() for name in ("own", "replayed")}
    assert gaps["replayed"].max() < 1e-4
    assert gaps["own"].mean() > 0.01
    assert report["routing"]["moe/replay_differs"] > 0.9


def test_records_are_of_all_tokens_but_the_last_also_of_those_in_the_prefix_cache(groups: list[list[Response]]) -> None:
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for response in group:
            routes = response.routed_experts
            assert routes.dtype == np.uint8
            assert routes.shape == (len(prompt) + response.response_ids.size - 1, *SHAPE)
    first, *others = [group[n].routed_experts for group in (groups[1], groups[3]) for n in range(3)]
    assert first is not None
    for other in others:
        np.testing.assert_array_equal(np.sort(first[: len(LONG)]), np.sort(other[: len(LONG)]))
