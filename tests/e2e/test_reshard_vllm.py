"""vLLM servers, updated shard by shard from a trainer at TP2 × PP2, one of them killed meanwhile: tokens are transformers',
log-probs the trainer's. All architectures are the subject of ``test_architectures_vllm.py``.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.launch import run_world
from tests.support.random_models import greedy, random_model

SERVED, TRAINED = 0, 1
"""Seeds of the weights that the servers start with, and of the trainer's."""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("llama")
    for name, seed in (("served", SERVED), ("trained", TRAINED)):
        random_model("Llama", seed).save_pretrained(folder / name)
    run_world("reshard_vllm", 4, folder)
    return json.loads((folder / "report.json").read_text())


def test_servers_without_weights_refuse_to_sample(report: dict[str, Any]) -> None:
    assert len(report["refusals"]) == 2
    assert all("status 409: /inference/v1/generate: this server has no weights yet" in each for each in report["refusals"])


@pytest.mark.parametrize(("update", "version"), [("first", 1), ("again", 2)])
def test_every_server_has_the_trainers_weights_also_after_one_was_killed(
    report: dict[str, Any], update: str, version: int
) -> None:
    seen, expected = report[update], greedy("Llama", TRAINED)
    assert expected != greedy("Llama", SERVED)  # what the folder of the servers' model holds
    assert seen["greedy"] == [expected] * 2
    assert seen["gap"] < 1e-4
    assert seen["version"] == version
    assert report["died"]
