"""LoRA under every kind of split: gradients are those of float64, updates those of one rank, and frozen weights stay so."""

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tepo_megatron.config import LoraConfig, ParallelConfig
from tepo_megatron.plan.shapes import ModelSplit
from tepo_megatron.trainer.packing import pack
from tepo_megatron.weights.adapters import adapted_tensors, adapter_names, adapter_shapes
from tepo_megatron.weights.architecture import read_model_spec
from tepo_megatron.weights.storage.hf_folder import PEFT_PREFIX, AdapterSettings, check_peft_folder, write_model
from tepo_megatron.weights.storage.stored import StoredWeights
from tepo_megatron.weights.table import tensor_shapes
from tests.support.engines import (
    MeanSurprise,
    Split,
    Worlds,
    assert_first_moments,
    assert_moved_alike,
    make_engine,
    save_checkpoint,
    short_rollouts,
    update_twice,
)
from tests.support.float64 import Oracle, oracle_of
from tests.support.launch import run_dist
from tests.support.random_models import random_model

LORA = LoraConfig(rank=3, alpha=5)
PEFT_WEIGHTS = "adapter_model.safetensors"
BATCH = pack(short_rollouts())


@dataclass(frozen=True, kw_only=True)
class Run(Split):
    model: str = "Qwen2-tied"
    recompute: str = "none"
    head: str = "logits"
    overlap: bool = False

    @property
    def engine(self) -> dict[str, Any]:
        overlap = {"overlap_grad_reduce": self.overlap, "overlap_param_gather": self.overlap}
        return {"parallel": self.parallel, "recompute": self.recompute, "head": self.head, **overlap}


SINGLES = {"Qwen2-tied": Run(), "Mixtral": Run(model="Mixtral")}
TP_PP = Run(tp=2, pp=2, vpp=2, sp=True, recompute="full", head="fused")
OTHERS = [
    TP_PP,
    Run(tp=2, dp=2, distributed=True, overlap=True),
    Run(cp=2),
    Run(model="Mixtral", tp=2, dp=2, ep=2, sp=True, distributed=True),
    Run(model="Mixtral", tp=2, ep=2, etp=1, sp=True),
    Run(dp=2, distributed=True, resumes=TP_PP),
]
RUNS = [*SINGLES.values(), *OTHERS]
on_all = pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)


def targets_of(model: str) -> tuple[str, ...]:
    return ("all-linear",) if model == "Mixtral" else ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")


def wanted_adapters(model: Path) -> dict[str, tuple[int, ...]]:
    shapes = tensor_shapes(read_model_spec(model))
    return adapter_shapes(shapes, adapted_tensors(shapes, targets_of(model.name)), LORA.rank)


def start(run: Run, folder: Path, path: Path | None) -> Any:
    adapters = {"target_modules": targets_of(run.model), "path": path}
    return make_engine(
        {
            "model": {"path": str(folder / run.model), "lora": LORA.model_copy(update=adapters).model_dump(mode="json")},
            "engine": {**run.engine, "micro_batch_tokens": 70},
            "optimizer": {"lr": 1e-3, "clip_grad": 0.0, "distributed": run.distributed},
            "rollout": {"sampling": {"temperature": 1.0}},
        },
        MeanSurprise(needs_reference=True),
    )


def train(run: Run, folder: Path) -> dict[str, Any]:
    from tepo_megatron.trainer.megatron.parallel.collectives import all_gather_json

    out = folder / run.name
    start(run, folder, None).weights.export_adapters(out / "fresh")
    engine = start(run, folder, folder / f"{run.model}-adapters")
    policy = engine.policy
    engine.weights.version(0)  # a fresh run's servers get weights before any forward pass
    frozen = {name: param.detach().clone() for name, param in policy.params.items()}
    batch = engine.score(engine.batch_from_root(short_rollouts() if engine.ranks.rank == 0 else None))
    report = {"logprobs": batch.old_logprobs_T, "reference": batch.reference_logprobs_T}
    report["updates"] = update_twice(engine, batch, run, folder)
    assert all(torch.equal(param, frozen[name]) for name, param in policy.params.items())
    assert not any(hasattr(param, "main_grad") or param.grad is not None for param in policy.params.values())
    buffers = [buffer for ddp in policy.ddp for buffer in (*ddp.buffers, *ddp.expert_parallel_buffers)]
    assert {id(param) for buffer in buffers for param in buffer.params} == {id(param) for param in policy.trained.values()}
    optimized = sum(param.numel() for group in policy.optimizer.param_groups for param in group["params"])
    report["optimized"] = all_gather_json(optimized, device=torch.device("cpu"), group=engine.host_group)
    engine.weights.export(out / "trained")
    engine.weights.export_adapters(out / "adapter")
    return report


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds[Run]:
    folder = tmp_path_factory.mktemp("lora")
    generator = torch.Generator().manual_seed(7)
    for model, layers in (("Qwen2-tied", 4), ("Mixtral", 2)):
        random_model(model, num_hidden_layers=layers).save_pretrained(folder / model)
        tensors = {
            name: 0.1 * torch.randn(shape, generator=generator) for name, shape in wanted_adapters(folder / model).items()
        }
        settings = AdapterSettings(LORA.rank, LORA.alpha, False, 0.0, targets_of(model))
        settings.write(folder / f"{model}-adapters", tensors, base_model=model, folder=folder / model)
    return Worlds(folder, RUNS, train)


def merged(model: Path, adapter: Path) -> dict[str, Tensor]:
    """The model with the adapters of a PEFT folder, in float64, as PEFT defines it."""
    weights = {name: tensor.double() for name, tensor in load_file(model / "model.safetensors").items()}
    found = {name.removeprefix(PEFT_PREFIX): tensor.double() for name, tensor in load_file(adapter / PEFT_WEIGHTS).items()}
    for name in adapted_tensors({name: tuple(tensor.shape) for name, tensor in weights.items()}, targets_of(model.name)):
        a, b = (found[part] for part in adapter_names(name))
        weights[name] += LORA.scale * b @ a
    return weights


@cache
def oracles(model: Path) -> tuple[Oracle, Oracle]:
    """The model without adapters, and with those that training starts from."""
    tensors, out = merged(model, model.with_name(f"{model.name}-adapters")), model.with_name(f"{model.name}-merged")
    write_model(out, tensors.items(), source=model, dtype=torch.float64)
    return oracle_of(model, BATCH), oracle_of(out, BATCH)


@on_all
def test_scores_are_those_of_the_merged_model_and_references_those_without_adapters(worlds: Worlds[Run], run: Run) -> None:
    report, mask_T = worlds.report(run), BATCH.loss_mask_T
    base, with_adapters = oracles(worlds.folder / run.model)
    assert (base.logprobs_T - with_adapters.logprobs_T).abs().max() > 0.1
    for name, oracle in (("logprobs", with_adapters), ("reference", base)):
        torch.testing.assert_close(report[name].double()[mask_T], oracle.logprobs_T[mask_T], atol=2e-5, rtol=0)


@pytest.mark.parametrize("run", [run for run in RUNS if run.resumes is None], ids=lambda run: run.name)
def test_gradients_match_transformers_in_float64(worlds: Worlds[Run], run: Run) -> None:
    oracle = oracles(worlds.folder / run.model)[1]
    adapters = load_file(worlds.folder / f"{run.model}-adapters" / PEFT_WEIGHTS)
    expected: dict[str, Tensor] = {}
    for name in adapted_tensors({name: tuple(each.shape) for name, each in oracle.gradients.items()}, targets_of(run.model)):
        names, gradient = adapter_names(name), LORA.scale * oracle.gradients[name]
        a, b = (adapters[PEFT_PREFIX + part].double() for part in names)
        expected |= dict(zip(names, (b.t() @ gradient, gradient @ a.t()), strict=True))
    loss, norm = worlds.report(run)["updates"][0]
    assert loss == pytest.approx(oracle.loss, rel=1e-5)
    assert norm == pytest.approx(float(torch.stack([each.norm() for each in expected.values()]).norm()), rel=1e-5)
    assert_first_moments(worlds.checkpoint(run), expected)


@pytest.mark.parametrize("run", OTHERS, ids=lambda run: run.name)
def test_two_steps_are_those_of_one_rank(worlds: Worlds[Run], run: Run) -> None:
    """Also where the first step came from another split's checkpoint, optimizer states included."""
    runs = (run, SINGLES[run.model])
    found, expected = (worlds.report(each)["updates"][-1] for each in runs)
    assert found == pytest.approx(expected, rel=1e-5)
    ours, theirs = (load_file(worlds.folder / each.name / "adapter" / PEFT_WEIGHTS) for each in runs)
    assert_moved_alike(load_file(worlds.folder / f"{run.model}-adapters" / PEFT_WEIGHTS), ours, theirs)


@on_all
def test_fresh_adapters_are_those_of_one_rank_and_add_nothing(worlds: Worlds[Run], run: Run) -> None:
    ours, theirs = (load_file(worlds.checkpoint(each).parent / "fresh" / PEFT_WEIGHTS) for each in (run, SINGLES[run.model]))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name])
        most = 0.0 if ".lora_B." in name else tensor.shape[1] ** -0.5
        assert tensor.abs().max() <= most
        assert tensor.std() == pytest.approx(most / 3**0.5, rel=0.1)  # uniform


@on_all
def test_only_adapters_are_kept_and_exports_are_merged(worlds: Worlds[Run], run: Run) -> None:
    model, out = worlds.folder / run.model, worlds.folder / run.name
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        StoredWeights.open_boxes(worlds.checkpoint(run, 2), kind).check(wanted_adapters(model))
    if not run.distributed:
        lora = LORA.model_copy(update={"target_modules": targets_of(run.model)})
        planned = ModelSplit(read_model_spec(model), ParallelConfig(**run.parallel)).stages(lora)
        assert set(worlds.report(run)["optimized"]) == {count.total for count in planned}
    found = load_file(out / "trained" / "model.safetensors")
    for name, expected in merged(model, out / "adapter").items():
        if name in found:  # a tied head is the embedding
            torch.testing.assert_close(found[name].double(), expected, atol=1e-6, rtol=1e-6)


def test_peft_loads_the_folder_and_gives_the_same_logits(worlds: Worlds[Run]) -> None:
    """Also the other way round: what PEFT saves is a folder to start from."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    out, tokens, model = worlds.checkpoint(TP_PP).parent, BATCH.tokens_T[None, :40], worlds.folder / TP_PP.model
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, out / "adapter")
    trained = AutoModelForCausalLM.from_pretrained(out / "trained", dtype=torch.float32)
    with torch.no_grad():
        found = adapted(tokens).logits
        torch.testing.assert_close(found, trained(tokens).logits, atol=1e-5, rtol=0)
        with adapted.disable_adapter():
            assert (found - adapted(tokens).logits).abs().max() > 0.1
    adapted.save_pretrained(out / "saved-by-peft")
    check_peft_folder(out / "saved-by-peft", wanted_adapters(model), rank=LORA.rank, alpha=LORA.alpha, rslora=False)


def train_experts_only(_rank: int, _world: int, model: Path, folder: Path) -> list[float]:
    split = Split(dp=2, ep=2)
    lora = {"rank": 3, "alpha": 5, "target_modules": ("w1", "w2", "w3")}
    engine = make_engine(
        {"model": {"path": str(model), "dtype": "bfloat16", "lora": lora}, "engine": {"parallel": split.parallel}},
        MeanSurprise(),
    )
    engine.offload()
    engine.onload()
    batch = engine.score(engine.batch_from_root(short_rollouts() if engine.ranks.rank == 0 else None))
    first = engine.update(batch)
    engine.checkpoints.load(save_checkpoint(engine, folder, step=1, state={}))
    return [first.loss, engine.update(batch).loss]


def test_adapters_on_experts_alone_are_offloaded_saved_and_resumed(tmp_path: Path) -> None:
    """Megatron then has an optimizer without anything to train."""
    random_model("Mixtral", num_hidden_layers=2).save_pretrained(tmp_path / "model")
    first, second = run_dist(2, train_experts_only, tmp_path / "model", tmp_path / "checkpoints")
    assert first == second
    assert math.isfinite(sum(first))


def resume_under_another_split(_rank: int, _world: int, model: Path, folder: Path) -> list[str]:
    def start(split: Split) -> Any:
        lora = {"rank": 8, "alpha": 16, "target_modules": ("all-linear",)}
        raw = {"model": {"path": str(model), "lora": lora}, "engine": {"parallel": split.parallel}, "optimizer": {"lr": 0.1}}
        return make_engine(raw, MeanSurprise())

    engine = start(Split(tp=2))
    engine.update(engine.score(engine.batch_from_root(short_rollouts() if engine.ranks.rank == 0 else None)))
    saved, digest = save_checkpoint(engine, folder, step=1, state={}), engine.weights.adapters_digest()
    engine = start(Split(dp=2))
    state = engine.checkpoints.load(saved)
    engine.policy.lora.params[min(engine.policy.lora.params)].data.view(-1)[0] += 1
    return [digest, state["adapters_digest"], engine.weights.adapters_digest()]


def test_a_resume_is_checked_by_what_was_stored_as_merged_bits_depend_on_the_split(tmp_path: Path) -> None:
    """A product of 8 columns a rank has other bits than one of 16 columns."""
    random_model("Llama", num_hidden_layers=1, hidden_size=32, intermediate_size=16).save_pretrained(tmp_path / "model")
    for saved, read, changed in run_dist(2, resume_under_another_split, tmp_path / "model", tmp_path / "checkpoints"):
        assert saved == read
        assert changed != read
