"""One engine under every kind of split: scores are those of transformers in float64; losses, metrics, gradients, weights and
checkpoints are those of one rank. So they are with a fused head, which makes no logits.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from tepo_megatron.core.types import Batch
from tepo_megatron.trainer.packing import pack
from tepo_megatron.weights.geometry import Box, Shard
from tepo_megatron.weights.storage.stored import StoredWeights
from tepo_megatron.weights.transfer.digests import fingerprint
from tests.support.float64 import token_scores
from tests.support.layouts import (
    COARSE,
    DISTRIBUTED,
    EVERY,
    NOISE,
    OTHERS,
    PRESET_CP,
    RECORDED_AND_NOT,
    TEMPERATURE,
    TP_PP,
    Layout,
    Worlds,
    rollouts,
)

on_others = pytest.mark.parametrize("layout", OTHERS, ids=lambda layout: layout.name)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    return Worlds(tmp_path_factory.mktemp("layouts"))


@on_others
def test_scores_match_transformers_in_float64(worlds: Worlds, layout: Layout) -> None:
    expected, mask_T = worlds.oracle(layout.single), pack(rollouts(layout, 0)).loss_mask_T
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
        assert report["noise"] < 1e-4


@on_others
def test_updates_and_weights_are_those_of_one_rank(worlds: Worlds, layout: Layout) -> None:
    """Also those of a run that continues from another layout's checkpoint, optimizer states included; on every rank."""
    single, reports = worlds.ranks(layout.single)[0], worlds.ranks(layout)
    expected = single["updates"][1:] if layout.resumes else single["updates"]
    assert single["updates"][0]["grad_norm"] > 0
    for report in reports:
        assert report["updates"] == reports[0]["updates"]
    for ours, theirs in zip(reports[0]["updates"], expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=2e-6)  # values near 0: to the rounding of sums of fp32 log-probs
        for name in ("loss", "grad_norm", "lr"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5), name
    for name, tensor in single["trained"].items():
        assert not torch.equal(tensor, single["initial"][name]), f"{name} was not trained"
        error = (reports[0]["trained"][name] - tensor).norm() / tensor.norm()
        assert error <= 1e-5, f"{name}: off by {error:.2e} of its norm"


def test_every_preset_is_the_same_with_context_parallelism(worlds: Worlds) -> None:
    expected = worlds.ranks(PRESET_CP.single)[0]["every preset"]
    for report in worlds.ranks(PRESET_CP):
        assert len(report["every preset"]) == len(EVERY)
        for ours, theirs in zip(report["every preset"], expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5, abs=2e-6)


def test_masks_and_bounds_of_the_objectives_act(worlds: Worlds) -> None:
    """A first-order mask acts in the first update of a step too; bounds come from the ratios, which have no spread there."""
    for name in ("tepo", "grpo", "slope", "auto", "prefix", "entropy"):
        updates = worlds.ranks(Layout(objective=name))[0]["updates"]
        assert updates[2]["ratio/min"] == updates[2]["ratio/max"] == 1
        assert (updates[2].get("mask/fraction", 0) > 0) == (name in ("slope", "entropy"))
        bounds = [update["clip/bound_high"] for update in updates if "clip/bound_high" in update]
        assert len(set(bounds)) == (3 if name in ("auto", "prefix") else 0)


@pytest.mark.parametrize("layout", [layout for layout in [*OTHERS, *COARSE] if layout.head == "fused"], ids=lambda it: it.name)
def test_a_fused_head_gives_hidden_states_and_its_weight_has_the_same_name(worlds: Worlds, layout: Layout) -> None:
    assert all(report["widths"] == {48} for report in worlds.ranks(layout))
    chunk = f"model{layout.vpp - 1}." if layout.vpp > 1 else ""
    names = worlds.ranks(layout)[-1]["params"]
    assert (f"{chunk}output_layer.weight" in names) == (layout.model != "tied" or layout.pp > 1)


def test_the_gradient_of_logits_takes_their_place(worlds: Worlds) -> None:
    """So that they are held once, in the backward pass too."""
    for layout in (Layout(), Layout(objective="entropy"), Layout(model="tied", objective="entropy")):
        assert (worlds.ranks(layout)[0]["widths"], worlds.ranks(layout)[0]["in place"]) == ({61}, {True})


def test_in_bfloat16_a_fused_head_differs_from_logits_by_rounding(worlds: Worlds) -> None:
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
def test_values_of_single_tokens_are_those_of_one_rank(worlds: Worlds, layout: Layout) -> None:
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


def test_values_of_single_tokens_match_transformers_in_float64(worlds: Worlds) -> None:
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
def test_recording_changes_no_bit(worlds: Worlds, layout: Layout) -> None:
    assert all(report["with"] == report["without"] for report in worlds.ranks(layout))


@on_others
def test_what_was_loaded_is_the_model(worlds: Worlds, layout: Layout) -> None:
    """By its tensors, and by the digest of the files' tensors. And training draws no random numbers (decision 003)."""
    source, report = load_file(worlds.folder / layout.model / "model.safetensors"), worlds.ranks(layout)[0]
    assert source.keys() == report["initial"].keys()
    assert all(torch.equal(report["initial"][name], tensor) for name, tensor in source.items())
    boxes = {name: Box((0,) * tensor.ndim, tuple(tensor.shape)) for name, tensor in source.items()}
    whole = fingerprint([Shard(name, box, name, box) for name, box in boxes.items()], source)
    assert report["digest"] == f"{whole:016x}"
    assert not report["drew random numbers"]


@on_others
def test_micro_batches_are_padded_alone_and_come_in_groups_to_interleaved_stages(worlds: Worlds, layout: Layout) -> None:
    tokens = pack(rollouts(layout, 0)).num_tokens
    for report in worlds.ranks(layout):
        sizes = report["forwarded"]
        # on a CPU stages of a model with experts exchange micro-batches of one length
        one_length = layout.model == "experts" and layout.pp > 1
        if layout.tokens * layout.dp < tokens:
            assert (len(set(sizes)) > 1) == (not one_length)
        assert len(sizes) % layout.pp == 0 or layout.vpp == 1
        if layout.dp == layout.cp == 1:
            assert tokens <= sum(sizes) <= tokens + len(sizes) * (layout.tp - 1) * layout.sp


@pytest.mark.parametrize("layout", [layout for layout in OTHERS if layout.resumes], ids=lambda layout: layout.name)
def test_a_checkpoint_resumes_under_another_layout(worlds: Worlds, layout: Layout) -> None:
    assert layout.resumes is not None
    saved = worlds.ranks(layout.resumes)[0]
    state = json.loads((worlds.folder / layout.resumes.name / "step_000001" / "state.json").read_text())
    assert state["note"] == "kept"
    assert saved["saved prompt"] != pytest.approx(saved["prompt"], abs=1e-5)
    for report in worlds.ranks(layout):
        assert report["restored"] == (state["weights_digest"], state["entropy_noise"]) == (state["weights_digest"], NOISE)
        assert report["saved prompt"] == pytest.approx(saved["saved prompt"], abs=1e-5)


def test_each_rank_writes_and_reads_the_optimizer_states_that_it_holds(worlds: Worlds) -> None:
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
