"""Every architecture in a real vLLM at TP1 and TP2, updated through the bridge from a trainer at TP2 × PP2.

The engines start with other weights than the trainer's. After the update they decode greedily what transformers does with the
trainer's, and give the log-probs that the trainer gives. Whole servers are the subject of ``test_reshard_vllm.py``.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.launch import run_world
from tests.support.random_models import MODELS, greedy, random_model

SERVED, TRAINED = 0, 1
"""Seeds of the weights that the engines start with, and of the trainer's."""

EXPERTS = {
    "Mixtral": {"sequence_parallel": True, "ep": 2, "etp": 1},
    "Qwen3Moe": {"sequence_parallel": True, "etp": 2},
    "Glm4Moe": {"sequence_parallel": True, "ep": 2, "etp": 1},
}
"""How the trainer splits the experts: over two ranks, or each expert over both."""

CASES: list[dict[str, Any]] = [
    {
        "name": f"{model}-tp{tp}-{transfer}",
        "model": model,
        "tp": tp,
        "transfer": transfer,
        "experts": EXPERTS.get(model, {}),
    }
    for model in MODELS
    for tp in (1, 2)
    for transfer in (("reshard", "gather") if model == "Qwen2-tied" or (model, tp) == ("Mixtral", 1) else ("reshard",))
]
SOON = {"Qwen2-tied-tp1-gather", "Qwen2-tied-tp2-reshard", "Mixtral-tp2-reshard", "Glm4Moe-tp1-reshard"}
"""The others are long tests: their tensors are among those of these."""

NAMED = pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case["name"], marks=[] if case["name"] in SOON else [pytest.mark.long]) for case in CASES],
)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Any]:
    selected = {item.name.partition("[")[2].rstrip("]") for item in request.session.items if item.path == request.path}
    cases = [case for case in CASES if case["name"] in selected]
    folder = tmp_path_factory.mktemp("architectures_vllm")
    for name in MODELS:
        for role, seed in (("served", SERVED), ("trained", TRAINED)):
            random_model(name, seed).save_pretrained(folder / name / role)
    (folder / "cases.json").write_text(json.dumps(cases))
    run_world("architectures_vllm", 4, folder)
    return json.loads((folder / "report.json").read_text())


@NAMED
def test_greedy_tokens_are_those_of_transformers(report: dict[str, Any], case: dict[str, Any]) -> None:
    expected = greedy(case["model"], TRAINED)
    assert expected != greedy(case["model"], SERVED)  # without this the engine could have kept its weights
    assert report[case["name"]]["greedy"] == expected


@NAMED
def test_logprobs_are_those_of_the_trainer(report: dict[str, Any], case: dict[str, Any]) -> None:
    assert report[case["name"]]["gap"] < 1e-4
