"""LoRA under every kind of split: gradients are those of float64, updates those of one rank, and frozen weights stay so."""

from __future__ import annotations

import json
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
from tepo_megatron.sampler.rollout_file import read_rollouts, write_rollouts
from tepo_megatron.trainer.packing import pack
from tepo_megatron.weights.adapters import adapted_tensors, adapter_names, adapter_shapes
from tepo_megatron.weights.architecture import read_model_spec
from tepo_megatron.weights.storage.hf_folder import PEFT_PREFIX, AdapterSettings, check_peft_folder, write_model
from tepo_megatron.weights.storage.stored import StoredWeights
from tepo_megatron.weights.table import tensor_shapes
from tests.support.float64 import Oracle, oracle_of
from tests.support.launch import run_world
from tests.support.model_worlds import assert_first_moments, save_model, save_random_model, short_rollouts

SIZES = ("tp", "pp", "dp", "cp", "vpp", "ep")
LORA = LoraConfig(rank=3, alpha=5)


@dataclass(frozen=True)
class Run:
    """A model under a split; ``resumes``: another run, from whose first checkpoint it goes on."""

    model: str
    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int | None = None
    sp: bool = False
    engine: tuple[tuple[str, Any], ...] = ()
    """Other settings of the engine."""
    distributed: bool = False
    resumes: Run | None = None

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def name(self) -> str:
        sizes = "".join(f"{name}{getattr(self, name)}" for name in SIZES if getattr(self, name) != 1) or "single"
        expert_tp = "" if self.etp is None else f"etp{self.etp}"
        return f"{self.model}-{sizes}{expert_tp}" + "-resumed" * bool(self.resumes)

    @property
    def config(self) -> dict[str, Any]:
        sizes = {name: getattr(self, name) for name in (*SIZES, "etp")}
        return sizes | {"sequence_parallel": self.sp}


DENSE, MOE = Run("Qwen2"), Run("Mixtral")
SINGLES = {"Qwen2": DENSE, "Mixtral": MOE}
RECOMPUTED = (("recompute", "full"), ("head", "fused"))
OVERLAPPED = (("overlap_grad_reduce", True), ("overlap_param_gather", True))
TP_PP = Run("Qwen2", tp=2, pp=2, vpp=2, sp=True, engine=RECOMPUTED)
OTHERS = [
    TP_PP,
    Run("Qwen2", tp=2, dp=2, distributed=True, engine=OVERLAPPED),
    Run("Qwen2", cp=2),
    Run("Mixtral", tp=2, dp=2, ep=2, sp=True, distributed=True),
    Run("Mixtral", tp=2, ep=2, etp=1, sp=True),
    Run("Qwen2", dp=2, distributed=True, resumes=TP_PP),
]
RUNS = [DENSE, MOE, *OTHERS]
NAMED = [pytest.param(run, id=run.name) for run in RUNS]
UNINTERRUPTED = [pytest.param(run, id=run.name) for run in RUNS if run.resumes is None]


def targets_of(model: str) -> tuple[str, ...]:
    return ("all-linear",) if model == "Mixtral" else ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")


class Worlds:
    """Runs all of one world size in one world, once, on demand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.batch = pack(read_rollouts(folder / "rollouts", 0))
        self._run_world = cache(self._start)
        self.oracle = cache(self._oracle)

    def run(self, run: Run) -> Path:
        self._run_world(run.world)
        return self.folder / run.name

    def report(self, run: Run) -> dict[str, Any]:
        return json.loads((self.run(run) / "report.json").read_text())

    def merged(self, model: str, adapter: Path) -> dict[str, Tensor]:
        """The model with the adapters of a PEFT folder, in float64, as PEFT defines it."""
        weights = {name: tensor.double() for name, tensor in load_file(self.folder / model / "model.safetensors").items()}
        found = {name.removeprefix(PEFT_PREFIX): tensor.double() for name, tensor in load_file(adapter / PEFT_WEIGHTS).items()}
        for name in adapted_tensors({name: tuple(tensor.shape) for name, tensor in weights.items()}, targets_of(model)):
            a, b = (found[part] for part in adapter_names(name))
            weights[name] += LORA.scale * b @ a
        return weights

    def _start(self, size: int) -> None:
        runs = []
        for run in (run for run in RUNS if run.world == size):
            out = self.folder / run.name
            out.mkdir()
            start = self.run(run.resumes) / "checkpoints" / "step_000001" if run.resumes else None
            runs.append({"config": self._config(run), "out": str(out), "resume": start and str(start)})
        case = self.folder / f"world-{size}.json"
        case.write_text(json.dumps({"runs": runs, "rollouts": str(self.folder / "rollouts")}))
        run_world("lora", size, case)

    def _config(self, run: Run) -> dict[str, Any]:
        adapters = {"target_modules": targets_of(run.model), "path": self.folder / f"{run.model}-adapters"}
        return {
            "model": {"path": str(self.folder / run.model), "lora": LORA.model_copy(update=adapters).model_dump(mode="json")},
            "engine": {"parallel": run.config, "micro_batch_tokens": 70, **dict(run.engine)},
            "optimizer": {"lr": 1e-3, "clip_grad": 0.0, "distributed": run.distributed},
            "rollout": {"sampling": {"temperature": 1.0}},
        }

    def _oracle(self, model: str) -> tuple[Oracle, Oracle]:
        """The model without adapters, and with those that training starts from."""
        merged = self.folder / f"{model}-merged"
        tensors = self.merged(model, self.folder / f"{model}-adapters").items()
        write_model(merged, tensors, source=self.folder / model, dtype=torch.float64)
        return oracle_of(self.folder / model, self.batch), oracle_of(merged, self.batch)


PEFT_WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    folder = tmp_path_factory.mktemp("lora")
    sizes = {"vocab_size": 61, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 4, "num_attention_heads": 6}
    sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": True}
    save_random_model("Qwen2", sizes, folder / "Qwen2", seed=5)
    save_model("Mixtral", folder / "Mixtral", layers=2)
    write_rollouts(folder / "rollouts", 0, short_rollouts())
    generator = torch.Generator().manual_seed(7)
    for model in SINGLES:
        shapes = tensor_shapes(read_model_spec(folder / model))
        wanted = adapter_shapes(shapes, adapted_tensors(shapes, targets_of(model)), LORA.rank)
        tensors = {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in wanted.items()}
        settings = AdapterSettings(LORA.rank, LORA.alpha, False, 0.0, targets_of(model))
        settings.write(folder / f"{model}-adapters", tensors, base_model=model)
    return Worlds(folder)


@pytest.mark.parametrize("run", NAMED)
def test_scores_are_those_of_the_merged_model_and_references_those_without_adapters(worlds: Worlds, run: Run) -> None:
    report, mask_T = worlds.report(run), worlds.batch.loss_mask_T
    base, merged = worlds.oracle(run.model)
    assert (base.logprobs_T - merged.logprobs_T).abs().max() > 0.1
    for name, oracle in (("logprobs", merged), ("reference", base)):
        found_T = torch.tensor(report[name]).double()
        torch.testing.assert_close(found_T[mask_T], oracle.logprobs_T[mask_T], atol=2e-5, rtol=0)


@pytest.mark.parametrize("run", UNINTERRUPTED)
def test_gradients_match_transformers_in_float64(worlds: Worlds, run: Run) -> None:
    oracle = worlds.oracle(run.model)[1]
    adapters = load_file(worlds.folder / f"{run.model}-adapters" / PEFT_WEIGHTS)
    expected: dict[str, Tensor] = {}
    for name in adapted_tensors({name: tuple(each.shape) for name, each in oracle.gradients.items()}, targets_of(run.model)):
        names, gradient = adapter_names(name), LORA.scale * oracle.gradients[name]
        a, b = (adapters[PEFT_PREFIX + part].double() for part in names)
        expected |= dict(zip(names, (b.t() @ gradient, gradient @ a.t()), strict=True))
    loss, norm = worlds.report(run)["updates"][0]
    assert loss == pytest.approx(oracle.loss, rel=1e-5)
    assert norm == pytest.approx(float(torch.stack([each.norm() for each in expected.values()]).norm()), rel=1e-5)
    assert_first_moments(worlds.run(run) / "checkpoints" / "step_000001", expected)


@pytest.mark.parametrize("run", [pytest.param(run, id=run.name) for run in OTHERS])
def test_two_steps_are_those_of_one_rank(worlds: Worlds, run: Run) -> None:
    """Also where the first step came from another split's checkpoint, optimizer states included."""
    single = SINGLES[run.model]
    expected, found = (worlds.report(each)["updates"][-1] for each in (single, run))
    assert found == pytest.approx(expected, rel=1e-5)
    before = load_file(worlds.folder / f"{run.model}-adapters" / PEFT_WEIGHTS)
    ours, theirs = (load_file(worlds.run(each) / "adapter" / PEFT_WEIGHTS) for each in (run, single))
    moved = torch.cat([(theirs[name] - before[name]).flatten() for name in before])
    apart = torch.cat([(ours[name] - theirs[name]).flatten() for name in before])
    assert apart.norm() < 2e-3 * moved.norm()


@pytest.mark.parametrize("run", NAMED)
def test_only_adapters_are_kept_and_exports_are_merged(worlds: Worlds, run: Run) -> None:
    out = worlds.run(run)
    shapes = tensor_shapes(read_model_spec(worlds.folder / run.model))
    wanted = adapter_shapes(shapes, adapted_tensors(shapes, targets_of(run.model)), LORA.rank)
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        StoredWeights.open_boxes(out / "checkpoints" / "step_000002", kind).check(wanted)
    if not run.distributed:
        spec = read_model_spec(worlds.folder / run.model)
        lora = LORA.model_copy(update={"target_modules": targets_of(run.model)})
        planned = ModelSplit(spec, ParallelConfig(**run.config)).stages(lora)
        assert set(worlds.report(run)["optimized"]) == {count.total for count in planned}
    found = load_file(out / "trained" / "model.safetensors")
    for name, expected in worlds.merged(run.model, out / "adapter").items():
        if name in found:  # a tied head is the embedding
            torch.testing.assert_close(found[name].double(), expected, atol=1e-6, rtol=1e-6)


def test_peft_loads_the_folder_and_gives_the_same_logits(worlds: Worlds) -> None:
    """Also the other way round: what PEFT saves is a folder to start from."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    out, tokens = worlds.run(TP_PP), worlds.batch.tokens_T[None, :40]
    base = AutoModelForCausalLM.from_pretrained(worlds.folder / "Qwen2", dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, out / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(out / "trained", dtype=torch.float32)
    with torch.no_grad():
        found = adapted(tokens).logits
        torch.testing.assert_close(found, merged(tokens).logits, atol=1e-5, rtol=0)
        with adapted.disable_adapter():
            assert (found - adapted(tokens).logits).abs().max() > 0.1
    adapted.save_pretrained(out / "saved-by-peft")
    shapes = tensor_shapes(read_model_spec(worlds.folder / "Qwen2"))
    wanted = adapter_shapes(shapes, adapted_tensors(shapes, targets_of("Qwen2")), LORA.rank)
    check_peft_folder(out / "saved-by-peft", wanted, rank=LORA.rank, alpha=LORA.alpha, rslora=False)
