"""One engine under every kind of split, also with a fused head: scores are those of transformers in float64; losses, metrics,
gradients, weights and checkpoints are those of one rank. Sizes divide nothing by chance, and micro-batches differ in length.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tepo_megatron.config.objective.choices import ClipRange
from tepo_megatron.config.objective.presets import PRESETS
from tepo_megatron.config.objective.section import ObjectiveConfig
from tepo_megatron.core.objective.compose import build_objective
from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.core.types import Batch
from tepo_megatron.trainer.packing import pack
from tepo_megatron.weights.storage.stored import StoredWeights
from tests.support.engines import Split, Worlds, figures, make_engine, save_checkpoint, whole_digest
from tests.support.float64 import prompt_logprobs, token_scores
from tests.support.random_models import draw_rollouts, random_family

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "four": ("Llama", {"num_hidden_layers": 4}),
    "tied": ("Llama", {"num_hidden_layers": 4, "tie_word_embeddings": True}),
    "eight": ("Llama", {"num_hidden_layers": 8}),
    "qwen3": ("Qwen3", {"num_hidden_layers": 4}),  # norms of queries and keys
    "experts": ("Mixtral", {"num_hidden_layers": 4, "num_local_experts": 4}),
    "six experts": ("Mixtral", {"num_hidden_layers": 2, "num_local_experts": 6}),
}
KL = {"preset": "grpo", "kl": {"against": "reference", "coefficient": 0.1}}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "tepo": {"preset": "tepo"},
    "grpo": {"preset": "grpo"},  # weighs sequences: its denominator must not depend on who computes which sequence
    "gspo": {"preset": "gspo"},
    "kl": KL,
    "slope": {"kl_mask": {"falling": "first_order"}},  # needs a value more of the scores, in updates only
    "auto": {"trust_region": {"scale": "length", "low": "auto", "high": "auto"}, "kl_mask": None},
    # the slope takes one, entropies have a gradient, and a frozen model is scored
    "entropy": {
        "kl_mask": {"falling": "first_order"},
        "entropy": {"kind": "fixed", "coefficient": 0.1},
        "kl": {"against": "reference"},
    },
    "prefix": {"ratio": {"kind": "prefix"}, "trust_region": {"scale": "length", "low": 0.003, "high": "auto"}},
}
# its lottery is drawn by the last bits of log-probs, and so all candidates win
CLIP_COV = {"preset": "clip_cov", "trust_region": {"kind": "clip_cov", "cov_low": 0.1, "fraction": 1.0}}
OTHERWISE = ("clip_cov", "on_policy_distill")  # the second needs a teacher: test_teachers.py
EVERY: list[dict[str, Any]] = [{"preset": name} for name in PRESETS if name not in OTHERWISE]
EVERY += [CLIP_COV, KL, OBJECTIVES["slope"]]
TEMPERATURE, STEPS = 0.7, 2
PROMPT = [7, 60, 1, 33, 0, 12, 12, 58]
NOISE = 0.125  # a tolerance that goes into checkpoints, as if it had been measured


@dataclass(frozen=True, kw_only=True)
class Layout(Split):
    """``moves``: its memory is offloaded and onloaded before each update. One that resumes loads a checkpoint that was written
    after the first update, writes it again, and continues. ``every``: then all presets.
    """

    model: str = "four"
    objective: str = "tepo"
    head: str = "logits"
    recompute: str = "none"
    dtype: str = "float32"
    tokens: int = 45
    moves: bool = False
    every: bool = False

    @property
    def single(self) -> Layout:
        return Layout(model=self.model, objective=self.objective, every=self.every, tokens=90 if self.every else 45)


DP: dict[str, Any] = {"dp": 2, "distributed": True, "tokens": 30}
VPP, DISTRIBUTED = Layout(pp=2, vpp=2), Layout(**DP)
TP_PP, CP_DP = Layout(tp=2, pp=2, tokens=60), Layout(cp=2, **DP)
TP = Layout(tp=2, resumes=VPP)
PRESET_CP = Layout(cp=2, model="qwen3", objective="kl", every=True, tokens=60)
COARSE = [Layout(dtype="bfloat16", head=head) for head in ("logits", "fused")]
INTERLEAVED = Layout(tp=2, pp=2, vpp=2)
FUSED: dict[str, Any] = {"head": "fused", "objective": "entropy"}
TIED_LAST, TIED_CP = Layout(pp=2, last=1, model="tied"), Layout(cp=2, pp=2, vpp=2, model="tied")
DP_VPP = Layout(pp=2, vpp=2, **DP)
OTHERS = [
    Layout(tokens=4096),
    Layout(resumes=DISTRIBUTED),
    *(Layout(**FUSED, model=model) for model in ("four", "tied")),
    # two ranks
    Layout(tp=2, **FUSED),
    Layout(tp=2, sp=True, model="tied", **FUSED),
    Layout(tp=2, sp=True, tokens=50, objective="slope"),
    Layout(pp=2, tokens=40, **FUSED),
    DISTRIBUTED,
    VPP,
    Layout(pp=2, vpp=2, objective="kl", moves=True),
    Layout(pp=2, vpp=2, model="tied", **FUSED),
    Layout(pp=2, vpp=2, first=2, model="eight"),
    TIED_LAST,
    PRESET_CP,
    Layout(cp=2, **FUSED),
    Layout(cp=2, objective="prefix"),
    Layout(cp=2, ep=2, model="experts"),
    TP,
    Layout(pp=2, vpp=2, resumes=TP),
    *(Layout(**DP, resumes=resumes) for resumes in (TP_PP, CP_DP)),
    # four ranks
    TP_PP,
    INTERLEAVED,
    *(Layout(tp=2, pp=2, vpp=2, sp=name == "grpo", objective=name) for name in ("grpo", "gspo")),
    Layout(tp=2, dp=2, sp=True, tokens=30, objective="auto"),
    Layout(tp=2, pp=2, vpp=2, model="tied"),
    DP_VPP,
    Layout(dp=2, pp=2, vpp=2, ep=2, model="experts"),
    Layout(pp=4, vpp=2, model="eight"),
    CP_DP,
    TIED_CP,
    Layout(cp=2, pp=2, recompute="full", model="qwen3"),
    *(Layout(cp=2, tp=2, sp=True, model="qwen3", head=head) for head in ("logits", "fused")),
    Layout(cp=4, recompute="selective", model="qwen3"),
    # six ranks, whose expert groups overlap those of tensor parallelism
    Layout(tp=2, dp=3, ep=3, etp=1, sp=True, tokens=30, model="six experts"),
]
SINGLE = list(dict.fromkeys([Layout(), *(layout.single for layout in OTHERS), *COARSE]))
RECORDED_AND_NOT = [Layout(), INTERLEAVED, DP_VPP, TIED_CP]  # repeat their second update without recording


def rollouts(layout: Layout, step: int) -> list[Rollout]:
    """Four groups of three, of uneven lengths and rewards. In tied models and with a KL term gradients of these nearly cancel
    and leave rounding alone: there, three groups of four, no two of equal length.
    """
    generator = torch.Generator().manual_seed(1 + step)
    others = layout.model == "tied" or layout.objective == "kl"

    def draw(low: int, high: int, size: int) -> tuple[int, ...]:
        return tuple(torch.randint(low, high, (size,), generator=generator).tolist())

    made: list[Rollout] = []
    prompt: tuple[int, ...] = ()
    for number in range(12):
        group, sample = divmod(number, 4 if others else 3)
        if others:
            ids = draw(3, 61, 1 + group + 3 + (7 * number) % 17)
            prompt, response = ids[: 1 + group], ids[1 + group :]
            logprobs = tuple((-4 * torch.rand(len(response), generator=generator)).tolist())
            reward = float(number % 3 == 0)
        else:
            prompt = draw(3, 61, draw(1, 6, 1)[0]) if sample == 0 else prompt
            response = draw(3, 61, draw(1, 18, 1)[0])
            logprobs = tuple(-value / 7 for value in draw(1, 30, len(response)))
            reward = float((sample + group) % 2) if group else 1.0
        made.append(Rollout(f"p{group}", group, prompt, response, logprobs, "stop", WeightsVersion(0), reward=reward))
    return made


def start(layout: Layout, folder: Path) -> Any:
    # With this ε a step does not turn the sign of a gradient that is nothing but rounding into a move.
    falling: dict[str, Any] = {"lr": 1e-4, "min_lr": 5e-5, "schedule": "linear", "warmup_steps": 2, "weight_decay": 0.01}
    optimizer = {"lr": 1e-3, "eps": 3e-3} if layout.every else falling
    engine = {"parallel": layout.parallel, "micro_batch_tokens": layout.tokens, "head": layout.head}
    config = {
        "model": {"path": str(folder / layout.model), "dtype": layout.dtype},
        "engine": {"recompute": layout.recompute, **engine},
        "optimizer": {"distributed": layout.distributed, **optimizer},
        "objective": OBJECTIVES[layout.objective],
        "rollout": {"sampling": {"temperature": TEMPERATURE}, "server": {"placement": "colocated"}},
        "train": {"minibatches": 2, "steps": STEPS + 1},  # so that a rate is seen where another schedule has another one
    }
    engine = make_engine(config, shares_gpus=layout.moves)
    if layout.objective in ("auto", "prefix"):
        engine.counters.clip_range = ClipRange(0.01, 0.02, 0.3, -0.2, 2.5)
    return engine


def train(layout: Layout, folder: Path) -> dict[str, Any]:
    """Loads, scores, and makes two steps of two updates, with a checkpoint after the first; what the tests look at."""
    from tepo_megatron.run.step.minibatches import minibatches

    engine = start(layout, folder)
    params = {name: tuple(param.shape) for name, param in engine.policy.params.items()}
    assert params == dict(engine.layouts[engine.ranks.rank].params)
    random_state, is_root = torch.get_rng_state(), engine.ranks.rank == 0
    report: dict[str, Any] = {"initial": dict(engine.weights.stream()), "updates": [], "tokens": []}
    report["digest"] = engine.weights.version(0).digest
    batch = engine.batch_from_root(rollouts(layout, 0) if is_root else None)
    forwarded: list[int] = []
    with engine.policy.chunks[-1].register_forward_pre_hook(lambda _, inputs: forwarded.append(inputs[0].numel())):
        whole = engine.score(batch)
    report |= {"forwarded": forwarded, "logprobs": whole.old_logprobs_T, "entropy": whole.old_entropy_T}
    report |= {"reference": whole.reference_logprobs_T, "params": list(params), "widths": set(), "in place": set()}
    watch_outputs(engine, report)
    report["prompt"] = engine.prompt_logprobs(PROMPT)
    if layout in RECORDED_AND_NOT:
        assert engine.measure_noise(batch)["entropy/noise/p99"] < 1e-4
        engine.counters.entropy_noise = 0.0
    for step in range(STEPS):
        batch = engine.batch_from_root(rollouts(layout, step) if is_root else None)
        batch = batch.with_(recorded_S=torch.where(batch.groups_S == 0, -1, torch.arange(batch.num_sequences)))
        parts = [engine.score(part) for part in minibatches(batch, 2, seed=0, step=step)]
        for number, part in enumerate(parts, start=2 * step):
            if layout.resumes is not None and number == 0:
                load(engine, folder / layout.resumes.name / "step_000001", report)
            else:
                if layout.moves:
                    engine.offload()
                    engine.onload()
                result = engine.update(part)
                assert not result.skipped
                report["updates"].append(figures(result))
                report["tokens"].append((number, part, result.token_values))
            if number == 0:
                engine.counters.entropy_noise = NOISE
                save_checkpoint(engine, folder / layout.name, step=1, state={"note": "kept"})
                engine.counters.entropy_noise = 0.0
                report["saved prompt"] = engine.prompt_logprobs(PROMPT)
                report["between"] = dict(engine.weights.stream()) if layout.world == 1 else None
            if number == 1 and layout in RECORDED_AND_NOT:
                digest = engine.weights.version(0).digest
                load(engine, folder / layout.name / "step_000001", {})
                plain = engine.update(part.with_(recorded_S=None))
                assert not plain.token_values
                report["without"] = (figures(plain), engine.weights.version(0).digest)
                report["with"] = (report["updates"][-1], digest)
    report["trained"] = dict(engine.weights.stream())
    report["drew random numbers"] = not torch.equal(torch.get_rng_state(), random_state)
    if layout.every:
        report["every preset"] = list(updates_of_every_preset(engine))
    return report


def watch_outputs(engine: Any, report: dict[str, Any]) -> None:
    """Notes the widths of the chunks' outputs, and whether these have the memory of their gradients."""

    def watch(_module: object, _inputs: object, output: torch.Tensor) -> None:
        report["widths"].add(output.shape[-1])
        if output.requires_grad:
            place = output.data_ptr()
            output.register_hook(lambda gradient: report["in place"].add(gradient.data_ptr() == place))

    for chunk in engine.policy.chunks:
        chunk.register_forward_hook(watch)


def load(engine: Any, checkpoint: Path, report: dict[str, Any]) -> None:
    engine.checkpoints.load(checkpoint)
    report["restored"] = (engine.weights.version(0).digest, engine.counters.entropy_noise)
    report["bytes read"] = engine.checkpoints.bytes_read
    engine.counters.entropy_noise = 0.0


def updates_of_every_preset(engine: Any) -> Iterator[dict[str, float]]:
    """One update for each. Old log-probs and entropies are moved a little: no ratio is 1, and masks act."""
    reference, sampled = engine.reference, draw_rollouts((3, 31, 5, 17, 24, 4, 40, 8))
    for choice in EVERY:
        engine.objective = build_objective(ObjectiveConfig.model_validate(choice))
        engine.forward = replace(engine.forward, entropy_slope=engine.objective.needs_entropy_slope)
        engine.reference = reference if engine.objective.needs_reference else None  # to save time
        batch: Batch = engine.score(engine.batch_from_root(sampled if engine.ranks.rank == 0 else None))
        assert batch.old_logprobs_T is not None
        assert batch.old_entropy_T is not None
        moves_T = 0.05 * torch.sin(12.9898 * torch.arange(batch.num_tokens))
        moved = {"old_logprobs_T": batch.old_logprobs_T + moves_T, "old_entropy_T": batch.old_entropy_T + moves_T.roll(1)}
        yield figures(engine.update(batch.with_(**moved)))
    engine.reference = reference


PARAMS = [pytest.param(layout, marks=pytest.mark.long if layout.world > 4 else ()) for layout in OTHERS]
on_others = pytest.mark.parametrize("layout", PARAMS, ids=lambda layout: layout.name)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds[Layout]:
    folder = tmp_path_factory.mktemp("layouts")
    sizes = {"vocab_size": 61, "hidden_size": 48, "intermediate_size": 80, "max_position_embeddings": 128}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": False}
    for name, (family, settings) in MODELS.items():
        random_family(family, {**sizes, **heads, **settings}, scale=0.15).save_pretrained(folder / name)
    return Worlds(folder, [*SINGLE, *OTHERS], train)


@cache
def oracle(folder: Path, single: Layout) -> dict[str, Any]:
    """Log-probs and entropies of the rollouts, and log-probs of the prompt, by transformers in float64."""
    logprobs, entropy = token_scores(folder / single.model, pack(rollouts(single, 0)), temperature=TEMPERATURE)
    return {"logprobs": logprobs, "entropy": entropy, "prompt": prompt_logprobs(folder / single.model, PROMPT)}


@on_others
def test_scores_match_transformers_in_float64(worlds: Worlds[Layout], layout: Layout) -> None:
    expected, mask_T = oracle(worlds.folder, layout.single), pack(rollouts(layout, 0)).loss_mask_T
    assert expected["logprobs"][mask_T].std() > 0.1
    first, *_ = reports = worlds.ranks(layout)
    for report in reports:
        assert torch.equal(report["logprobs"], first["logprobs"])
        assert report["prompt"] == first["prompt"]
        for name in ("logprobs", "entropy"):
            torch.testing.assert_close(report[name][mask_T].double(), expected[name][mask_T], atol=1e-5, rtol=1e-5)
        if report["reference"] is not None:
            torch.testing.assert_close(report["reference"][mask_T], report["logprobs"][mask_T], atol=1e-5, rtol=1e-5)
        assert not report["logprobs"][~mask_T].any()
        assert report["prompt"] == pytest.approx(expected["prompt"], abs=1e-5)


@on_others
def test_updates_and_weights_are_those_of_one_rank(worlds: Worlds[Layout], layout: Layout) -> None:
    """Also those of a run that continues from another layout's checkpoint, optimizer states included; on every rank."""
    single, reports = worlds.ranks(layout.single)[0], worlds.ranks(layout)
    expected = single["updates"][1:] if layout.resumes else single["updates"]
    assert single["updates"][0]["grad_norm"] > 0
    for report in reports:
        assert report["updates"] == reports[0]["updates"]
    for ours, theirs in zip(reports[0]["updates"], expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=2e-6)  # values near 0: to the rounding of sums of fp32 log-probs
        bounds_are_measured = layout.objective == "prefix"  # of log-ratios near 0: so is the loss
        for name in ("grad_norm", "lr") if bounds_are_measured else ("loss", "grad_norm", "lr"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5), name
    for name, tensor in single["trained"].items():
        assert not torch.equal(tensor, single["initial"][name]), f"{name} was not trained"
        error = (reports[0]["trained"][name] - tensor).norm() / tensor.norm()
        assert error <= 1e-5, f"{name}: off by {error:.2e} of its norm"


def test_every_preset_is_the_same_with_context_parallelism(worlds: Worlds[Layout]) -> None:
    expected = worlds.ranks(PRESET_CP.single)[0]["every preset"]
    for report in worlds.ranks(PRESET_CP):
        assert len(report["every preset"]) == len(EVERY)
        for ours, theirs in zip(report["every preset"], expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5, abs=2e-6)


def test_masks_and_bounds_of_the_objectives_act(worlds: Worlds[Layout]) -> None:
    """A first-order mask acts in the first update of a step too; bounds come from the ratios, which have no spread
    there, so that only the mean length changes.
    """
    for name in ("tepo", "grpo", "slope", "auto", "prefix", "entropy"):
        updates = worlds.ranks(Layout(objective=name))[0]["updates"]
        assert [update["lr"] for update in updates] == pytest.approx([5e-5, 1e-4, 8.75e-5, 7.5e-5])
        assert updates[2]["ratio/min"] == updates[2]["ratio/max"] == 1
        assert (updates[2].get("mask/fraction", 0) > 0) == (name in ("slope", "entropy"))
        bounds = [update["clip/bound_high"] for update in updates if "clip/bound_high" in update]
        assert len(set(bounds)) == (4 if name in ("auto", "prefix") else 0)


@pytest.mark.parametrize("layout", [layout for layout in [*OTHERS, *COARSE] if layout.head == "fused"], ids=lambda it: it.name)
def test_a_fused_head_gives_hidden_states_and_its_weight_has_the_same_name(worlds: Worlds[Layout], layout: Layout) -> None:
    assert all(report["widths"] == {48} for report in worlds.ranks(layout))
    chunk = f"model{layout.vpp - 1}." if layout.vpp > 1 else ""
    names = worlds.ranks(layout)[-1]["params"]
    assert (f"{chunk}output_layer.weight" in names) == (layout.model != "tied" or layout.pp > 1)


def test_the_gradient_of_logits_takes_their_place(worlds: Worlds[Layout]) -> None:
    """So that they are held once, in the backward pass too."""
    for layout in (Layout(), Layout(objective="entropy"), Layout(model="tied", objective="entropy")):
        assert (worlds.ranks(layout)[0]["widths"], worlds.ranks(layout)[0]["in place"]) == ({61}, {True})


def test_in_bfloat16_a_fused_head_differs_from_logits_by_rounding(worlds: Worlds[Layout]) -> None:
    plain, fused = (worlds.ranks(layout)[0] for layout in COARSE)
    for name in ("logprobs", "entropy"):
        torch.testing.assert_close(fused[name], plain[name], atol=0.05, rtol=0)
    assert fused["updates"][0]["grad_norm"] == pytest.approx(plain["updates"][0]["grad_norm"], rel=0.01)


def recorded(part: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tokens of a mini-batch have values, and which of those are responses'."""
    assert part.recorded_S is not None
    at_R = (part.recorded_S >= 0)[part.sequence_index_T].nonzero()[:, 0]
    return at_R, part.loss_mask_T[at_R]


@on_others
def test_values_of_single_tokens_are_those_of_one_rank(worlds: Worlds[Layout], layout: Layout) -> None:
    """On every rank. In a first update nothing has moved yet: to the last bit."""
    expected = {number: values for number, _, values in worlds.ranks(layout.single)[0]["tokens"]}
    for report in worlds.ranks(layout):
        assert [number for number, _, _ in report["tokens"]] == ([1, 2, 3] if layout.resumes else [0, 1, 2, 3])
        for number, part, values in report["tokens"]:
            at_R, own_R = recorded(part)
            assert values["ratio"].shape == at_R.shape
            for name in ("logprob_update", "entropy_change", "ratio"):
                torch.testing.assert_close(values[name][own_R], expected[number][name][own_R], atol=1e-5, rtol=1e-5)
            if number == 0 and layout.model != "experts":
                assert torch.equal(values["logprob_update"][own_R], part.old_logprobs_T[at_R][own_R])
                assert not values["entropy_change"][own_R].any()
            assert values["masked"].dtype == torch.bool
            if layout.objective == "tepo" and number < 2:
                held = (part.advantages_S[part.sequence_index_T[at_R]] > 0) & (values["entropy_change"] < -1e-5) & own_R
                assert torch.equal(values["masked"], held)
                assert held.any() == (number == 1)


def test_values_of_single_tokens_match_transformers_in_float64(worlds: Worlds[Layout]) -> None:
    """Of the second update: with the weights after the first one, against those before."""
    report = worlds.ranks(Layout())[0]
    number, part, values = report["tokens"][1]
    at_R, own_R = recorded(part)
    before, after = (
        token_scores(worlds.folder / "four", part, temperature=TEMPERATURE, weights=report[name])
        for name in ("initial", "between")
    )
    assert number == 1
    torch.testing.assert_close(values["logprob_update"][own_R].double(), after[0][at_R][own_R], atol=2e-5, rtol=0)
    change_R = (after[1] - before[1])[at_R][own_R]
    assert change_R.abs().max() > 1e-4
    torch.testing.assert_close(values["entropy_change"][own_R].double(), change_R, atol=5e-6, rtol=0)
    delta_T = torch.where(part.loss_mask_T, after[0] - before[0], 0.0)
    index_T, own_T = part.sequence_index_T, part.loss_mask_T.double()
    sums_S, lengths_S = (torch.zeros(part.num_sequences).double().index_add(0, index_T, each_T) for each_T in (delta_T, own_T))
    ratio_R = (sums_S / lengths_S).exp()[index_T[at_R]][own_R]
    assert (ratio_R - 1).abs().max() > 1e-4
    torch.testing.assert_close(values["ratio"][own_R].double(), ratio_R, atol=5e-6, rtol=0)


@pytest.mark.parametrize("layout", RECORDED_AND_NOT, ids=lambda layout: layout.name)
def test_recording_changes_no_bit(worlds: Worlds[Layout], layout: Layout) -> None:
    assert all(report["with"] == report["without"] for report in worlds.ranks(layout))


@on_others
def test_what_was_loaded_is_the_model(worlds: Worlds[Layout], layout: Layout) -> None:
    """By its tensors, and by the digest of the files' tensors. And training draws no random numbers (decision 003)."""
    source, report = load_file(worlds.folder / layout.model / "model.safetensors"), worlds.ranks(layout)[0]
    assert source.keys() == report["initial"].keys()
    assert all(torch.equal(report["initial"][name], tensor) for name, tensor in source.items())
    assert report["digest"] == whole_digest(source)
    assert not report["drew random numbers"]


@on_others
def test_micro_batches_are_padded_alone_and_grouped_for_interleaved_stages(worlds: Worlds[Layout], layout: Layout) -> None:
    tokens = pack(rollouts(layout, 0)).num_tokens
    for report in worlds.ranks(layout):
        sizes = report["forwarded"]
        if layout.tokens * layout.dp < tokens:
            assert len(set(sizes)) > 1
        assert len(sizes) % layout.pp == 0 or layout.vpp == 1
        if layout.dp == layout.cp == 1:
            assert tokens <= sum(sizes) <= tokens + len(sizes) * (layout.tp - 1) * layout.sp


@pytest.mark.parametrize("layout", [layout for layout in OTHERS if layout.resumes], ids=lambda layout: layout.name)
def test_a_checkpoint_resumes_under_another_layout(worlds: Worlds[Layout], layout: Layout) -> None:
    assert layout.resumes is not None
    saved = worlds.ranks(layout.resumes)[0]
    state = json.loads((worlds.folder / layout.resumes.name / "step_000001" / "state.json").read_text())
    assert state["note"] == "kept"
    assert saved["saved prompt"] != pytest.approx(saved["prompt"], abs=1e-5)
    for report in worlds.ranks(layout):
        assert report["restored"] == (state["weights_digest"], state["entropy_noise"]) == (state["weights_digest"], NOISE)
        assert report["saved prompt"] == pytest.approx(saved["saved prompt"], abs=1e-5)


def test_each_rank_writes_and_reads_the_optimizer_states_that_it_holds(worlds: Worlds[Layout]) -> None:
    """With the distributed optimizer half of them on each of two ranks, each element once; other ranks' are not read."""
    tensors = {name: tuple(tensor.shape) for name, tensor in worlds.ranks(DISTRIBUTED)[0]["trained"].items()}
    checkpoint = worlds.folder / DISTRIBUTED.name / "step_000001"
    files = [load_file(path) for path in sorted((checkpoint / "shards").glob("rank*.safetensors"))]
    written = [sum(box.nbytes for box in boxes.values()) for boxes in files]
    assert sum(written) == 12 * sum(math.prod(shape) for shape in tensors.values())
    assert max(written) < 0.51 * sum(written)
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        StoredWeights.open_boxes(checkpoint, kind).check(tensors)
    assert [report["bytes read"] for report in worlds.ranks(replace(DISTRIBUTED, resumes=TP_PP))] == written
