"""A plan against what Megatron builds and needs: parameters of ranks, bytes of terms, the peak of memory."""

import json
import math
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from scripts.studies.measure_plan import MODEL, compare, configs, counts
from tepo_megatron.config import ParallelConfig, RunConfig
from tepo_megatron.config.load import load_run
from tepo_megatron.plan import Plan, make_plan
from tepo_megatron.plan.memory import TrainingRanks
from tepo_megatron.plan.shapes import resolve_spec
from tepo_megatron.tools.bench.recipes import make_model
from tepo_megatron.weights.architecture import ModelSpec, read_model_spec
from tepo_megatron.weights.layouts import MegatronParallel, pipeline_stages_of
from tests.support.launch import run_dist, run_world
from tests.support.random_models import write_llama

EXAMPLES = Path(__file__).parents[2] / "examples"
COUNT = [sys.executable, "-m", "tepo_megatron.trainer.megatron.model.parameter_count"]


def recipe(name: str) -> Plan:
    return make_plan(load_run(EXAMPLES / name / "run.yaml"))


@pytest.fixture
def counted_by_forks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron need not be imported again for each count."""

    def run(command: list[str], *, input: str, **_options: Any) -> subprocess.CompletedProcess[str]:
        assert command == COUNT  # which the test of interleaved stages starts as a process
        request, counts = tmp_path / "request.json", tmp_path / "counts.json"
        request.write_text(input)
        run_world("parameter_count", 1, request, counts)
        return subprocess.CompletedProcess(command, 0, counts.read_text(), "")

    monkeypatch.setattr(subprocess, "run", run)


@pytest.mark.usefixtures("counted_by_forks")
@pytest.mark.parametrize(
    ("name", "model", "parallel"),
    [
        ("llama3.3-70b", "", {}),
        ("qwen2.5-7b", "", {}),
        ("qwen2.5-7b", "Mixtral-8x7B-v0.1", {"tp": 2, "pp": 4, "dp": 2, "ep": 4, "etp": 1}),
        ("qwen2.5-7b", "Qwen3-14B", {"tp": 4, "dp": 2}),  # norms on queries and keys
    ],
)
def test_megatron_builds_as_many_parameters_as_the_formula_says(name: str, model: str, parallel: dict[str, int]) -> None:
    """Of a recipe, and of other models in its place."""
    plan = recipe(name)
    if model:
        engine = plan.config.engine.model_copy(update={"parallel": ParallelConfig(**parallel, sequence_parallel=True)})
        plan = replace(plan, spec=resolve_spec(model)[0], config=plan.config.model_copy(update={"engine": engine}))
    assert plan.check_exact() == [[count] * plan.config.engine.parallel.tp for count in plan.stage_parameters]


def test_interleaved_and_uneven_stages_are_counted_as_the_layout_says() -> None:
    """Each rank by itself; the model is the layouts' own."""
    spec = ModelSpec("LlamaForCausalLM", 8, 48, 6, 2, 8, 80, 61, False, 1e-5, 1e4, None, 128)
    parallel = ParallelConfig(tp=2, pp=2, vpp=2, num_layers_in_first_pipeline_stage=2)
    split = MegatronParallel(2, 2, stages=pipeline_stages_of(spec, parallel))
    held = [sum(math.prod(shape) for shape in rank.params.values()) for rank in split.layouts(spec)]
    request = json.dumps({"spec": asdict(spec), "parallel": parallel.model_dump()})
    counted = subprocess.run(COUNT, input=request, capture_output=True, text=True, check=True).stdout
    assert json.loads(counted.splitlines()[-1]) == [held[:2], held[2:]]


def test_what_cannot_be_counted_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A count that differs names the rank and both counts; a place without Megatron what is missing."""
    plan = recipe("qwen2.5-7b")
    (expected,) = plan.stage_parameters
    other, missing = json.dumps([[expected, 11]]), "Traceback\nModuleNotFoundError: No module named 'torch'\n"
    for answer, message in (
        ((0, other, ""), rf"11 parameters on tp rank 1 of pipeline stage 0, but the formula .* {expected:,}"),
        ((1, "", missing), r"No module named 'torch'.*trainer's environment"),
    ):
        done = subprocess.CompletedProcess([], *answer)
        monkeypatch.setattr(subprocess, "run", lambda *_, done=done, **__: done)
        with pytest.raises(RuntimeError, match=message):
            plan.check_exact()


TOLERANCE = {"weights": 0.01, "gradients": 0.01, "optimizer": 0.01, "a step's batch": 0.03}
CHECKPOINT = 0.02
"""Headers of files, and boxes that are named one by one, come on top of the values."""


def of_each_run(rank: int, world: int, folder: Path) -> dict[str, dict[str, int]]:
    return {name: counts(config, folder / name) for name, config in configs(folder / "model").items()}


def test_terms_are_within_a_few_percent_of_what_is_counted(tmp_path: Path) -> None:
    make_model(tmp_path / "model", MODEL)
    ranks = run_dist(2, of_each_run, tmp_path)
    for name, config in configs(tmp_path / "model").items():
        for term in compare(name, config, [rank[name] for rank in ranks]):
            print(f"{term.run:32} {term.term:20} {term.planned:14,.0f} {term.counted:14,.0f} {term.error:+.2%}")
            assert abs(term.error) <= TOLERANCE.get(term.term, CHECKPOINT), term


SEQUENCES, TOKENS = 8, 64


def write_model(folder: Path, heads: int) -> Path:
    """Of 8 heads 37, of 10 heads 55 million random parameters."""
    sizes = {"hidden_size": 64 * heads, "intermediate_size": 176 * heads, "num_hidden_layers": 10, "vocab_size": 8192}
    attention = {"num_attention_heads": heads, "num_key_value_heads": 2, "head_dim": 64}
    return write_llama(folder, scale=0.02, spike=1.0, **sizes, **attention)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), heads=8)


INTERLEAVED = {"pp": 2, "vpp": 2, "num_layers_in_first_pipeline_stage": 6, "num_layers_in_last_pipeline_stage": 4}


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the measure is Linux' own")
@pytest.mark.parametrize(
    ("engine", "lora"),
    [
        ({"parallel": {"tp": 2, "sequence_parallel": True}}, None),
        ({"parallel": {"cp": 2}}, None),
        ({"parallel": INTERLEAVED, "micro_batch_tokens": SEQUENCES * TOKENS // 4}, None),
        ({}, {"rank": 8, "alpha": 16}),  # training all weights needs twice as much
        ({"head": "fused"}, None),  # of a large vocabulary, where logits would need half as much again
    ],
    ids=["tp2-sp", "cp2", "pp2-vpp2", "lora", "without logits"],
)
def test_the_predicted_peak_is_within_a_tenth_of_the_measured(
    engine: dict[str, Any], lora: dict[str, Any] | None, model: Path, tmp_path: Path
) -> None:
    """All sequences are in one micro-batch, unless ``engine`` says otherwise."""
    tokens = TOKENS
    if "head" in engine:
        tokens, model = 2 * TOKENS, tmp_path / "model"
        write_llama(model, hidden_size=64, intermediate_size=8192, vocab_size=65536)
    elif "parallel" in engine and engine["parallel"] is INTERLEAVED:
        model = write_model(tmp_path / "model", heads=10)  # half a model and its share of what no plan counts
    config = RunConfig.model_validate(
        {
            "model": {"path": str(model), "lora": lora},
            "engine": {"platform": "cpu", "micro_batch_tokens": SEQUENCES * tokens, **engine},
            "train": {"minibatches": 1, "steps": 1},
        }
    )
    stages, world = config.engine.parallel.pp, config.engine.parallel.world_size
    ranks, step = TrainingRanks(read_model_spec(model), config), SEQUENCES * tokens
    predicted = [ranks.memory(stage, longest=tokens, step_tokens=step).total for stage in range(stages)]
    case = {"config": config.model_dump(mode="json"), "out": str(tmp_path), "sequences": SEQUENCES, "tokens": tokens}
    (tmp_path / "case.json").write_text(json.dumps(case))
    run_world("memory", world, tmp_path / "case.json")
    measured = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(world)]
    largest = [max(measured[stage * world // stages : (stage + 1) * world // stages]) for stage in range(stages)]
    assert predicted == pytest.approx(largest, rel=0.1), [each / 2**20 for each in (*predicted, *largest)]
