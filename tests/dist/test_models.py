"""Every architecture under every kind of split: what Megatron computes is what transformers computes in float64, forward and
backward, checkpoints pass from one split to another, and biases of experts move against the load of the whole mini-batch.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tepo_megatron.config import EngineConfig, ParallelConfig
from tepo_megatron.sampler.rollout_file import read_rollouts, write_rollouts
from tepo_megatron.trainer.packing import pack
from tepo_megatron.weights.architecture import is_always_fp32, read_model_spec
from tepo_megatron.weights.geometry import Box
from tepo_megatron.weights.layouts import check_trainer_split
from tepo_megatron.weights.storage.convert import export_model, import_model
from tepo_megatron.weights.storage.stored import StoredWeights
from tepo_megatron.weights.table import tensor_shapes
from tests.support.float64 import Oracle, oracle_of
from tests.support.launch import run_world
from tests.support.model_worlds import DENSE, WITH_EXPERTS, assert_first_moments, save_model, short_rollouts

RATE = 0.01
BALANCE = {"Glm4Moe": {"kind": "expert_bias", "update_rate": RATE}}


@dataclass(frozen=True)
class Split:
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int | None = None
    sp: bool = True
    distributed: bool = False
    imported: bool = False
    """Whether it starts from what ``tepo import`` made, and not from a Hugging Face folder."""
    resumes: Split | None = None

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def name(self) -> str:
        sizes = "".join(f"{name}{getattr(self, name)}" for name in ("tp", "pp", "dp", "ep"))
        expert_tp = "" if self.etp is None else f"etp{self.etp}"
        return (
            sizes + "-no-sp" * (not self.sp) + expert_tp + "-distributed" * self.distributed + "-resumed" * bool(self.resumes)
        )

    @property
    def config(self) -> dict[str, Any]:
        sizes = {name: getattr(self, name) for name in ("tp", "pp", "dp", "ep", "etp")}
        return sizes | {"sequence_parallel": self.tp > 1 and self.sp}


SINGLE = Split()
ACROSS = Split(tp=2, dp=2, ep=4, etp=1, distributed=True, imported=True)

WITH_EP = [
    SINGLE,
    ACROSS,
    Split(tp=2, dp=2, ep=2),
    Split(pp=2, dp=2, ep=2, resumes=SINGLE),
    Split(dp=2, ep=2, distributed=True, resumes=ACROSS),
    Split(tp=2, ep=2, etp=1),
]
WITHOUT = [
    *(SINGLE, Split(tp=2, sp=False, imported=True), Split(tp=2), Split(pp=2, imported=True)),
    Split(tp=2, pp=2, imported=True),
]
SPLIT_HEADS = [model for model, settings in DENSE.items() if "num_key_value_heads" not in settings]
"""The others have 3 key/value heads, which tensor parallelism cannot split."""

PAIRS = [
    *((split, model) for split in WITHOUT for model in (DENSE if split.tp == 1 else SPLIT_HEADS)),
    *((split, model) for split in WITH_EP for model in WITH_EXPERTS),
]


def cases(condition: Callable[[Split], bool] = lambda split: True) -> pytest.MarkDecorator:
    chosen = [pytest.param(split, model, id=f"{split.name}-{model}") for split, model in PAIRS if condition(split)]
    return pytest.mark.parametrize(("split", "model"), chosen)


class Worlds:
    """Runs all splits of one world size in one world, once, on demand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.batch = pack(read_rollouts(folder / "rollouts", 0))
        self._run_world = cache(self._start)
        self.oracle = cache(self._oracle)

    def run(self, split: Split) -> Path:
        self._run_world(split.world)
        return self.folder / split.name

    def report(self, split: Split, model: str) -> dict[str, Any]:
        return json.loads((self.run(split) / model / "report.json").read_text())

    def _start(self, size: int) -> None:
        runs = []
        for split, model in ((split, model) for split, model in PAIRS if split.world == size):
            out = self.folder / split.name / model
            out.mkdir(parents=True)
            start = self.run(split.resumes) / model / "checkpoints" / "step_000001" if split.resumes else None
            config = self._config(split, model)
            if split.imported:
                import_model(self.folder / model, out / "shards", tp=split.tp, pp=split.pp)
                config["model"]["shards"] = str(out / "shards")
            runs.append({"config": config, "out": str(out), "resume": start and str(start)})
        case = self.folder / f"world-{size}.json"
        case.write_text(json.dumps({"runs": runs, "rollouts": str(self.folder / "rollouts")}))
        run_world("models", size, case)

    def _config(self, split: Split, model: str) -> dict[str, Any]:
        return {
            "model": {"path": str(self.folder / model)},
            "engine": {"parallel": split.config, "micro_batch_tokens": 70, "moe_balance": BALANCE.get(model, {})},
            "optimizer": {"lr": 1e-3, "clip_grad": 0.0, "distributed": split.distributed},
            "rollout": {"sampling": {"temperature": 1.0}},
        }

    def _oracle(self, model: str) -> Oracle:
        return oracle_of(self.folder / model, self.batch)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    folder = tmp_path_factory.mktemp("models")
    for name in (*DENSE, *WITH_EXPERTS):
        save_model(name, folder / name, layers=2 if name in WITH_EXPERTS else 4)
    write_rollouts(folder / "rollouts", 0, short_rollouts())
    return Worlds(folder)


def same_bytes(found: Path, expected: Path) -> bool:
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (found, expected))
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


@cases()
def test_scores_match_transformers_in_float64(worlds: Worlds, split: Split, model: str) -> None:
    report, oracle, mask_T = worlds.report(split, model), worlds.oracle(model), worlds.batch.loss_mask_T
    assert mask_T.sum() == worlds.batch.num_tokens - worlds.batch.num_sequences
    assert oracle.logprobs_T.std() > 0.1
    for name, expected_T in (("logprobs", oracle.logprobs_T), ("entropy", oracle.entropy_T)):
        torch.testing.assert_close(torch.tensor(report[name]).double()[mask_T], expected_T[mask_T], atol=2e-5, rtol=0)


@cases()
def test_exports_are_the_model_and_its_checkpoint(worlds: Worlds, split: Split, model: str) -> None:
    out = worlds.run(split) / model
    assert same_bytes(out / "initial", worlds.folder / model)
    if split.resumes is None:
        shapes = tensor_shapes(read_model_spec(worlds.folder / model))
        moments = {name: shape for name, shape in shapes.items() if not is_always_fp32(name)}
        for kind in ("master", "exp_avg", "exp_avg_sq"):
            stored = StoredWeights.open_boxes(out / "checkpoints" / "step_000001", kind)
            assert sum(len(boxes) for boxes in stored.boxes.values()) == sum(
                len({box.box for box in boxes}) for boxes in stored.boxes.values()
            )
            stored.check(shapes if kind == "master" else moments)
    export_model(out / "checkpoints" / "step_000002", out / "converted")
    assert same_bytes(out / "converted", out / "trained")


@cases(lambda split: split.resumes is None)
def test_loss_and_gradients_match_transformers_in_float64(worlds: Worlds, split: Split, model: str) -> None:
    oracle, (loss, norm) = worlds.oracle(model), worlds.report(split, model)["updates"][0]
    assert loss == pytest.approx(oracle.loss, rel=1e-5)
    assert norm == pytest.approx(oracle.norm, rel=1e-5)
    assert_first_moments(worlds.run(split) / model / "checkpoints" / "step_000001", oracle.gradients)


@pytest.mark.parametrize("split", [pytest.param(split, id=split.name) for split in WITH_EP if split.resumes is None])
def test_biases_move_against_the_load_of_the_whole_batch(worlds: Worlds, split: Split) -> None:
    """By Megatron's own rule: all by the same step, up where an expert has fewer tokens than the mean."""
    before = load_file(worlds.folder / "Glm4Moe" / "model.safetensors")
    stored = StoredWeights.open_boxes(worlds.run(split) / "Glm4Moe" / "checkpoints" / "step_000001", "master")
    loads = worlds.oracle("Glm4Moe").loads
    assert loads
    for name, load_E in loads.items():
        assert load_E.sum() == worlds.batch.num_tokens * 2
        found_E = torch.empty(load_E.numel())
        stored.read(name, Box((0,), (load_E.numel(),)), found_E)
        expected_E = before[name] + RATE * (load_E.double().mean() - load_E).sign()
        torch.testing.assert_close(found_E, expected_E.float(), atol=1e-7, rtol=0)
        assert not torch.equal(found_E, before[name])


@cases(lambda split: split != SINGLE)
def test_the_second_step_is_that_of_one_rank(worlds: Worlds, split: Split, model: str) -> None:
    """Also where the first step came from another split's checkpoint, optimizer states included."""
    expected, found = (worlds.report(run, model)["updates"][-1] for run in (SINGLE, split))
    assert found == pytest.approx(expected, rel=1e-5)
    before = load_file(worlds.folder / model / "model.safetensors")
    ours, theirs = (load_file(worlds.run(run) / model / "trained" / "model.safetensors") for run in (split, SINGLE))
    moved = torch.cat([(theirs[name] - before[name]).flatten() for name in before])
    apart = torch.cat([(ours[name] - theirs[name]).flatten() for name in before])
    assert apart.norm() < 2e-3 * moved.norm()


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"tp": 2}, r"tp = 2 with experts needs sequence parallelism.*sequence_parallel = true"),
        (
            {"tp": 2, "sequence_parallel": True, "etp": 1},
            r"etp = 1 differs from tp = 2, which Megatron trains right only with ep > 1",
        ),
        ({"dp": 3, "ep": 3}, r"ep = 3 does not divide the model's 4 experts"),
    ],
)
def test_a_split_that_megatron_would_train_wrongly_is_refused(worlds: Worlds, parallel: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_trainer_split(read_model_spec(worlds.folder / "Mixtral"), ParallelConfig(**parallel))


def test_experts_that_do_not_fit_the_ranks_of_a_stage_are_refused() -> None:
    with pytest.raises(ValueError, match=r"ep × etp = 2 × 2 does not divide the 2 ranks of a pipeline stage"):
        EngineConfig(parallel={"tp": 2, "ep": 2, "sequence_parallel": True})
