"""Every architecture under every kind of split: what Megatron computes is what transformers computes in float64, forward and
backward, checkpoints pass from one split to another, and biases of experts move against the load of the whole mini-batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tepo_megatron.trainer.packing import pack
from tepo_megatron.weights.architecture import is_always_fp32, read_model_spec
from tepo_megatron.weights.geometry import Box
from tepo_megatron.weights.storage.convert import export_model, import_model
from tepo_megatron.weights.storage.stored import StoredWeights
from tepo_megatron.weights.table import tensor_shapes
from tests.support.engines import (
    MeanSurprise,
    Split,
    Worlds,
    assert_first_moments,
    assert_moved_alike,
    make_engine,
    short_rollouts,
    update_twice,
)
from tests.support.float64 import Oracle, oracle_of
from tests.support.random_models import MODELS, random_model

RATE = 0.01
BALANCE = {"Glm4Moe": {"kind": "expert_bias", "update_rate": RATE}}
BATCH = pack(short_rollouts())
SEEDS = {"Glm4Moe": 3}
"""With it every expert gets tokens."""


@dataclass(frozen=True, kw_only=True)
class ModelSplit(Split):
    model: str = ""
    imported: bool = False
    """Whether it starts from what ``tepo import`` made, and not from a Hugging Face folder."""


SINGLE = ModelSplit()
ACROSS = ModelSplit(tp=2, dp=2, ep=4, etp=1, sp=True, distributed=True, imported=True)
WITH_EXPERTS = [
    SINGLE,
    ACROSS,
    ModelSplit(tp=2, dp=2, ep=2, sp=True),
    ModelSplit(pp=2, dp=2, ep=2, resumes=SINGLE),
    ModelSplit(dp=2, ep=2, distributed=True, resumes=ACROSS),
    ModelSplit(tp=2, ep=2, etp=1, sp=True),
]
DENSE = [
    *(SINGLE, ModelSplit(tp=2, imported=True), ModelSplit(tp=2, sp=True), ModelSplit(pp=2, imported=True)),
    ModelSplit(tp=2, pp=2, sp=True, imported=True),
]


def of_model(split: ModelSplit, model: str) -> ModelSplit:
    return replace(split, model=model, resumes=of_model(split.resumes, model) if split.resumes else None)


def has_experts(model: str) -> bool:
    return bool({"num_local_experts", "num_experts", "n_routed_experts"} & {*MODELS[model]})


SPLITS = [of_model(split, model) for model in MODELS for split in (WITH_EXPERTS if has_experts(model) else DENSE)]


def splits(condition: Callable[[ModelSplit], bool] = lambda split: True) -> pytest.MarkDecorator:
    chosen = [pytest.param(split, id=split.name) for split in SPLITS if condition(split)]
    return pytest.mark.parametrize("split", chosen)


def train(split: ModelSplit, folder: Path) -> dict[str, Any]:
    model: dict[str, Any] = {"path": str(folder / split.model)}
    out = folder / split.name
    if split.imported:
        model["shards"] = str(out / "shards")
    engine = make_engine(
        {
            "model": model,
            "engine": {"parallel": split.parallel, "micro_batch_tokens": 70, "moe_balance": BALANCE.get(split.model, {})},
            "optimizer": {"lr": 1e-3, "clip_grad": 0.0, "distributed": split.distributed},
            "rollout": {"sampling": {"temperature": 1.0}},
        },
        MeanSurprise(),
    )
    built = {name: tuple(param.shape) for name, param in engine.policy.params.items()}
    assert built == dict(engine.layouts[engine.ranks.rank].params)
    engine.weights.export(out / "initial")
    batch = engine.score(engine.batch_from_root(short_rollouts() if engine.ranks.rank == 0 else None))
    updates = update_twice(engine, batch, split, folder)
    engine.weights.export(out / "trained")
    return {"logprobs": batch.old_logprobs_T, "entropy": batch.old_entropy_T, "updates": updates}


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds[ModelSplit]:
    folder = tmp_path_factory.mktemp("models")
    for model in MODELS:
        layers = {"num_hidden_layers": 2} if has_experts(model) else {}
        random_model(model, SEEDS.get(model, 0), **layers).save_pretrained(folder / model)
    for split in SPLITS:
        if split.imported:
            import_model(folder / split.model, folder / split.name / "shards", tp=split.tp, pp=split.pp)
    return Worlds(folder, SPLITS, train)


@cache
def oracle(folder: Path) -> Oracle:
    return oracle_of(folder, BATCH)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same_bytes(found: Path, expected: Path) -> bool:
    ours, theirs = tensors(found), tensors(expected)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


@splits()
def test_scores_match_transformers_in_float64(worlds: Worlds[ModelSplit], split: ModelSplit) -> None:
    report, expected, mask_T = worlds.report(split), oracle(worlds.folder / split.model), BATCH.loss_mask_T
    assert mask_T.sum() == BATCH.num_tokens - BATCH.num_sequences
    assert expected.logprobs_T.std() > 0.1
    for name, expected_T in (("logprobs", expected.logprobs_T), ("entropy", expected.entropy_T)):
        torch.testing.assert_close(report[name].double()[mask_T], expected_T[mask_T], atol=2e-5, rtol=0)


@splits()
def test_exports_are_the_model_and_its_checkpoint(worlds: Worlds[ModelSplit], split: ModelSplit) -> None:
    checkpoint, out, model = worlds.checkpoint(split, 2), worlds.folder / split.name, worlds.folder / split.model
    assert same_bytes(out / "initial", model)
    if split.resumes is None:
        shapes = tensor_shapes(read_model_spec(model))
        moments = {name: shape for name, shape in shapes.items() if not is_always_fp32(name)}
        for kind in ("master", "exp_avg", "exp_avg_sq"):
            stored = StoredWeights.open_boxes(worlds.checkpoint(split), kind)
            assert all(len(boxes) == len({box.box for box in boxes}) for boxes in stored.boxes.values())
            stored.check(shapes if kind == "master" else moments)
    export_model(checkpoint, out / "converted")
    assert same_bytes(out / "converted", out / "trained")


@splits(lambda split: split.resumes is None)
def test_loss_and_gradients_match_transformers_in_float64(worlds: Worlds[ModelSplit], split: ModelSplit) -> None:
    expected, (loss, norm) = oracle(worlds.folder / split.model), worlds.report(split)["updates"][0]
    assert loss == pytest.approx(expected.loss, rel=1e-5)
    assert norm == pytest.approx(expected.norm, rel=1e-5)
    assert_first_moments(worlds.checkpoint(split), expected.gradients)


@splits(lambda split: split.model in BALANCE and split.resumes is None)
def test_biases_move_against_the_load_of_the_whole_batch(worlds: Worlds[ModelSplit], split: ModelSplit) -> None:
    """By Megatron's own rule: all by the same step, up where an expert has fewer tokens than the mean."""
    before = tensors(worlds.folder / split.model)
    stored = StoredWeights.open_boxes(worlds.checkpoint(split), "master")
    loads = oracle(worlds.folder / split.model).loads
    assert loads
    for name, load_E in loads.items():
        assert load_E.sum() == BATCH.num_tokens * MODELS[split.model]["num_experts_per_tok"]
        found_E = torch.empty(load_E.numel())
        stored.read(name, Box((0,), (load_E.numel(),)), found_E)
        expected_E = before[name] + RATE * (load_E.double().mean() - load_E).sign()
        torch.testing.assert_close(found_E, expected_E.float(), atol=1e-7, rtol=0)
        assert not torch.equal(found_E, before[name])


@splits(lambda split: split != of_model(SINGLE, split.model))
def test_the_second_step_is_that_of_one_rank(worlds: Worlds[ModelSplit], split: ModelSplit) -> None:
    """Also where the first step came from another split's checkpoint, optimizer states included."""
    runs = (split, of_model(SINGLE, split.model))
    found, expected = (worlds.report(run)["updates"][-1] for run in runs)
    assert found == pytest.approx(expected, rel=1e-5)
    ours, theirs = (tensors(worlds.folder / run.name / "trained") for run in runs)
    assert_moved_alike(tensors(worlds.folder / split.model), ours, theirs)
