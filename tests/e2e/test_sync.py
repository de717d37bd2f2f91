"""After every sync the server's weights are the trainer's: a canary in greedy tokens, and the log-probs of real rollouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tepo_megatron.weights.geometry import Box, Shard
from tepo_megatron.weights.transfer.digests import fingerprint
from tests.support.launch import run_world

World = tuple[Path, dict[str, Any]]


@pytest.fixture(scope="module", params=["full", "adapter"])
def world(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> World:
    """With ``adapter`` the server gets LoRA adapters and keeps its weights; the rest must be as if it got weights."""
    return synced(tmp_path_factory, request.param)


def synced(tmp_path_factory: pytest.TempPathFactory, kind: str) -> World:
    out = tmp_path_factory.mktemp("sync")
    run_world("sync", 2, out, kind)
    return out, json.loads((out / "report.json").read_text())


@pytest.mark.parametrize("sync", range(3))
def test_greedy_tokens_are_those_of_transformers_on_the_exported_weights(world: World, sync: int) -> None:
    from transformers import LlamaForCausalLM

    out, report = world
    model = LlamaForCausalLM.from_pretrained(out / f"model-{sync}", dtype=torch.float32)
    for prompt, response in zip(report["prompts"], report["syncs"][sync]["greedy"], strict=True):
        ids = list(prompt)
        for token in response:
            with torch.no_grad():
                assert int(model(torch.tensor([ids])).logits[0, -1].argmax()) == token
            ids.append(token)
        assert response[-1] in report["eos"] or len(response) == 24


def test_each_sync_changed_what_the_server_says(world: World) -> None:
    """Without this the canary could not fail."""
    greedy = [sync["greedy"] for sync in world[1]["syncs"]]
    assert greedy[0] != greedy[1]
    assert greedy[1] != greedy[2]
    assert [sync["version"] for sync in world[1]["syncs"]] == [0, 1, 2]


@pytest.mark.parametrize("sync", range(3))
def test_logprobs_of_server_and_trainer_agree_on_real_rollouts(world: World, sync: int) -> None:
    assert world[1]["syncs"][sync]["logprob_gap"] < 3e-4  # the largest of all tokens, in fp32: 1.01e-4 was seen on an AMD EPYC
    assert world[1]["syncs"][sync]["mismatch_kl"] < 1e-6


def test_the_canary_passes_after_every_sync(world: World) -> None:
    assert all(sync["canary"] < 1e-4 for sync in world[1]["syncs"])


def test_nothing_is_computed_before_the_first_sync(world: World) -> None:
    assert "status 409" in world[1]["refused"]
    assert "has no weights yet" in world[1]["refused"]


def test_merged_adapters_in_bfloat16_are_what_the_server_computes_with(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Both sides have the same rounded weights, and differ by the rounding of activations alone: docs/reference/numerics.md."""
    report = synced(tmp_path_factory, "merged-bf16")[1]
    assert len({str(sync["greedy"]) for sync in report["syncs"]}) == 3
    assert all(sync["canary"] < 0.25 for sync in report["syncs"])  # of the tolerance, 0.5
    assert all(sync["mismatch_kl"] < 1e-2 for sync in report["syncs"])
    assert isinstance(report["stale"], str)


@pytest.mark.parametrize("fault", ["stale", "permuted"])
def test_the_canary_stops_at_old_weights_and_at_permuted_ones(world: World, fault: str) -> None:
    """Stale: the trainer made one more step that the server was not told of."""
    said = world[1][fault]
    assert isinstance(said, str), said
    assert f"{world[1]['urls'][0]} gives token" in said
    assert "the trainer -" in said


@pytest.mark.parametrize("sync", range(3))
def test_responses_carry_the_digest_of_the_weights_that_gave_them(world: World, sync: int) -> None:
    """A trainer at TP2 says the same as the file that it exports, whole tensors."""
    tensors = load_file(world[0] / f"model-{sync}" / "model.safetensors")
    boxes = {name: Box((0,) * tensor.ndim, tuple(tensor.shape)) for name, tensor in tensors.items()}
    whole = fingerprint([Shard(name, box, name, box) for name, box in boxes.items()], tensors)
    assert world[1]["syncs"][sync]["digest"] == f"{whole:016x}"
    assert len({each["digest"] for each in world[1]["syncs"]}) == 3
