"""Interleaved pipeline stages (VPP), and stages with unequal numbers of layers: scores, losses, gradients, weights and
checkpoints are those of one rank.

One world a number of ranks takes one layout after the other; the micro-batches of every one have other lengths.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tepo_megatron.config import ParallelConfig, RunConfig
from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.core.types import Batch
from tepo_megatron.trainer.packing import pack
from tepo_megatron.weights.architecture import read_model_spec
from tepo_megatron.weights.layouts import MegatronParallel, megatron_ranks, pipeline_stages_of
from tests.support.float64 import prompt_logprobs, token_scores
from tests.support.launch import end_model_parallel, run_dist
from tests.support.model_worlds import save_random_model

MODELS: dict[str, dict[str, Any]] = {
    "four": {"num_hidden_layers": 4},
    "tied": {"num_hidden_layers": 4, "tie_word_embeddings": True},
    "eight": {"num_hidden_layers": 8},
    "experts": {"num_hidden_layers": 4, "num_local_experts": 4},
}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "tepo": {"preset": "tepo"},
    "grpo": {"preset": "grpo"},
    "gspo": {"preset": "gspo"},
    "kl": {"preset": "grpo", "kl": {"against": "reference", "coefficient": 0.1}},
}
TEMPERATURE = 0.7
PROMPT = [7, 60, 1, 33, 0, 12, 12, 58]
FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"


@dataclass(frozen=True)
class Layout:
    """One engine of a world. ``moves``: its memory is offloaded and onloaded before each update. ``resumes``: the layout whose
    checkpoint, written after the first update, it loads, writes again, and goes on from.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    first: int | None = None
    last: int | None = None
    sp: bool = False
    distributed: bool = False
    model: str = "four"
    objective: str = "tepo"
    head: str = "logits"
    moves: bool = False
    resumes: Layout | None = None

    @property
    def parallel(self) -> dict[str, Any]:
        split = {"tp": self.tp, "pp": self.pp, "vpp": self.vpp, "dp": self.dp, "cp": self.cp, "ep": self.ep}
        split["sequence_parallel"] = self.sp
        return split | {FIRST: self.first, LAST: self.last}

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def name(self) -> str:
        sizes = {"tp": self.tp, "pp": self.pp, "vpp": self.vpp, "dp": self.dp, "cp": self.cp}
        split = "".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "one"
        ends = [f"first{self.first}" * bool(self.first), f"last{self.last}" * bool(self.last)]
        flags = ["sp" * self.sp, "distopt" * self.distributed, "resumed" * bool(self.resumes), "fused" * (self.head == "fused")]
        return "-".join(part for part in (split, *ends, *flags, self.model, self.objective) if part)


VPP = Layout(pp=2, vpp=2)
TP = Layout(tp=2, resumes=VPP)
OTHERS = [
    *(Layout(pp=2, vpp=2, objective=name, moves=name == "kl") for name in OBJECTIVES),
    Layout(pp=2, vpp=2, model="tied", head="fused"),
    Layout(pp=2, vpp=2, first=2, model="eight"),
    Layout(pp=2, last=1, model="tied"),
    TP,
    Layout(pp=2, vpp=2, resumes=TP),
    *(Layout(tp=2, pp=2, vpp=2, sp=name == "grpo", objective=name) for name in OBJECTIVES),
    Layout(tp=2, pp=2, vpp=2, model="tied"),
    Layout(dp=2, pp=2, vpp=2, distributed=True),
    Layout(dp=2, pp=2, vpp=2, ep=2, model="experts"),
    Layout(cp=2, pp=2, vpp=2, model="tied"),
    Layout(pp=4, vpp=2, model="eight"),
    Layout(pp=4, first=1, last=1, model="eight"),
]
RECORDED_AND_NOT = [
    Layout(),
    VPP,
    Layout(pp=2, last=1, model="tied"),
    Layout(tp=2, pp=2, vpp=2),
    Layout(dp=2, pp=2, vpp=2, distributed=True),
    Layout(cp=2, pp=2, vpp=2, model="tied"),
]
"""Those that repeat their last update without recording."""

SINGLE = [Layout(model=model, objective=name) for model, name in sorted({(each.model, each.objective) for each in OTHERS})]


def rollouts() -> list[Rollout]:
    """Three groups of four, no two alike in length."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for at in range(12):
        prompt, length = 1 + at // 4, 3 + (7 * at) % 17
        ids = tuple(torch.randint(3, 61, (prompt + length,), generator=generator).tolist())
        logprobs = tuple((-4 * torch.rand(length, generator=generator)).tolist())
        reward = float(at % 3 == 0)
        found.append(
            Rollout(f"p{at // 4}", at // 4, ids[:prompt], ids[prompt:], logprobs, "stop", WeightsVersion(0), reward=reward)
        )
    return found


def train(layout: Layout, folder: Path) -> dict[str, Any]:
    """Loads, scores, and makes two updates with a checkpoint between them; what the tests look at."""

    from tepo_megatron.run.step.minibatches import minibatches
    from tepo_megatron.trainer.megatron.engine import Engine

    config = RunConfig.model_validate(
        {
            "model": {"path": str(folder / layout.model)},
            "engine": {"platform": "cpu", "parallel": layout.parallel, "micro_batch_tokens": 30, "head": layout.head},
            "optimizer": {"lr": 1e-4, "warmup_steps": 2, "weight_decay": 0.01, "distributed": layout.distributed},
            "objective": OBJECTIVES[layout.objective],
            "rollout": {"sampling": {"temperature": TEMPERATURE}, "server": {"placement": "colocated"}},
            "train": {"minibatches": 2, "steps": 1},
        }
    )
    engine = Engine(config, folder / layout.model, shares_gpus=layout.moves)
    assert {name: tuple(param.shape) for name, param in engine.policy.params.items()} == dict(
        engine.layouts[engine.ranks.rank].params
    )
    report: dict[str, Any] = {"initial": dict(engine.weights.stream()), "updates": [], "tokens": []}
    batch = engine.batch_from_root(rollouts() if engine.ranks.rank == 0 else None)
    forwarded: list[int] = []
    hook = engine.policy.chunks[-1].register_forward_pre_hook(lambda _, inputs: forwarded.append(inputs[0].numel()))
    whole = engine.score(batch)
    hook.remove()
    report |= {"forwarded": forwarded, "logprobs": whole.old_logprobs_T, "entropy": whole.old_entropy_T}
    report["prompt"] = engine.prompt_logprobs(PROMPT)
    report["noise"] = engine.measure_noise(batch)["entropy/noise/p99"]
    engine.counters.entropy_noise = 0.0
    marked = batch.with_(recorded_S=torch.where(batch.groups_S == 0, -1, torch.arange(batch.num_sequences)))
    parts = [engine.score(part) for part in minibatches(marked, 2, seed=0, step=0)]
    for number, part in enumerate(parts):
        if layout.resumes is not None and number == 0:
            engine.checkpoints.load(folder / layout.resumes.name / "step_000001")
        else:
            if layout.moves:
                engine.offload()
                engine.onload()
            result = engine.update(part)
            assert not result.skipped
            report["updates"].append({"loss": result.loss, "grad_norm": result.grad_norm})
            report["tokens"].append((number, part, result.token_values))
        if number == 0:
            engine.checkpoints.save(folder / layout.name, step=1, state={})
            report["between"] = dict(engine.weights.stream()) if layout.world == 1 else None
    report["trained"] = dict(engine.weights.stream())
    if layout in RECORDED_AND_NOT:
        digest = engine.weights.version(0).digest
        engine.checkpoints.load(folder / layout.name / "step_000001")
        plain = engine.update(parts[1].with_(recorded_S=None))
        assert not plain.token_values
        report["without"] = {"loss": plain.loss, "grad_norm": plain.grad_norm, "sums": plain.sums}
        report["with"] = {**report["updates"][-1], "sums": result.sums}
        report["digests"] = (digest, engine.weights.version(0).digest)
    if layout in (VPP, Layout(tp=2, pp=2, vpp=2)):
        report["planted"] = [planted(engine, parts[1], kind) for kind in ("gradient", "logits")]
    end_model_parallel()
    return report


def planted(engine: Any, part: Batch, kind: str) -> str:
    """Makes an update with a NaN in the last rank's last chunk; what is said of it, after seeing that nothing has changed."""
    before = engine.weights.version(0).digest
    with nan_in_last_chunk(engine, kind):
        result = engine.update(part)
    assert engine.weights.version(0).digest == before
    return str(result.skipped)


@contextmanager
def nan_in_last_chunk(engine: Any, kind: str) -> Iterator[None]:
    handles = []
    if engine.ranks.rank == engine.ranks.world - 1:
        if kind == "gradient":
            param = engine.policy.params["model1.decoder.layers.0.mlp.linear_fc1.weight"]
            handles.append(param.register_hook(lambda gradient: gradient * math.nan))
        else:
            head = engine.policy.chunks[-1].output_layer
            handles.append(head.register_forward_hook(lambda _module, _inputs, output: (output[0] * math.nan, output[1])))
    yield
    for handle in handles:
        handle.remove()


def trained_in_turn(rank: int, world: int, folder: Path, layouts: list[Layout]) -> list[dict[str, Any]]:
    warnings.filterwarnings("ignore")
    os.environ["WORLD_SIZE"] = str(world)
    return [train(layout, folder) for layout in layouts]


class Worlds:
    """Starts each world when it is first asked of."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ranks = cache(self._start)

    def _start(self, world: int) -> dict[Layout, list[dict[str, Any]]]:
        layouts = [layout for layout in (*SINGLE, *OTHERS) if layout.world == world]
        ranks = run_dist(world, trained_in_turn, self.folder, layouts)
        return {layout: [reports[at] for reports in ranks] for at, layout in enumerate(layouts)}

    def ranks(self, layout: Layout) -> list[dict[str, Any]]:
        return self._ranks(layout.world)[layout]

    def single(self, layout: Layout) -> dict[str, Any]:
        return self.ranks(Layout(model=layout.model, objective=layout.objective))[0]

    @cache  # noqa: B019 (it lives as long as its module)
    def oracle(self, model: str) -> dict[str, Any]:
        """Log-probs and entropies of the rollouts, and log-probs of the prompt, by transformers in float64."""
        logprobs, entropy = token_scores(self.folder / model, pack(rollouts()), temperature=TEMPERATURE)
        return {"logprobs": logprobs, "entropy": entropy, "prompt": prompt_logprobs(self.folder / model, PROMPT)}


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    folder = tmp_path_factory.mktemp("stages")
    sizes = {"vocab_size": 61, "hidden_size": 48, "intermediate_size": 80, "max_position_embeddings": 128}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": False}
    for name, settings in MODELS.items():
        family = "Mixtral" if name == "experts" else "Llama"
        save_random_model(family, {**sizes, **heads, **settings}, folder / name, seed=0)
    return Worlds(folder)


@pytest.mark.parametrize("layout", OTHERS, ids=lambda layout: layout.name)
def test_scores_match_transformers_in_float64(worlds: Worlds, layout: Layout) -> None:
    expected, mask_T = worlds.oracle(layout.model), pack(rollouts()).loss_mask_T
    for report in worlds.ranks(layout):
        for name in ("logprobs", "entropy"):
            torch.testing.assert_close(report[name][mask_T].double(), expected[name][mask_T], atol=2e-5, rtol=1e-5)
        assert report["prompt"] == pytest.approx(expected["prompt"], abs=2e-5)
        assert report["noise"] < 1e-4


@pytest.mark.parametrize("layout", OTHERS, ids=lambda layout: layout.name)
def test_updates_and_weights_are_those_of_one_rank(worlds: Worlds, layout: Layout) -> None:
    """Also those of a run that goes on from another layout's checkpoint, optimizer states included."""
    single, reports = worlds.single(layout), worlds.ranks(layout)
    expected = single["updates"][1:] if layout.resumes else single["updates"]
    assert single["updates"][0]["grad_norm"] > 0
    for report in reports:
        assert len(report["updates"]) == len(expected)
        for ours, theirs in zip(report["updates"], expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)
    for name, tensor in single["trained"].items():
        assert not torch.equal(tensor, single["initial"][name]), f"{name} was not trained"
        error = (reports[0]["trained"][name] - tensor).norm() / tensor.norm()
        assert error <= 1e-5, f"{name}: off by {error:.2e} of its norm"


def recorded(part: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tokens of a mini-batch have values, and which of those are responses'."""
    assert part.recorded_S is not None
    at_R = (part.recorded_S >= 0)[part.sequence_index_T].nonzero()[:, 0]
    return at_R, part.loss_mask_T[at_R]


@pytest.mark.parametrize("layout", OTHERS, ids=lambda layout: layout.name)
def test_values_of_single_tokens_are_those_of_one_rank(worlds: Worlds, layout: Layout) -> None:
    """On every rank. In a first update nothing has moved yet: to the last bit."""
    expected = {number: values for number, _, values in worlds.single(layout)["tokens"]}
    for report in worlds.ranks(layout):
        assert [number for number, _, _ in report["tokens"]] == ([1] if layout.resumes else [0, 1])
        for number, part, found in report["tokens"]:
            at_R, own_R = recorded(part)
            assert found["ratio"].shape == at_R.shape
            for name in ("logprob_update", "entropy_change", "ratio"):
                torch.testing.assert_close(found[name][own_R], expected[number][name][own_R], atol=1e-5, rtol=1e-5)
            if number == 0 and layout.model != "experts":
                assert torch.equal(found["logprob_update"][own_R], part.old_logprobs_T[at_R][own_R])
                assert not found["entropy_change"][own_R].any()
                assert not found["masked"].any()
            assert found["masked"].dtype == torch.bool
            if layout.objective == "tepo":
                held = (part.advantages_S[part.sequence_index_T[at_R]] > 0) & (found["entropy_change"] < -1e-5) & own_R
                assert torch.equal(found["masked"], held)
                assert held.any() == (number == 1)


def test_values_of_single_tokens_match_transformers_in_float64(worlds: Worlds) -> None:
    """Of the second update: with the weights after the first one, against those before."""
    report = worlds.ranks(Layout())[0]
    number, part, found = report["tokens"][1]
    at_R, own_R = recorded(part)
    before, after = (
        token_scores(worlds.folder / "four", part, temperature=TEMPERATURE, weights=report[name])
        for name in ("initial", "between")
    )
    assert number == 1
    torch.testing.assert_close(found["logprob_update"][own_R].double(), after[0][at_R][own_R], atol=2e-5, rtol=0)
    change_R = (after[1] - before[1])[at_R][own_R]
    assert change_R.abs().max() > 1e-4
    torch.testing.assert_close(found["entropy_change"][own_R].double(), change_R, atol=5e-6, rtol=0)
    delta_T = torch.where(part.loss_mask_T, after[0] - before[0], 0.0)
    index_T, own_T = part.sequence_index_T, part.loss_mask_T.double()
    sums_S, lengths_S = (torch.zeros(part.num_sequences).double().index_add(0, index_T, each_T) for each_T in (delta_T, own_T))
    ratio_R = (sums_S / lengths_S).exp()[index_T[at_R]][own_R]
    assert (ratio_R - 1).abs().max() > 1e-4
    torch.testing.assert_close(found["ratio"][own_R].double(), ratio_R, atol=5e-6, rtol=0)


@pytest.mark.parametrize("layout", RECORDED_AND_NOT, ids=lambda layout: layout.name)
def test_recording_changes_no_bit(worlds: Worlds, layout: Layout) -> None:
    for report in worlds.ranks(layout):
        assert report["with"] == report["without"]
        assert report["digests"][0] == report["digests"][1]


@pytest.mark.parametrize("layout", OTHERS, ids=lambda layout: layout.name)
def test_what_was_loaded_is_the_model(worlds: Worlds, layout: Layout) -> None:
    source, found = load_file(worlds.folder / layout.model / "model.safetensors"), worlds.ranks(layout)[0]["initial"]
    assert source.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in source.items())


@pytest.mark.parametrize("layout", OTHERS, ids=lambda layout: layout.name)
def test_interleaved_stages_take_micro_batches_of_several_lengths_in_groups(worlds: Worlds, layout: Layout) -> None:
    tokens = pack(rollouts()).num_tokens
    for report in worlds.ranks(layout):
        sizes = report["forwarded"]
        assert (len(set(sizes)) > 1) != (layout.model == "experts")  # whose tokens are gathered on a CPU, all of one length
        assert len(sizes) % layout.pp == 0 or layout.vpp == 1
        if layout.dp == layout.cp == 1:
            assert tokens <= sum(sizes) <= tokens + len(sizes) * (layout.tp - 1) * layout.sp


@pytest.mark.parametrize("layout", [VPP, Layout(tp=2, pp=2, vpp=2)], ids=lambda layout: layout.name)
def test_a_nan_in_any_chunk_is_named_and_no_rank_makes_the_step(worlds: Worlds, layout: Layout) -> None:
    place = f"rank {layout.world - 1} (tp {layout.tp - 1}, pp 1, dp 0)"
    for report in worlds.ranks(layout):
        gradient, logits = report["planted"]
        assert gradient == f"{place}: the gradient of model1.decoder.layers.0.mlp.linear_fc1.weight is not finite"
        assert "NaN or +inf logits" in logits


def test_megatron_is_counted_as_the_layout_says(worlds: Worlds) -> None:
    """``tepo plan --exact`` counts so: interleaved and uneven at once, each rank by itself."""
    layout = Layout(tp=2, pp=2, vpp=2, first=2, model="eight")
    spec, parallel = read_model_spec(worlds.folder / layout.model), ParallelConfig.model_validate(layout.parallel)
    split = MegatronParallel(layout.tp, layout.pp, stages=pipeline_stages_of(spec, parallel))
    held = [sum(math.prod(shape) for shape in rank.params.values()) for rank in megatron_ranks(spec, split)]
    request = json.dumps({"spec": asdict(spec), "parallel": parallel.model_dump()})
    command = [sys.executable, "-m", "tepo_megatron.trainer.megatron.parameter_count"]
    counted = subprocess.run(command, input=request, capture_output=True, text=True, check=True).stdout
    assert json.loads(counted.splitlines()[-1]) == [held[:2], held[2:]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pp": 3}, r"engine.parallel.pp = 3 does not divide the model's 8 layers"),
        ({"pp": 2, "vpp": 3}, r"pp = 2, vpp = 3: 3 chunks do not divide a pipeline stage of 4 layers"),
        ({"pp": 2, FIRST: 3, LAST: 4}, rf"pp = 2, {FIRST} = 3, {LAST} = 4: 8 layers do not split over 2"),
        ({"pp": 4, FIRST: 1}, rf"pp = 4, {FIRST} = 1: 8 layers do not split over 4 pipeline stages with 1 in the first"),
        ({"pp": 2, "vpp": 2, FIRST: 2, LAST: 4}, r"8 layers do not split"),
    ],
)
def test_stages_that_do_not_fit_the_layers_are_refused(worlds: Worlds, changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pipeline_stages_of(read_model_spec(worlds.folder / "eight"), ParallelConfig.model_validate(changes))


def test_a_mini_batch_with_too_few_sequences_is_refused_before_anything_starts() -> None:
    run = {"rollout": {"prompts_per_step": 3, "samples_per_prompt": 2}, "train": {"minibatches": 2}}
    parallel = {"pp": 2, "vpp": 2, "dp": 2}
    with pytest.raises(ValueError, match=r"6 rollouts a step cannot fill train.minibatches = 2 on .*2 for each, as .*vpp = 2"):
        RunConfig.model_validate({**run, "engine": {"parallel": parallel}})
    RunConfig.model_validate({**run, "engine": {"parallel": parallel | {"dp": 1}}})
