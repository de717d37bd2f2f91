"""A real vLLM, updated shard by shard from a trainer at TP2 × PP2: tokens are transformers', log-probs the trainer's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from reshard_world import EOS, LENGTH, PROMPTS

SIZES = {
    "vocab_size": 61,  # no multiple of TP, nor of what vLLM pads to
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.12,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}


def random_model(kind: str, seed: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**SIZES, head_dim=32, tie_word_embeddings=False)).eval()
    # head_dim 32 is the smallest that vLLM's attention on the CPU takes
    model = Qwen2ForCausalLM(Qwen2Config(**{**SIZES, "hidden_size": 128}, tie_word_embeddings=True)).eval()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("bias"):
                param.normal_(std=0.5)  # transformers starts them at zero, where a bias that is lost would not show
    return model


def run_world(folder: Path, kind: str, *, tp: int, count: int, kill: bool) -> tuple[Any, dict[str, Any]]:
    for name, seed in (("served", 0), ("trained", 1)):
        random_model(kind, seed).save_pretrained(folder / name)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    arguments = [str(folder / "served"), str(folder / "trained"), str(folder), str(tp), str(count), str(int(kill))]
    done = subprocess.run(
        [*command, str(Path(__file__).with_name("reshard_world.py")), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    return random_model(kind, 1), json.loads((folder / "report.json").read_text())


@pytest.fixture(scope="module")
def two_servers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, Any]]:
    return run_world(tmp_path_factory.mktemp("llama"), "llama", tp=1, count=2, kill=True)


@pytest.fixture(scope="module")
def one_split_server(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, Any]]:
    return run_world(tmp_path_factory.mktemp("qwen2"), "qwen2", tp=2, count=1, kill=False)


@torch.no_grad()
def greedy(model: Any) -> list[list[int]]:
    responses = []
    for prompt in PROMPTS:
        ids = list(prompt)
        while len(ids) < len(prompt) + LENGTH and (len(ids) == len(prompt) or ids[-1] != EOS):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        responses.append(ids[len(prompt) :])
    return responses


def check(model: Any, seen: dict[str, Any], *, servers: int, version: int) -> None:
    assert seen["greedy"] == [greedy(model)] * servers
    assert seen["gap"] < 1e-4
    assert seen["version"] == version


def test_untied_llama_in_two_servers(two_servers: tuple[Any, dict[str, Any]]) -> None:
    model, report = two_servers
    assert greedy(model) != greedy(random_model("llama", 0))  # without this the servers could have kept theirs
    check(model, report["first"], servers=2, version=1)


def test_a_server_killed_in_the_middle_of_a_sync_is_replaced_and_synced(two_servers: tuple[Any, dict[str, Any]]) -> None:
    model, report = two_servers
    assert report["died"]
    check(model, report["again"], servers=2, version=2)


def test_qwen2_with_biases_and_a_tied_head_over_two_workers(one_split_server: tuple[Any, dict[str, Any]]) -> None:
    model, report = one_split_server
    assert greedy(model) != greedy(random_model("qwen2", 0))
    check(model, report["first"], servers=1, version=1)
