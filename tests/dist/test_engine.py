"""One engine, many layouts: the same rollouts give the same scores, losses, gradients, weights and checkpoints.

Every layout runs in a torchrun world of its own, on a model with sizes that divide nothing by chance (61 tokens of
vocabulary, 6 heads in 2 groups), and is compared with transformers in float64 and with the world of one.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.sampler.rollout_file import read_rollouts, write_rollouts
from tepo_megatron.trainer.packing import pack
from tepo_megatron.weights.geometry import Box, Shard
from tepo_megatron.weights.storage.stored import StoredWeights
from tepo_megatron.weights.transfer.digests import fingerprint
from tests.support.float64 import prompt_logprobs, token_scores
from tests.support.launch import run_world

TEMPERATURE = 0.7
PROMPT = [7, 60, 1, 33, 0, 12, 12, 58]
STEPS = 2


@dataclass(frozen=True)
class Layout:
    tp: int = 1
    pp: int = 1
    dp: int = 1
    sp: bool = False
    distributed: bool = False
    micro_batch_tokens: int = 4096
    tied: bool = False
    objective: dict[str, Any] = field(default_factory=lambda: {"preset": "tepo"}, hash=False)

    @property
    def name(self) -> str:
        flags = [("sp", self.sp), ("distopt", self.distributed), ("tied", self.tied)]
        split = f"tp{self.tp}pp{self.pp}dp{self.dp}-mb{self.micro_batch_tokens}"
        return "-".join([split, *(name for name, on in flags if on)])


SINGLE = Layout()
OTHERS = [
    Layout(micro_batch_tokens=30),
    Layout(tp=2),
    Layout(tp=2, sp=True, micro_batch_tokens=50),
    Layout(pp=2, micro_batch_tokens=40),
    Layout(dp=2),
    Layout(dp=2, distributed=True, micro_batch_tokens=40),
    Layout(tp=2, pp=2, micro_batch_tokens=60),
]
TIED = [Layout(tied=True), Layout(tp=2, pp=2, tied=True)]
on_all_layouts = pytest.mark.parametrize("layout", [SINGLE, *OTHERS, *TIED], ids=lambda layout: layout.name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, untied and tied, and recorded rollouts of two steps with uneven lengths and rewards."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("engine")
    for tied in (False, True):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=61,
            hidden_size=48,
            intermediate_size=80,
            num_hidden_layers=4,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=128,
            tie_word_embeddings=tied,
            initializer_range=0.1,
        )
        LlamaForCausalLM(config).save_pretrained(folder / f"model-{tied}")
    generator = torch.Generator().manual_seed(1)

    def draw(low: int, high: int, size: int) -> tuple[int, ...]:
        return tuple(torch.randint(low, high, (size,), generator=generator).tolist())

    for step in range(STEPS):
        rollouts = []
        for group in range(4):
            prompt = draw(3, 61, int(draw(1, 6, 1)[0]))
            for sample in range(3):
                response = draw(3, 61, int(draw(1, 18, 1)[0]))
                logprobs = tuple(-float(value) / 7 for value in draw(1, 30, len(response)))
                reward = float((sample + group) % 2) if group else 1.0
                rollouts.append(
                    Rollout(f"p{group}", group, prompt, response, logprobs, "stop", WeightsVersion(step), reward=reward)
                )
        write_rollouts(folder / "rollouts", step, rollouts)
    return folder


class Worlds:
    """Runs layouts on demand, each once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._done: dict[tuple[Layout, Path | None], Path] = {}

    def run(self, layout: Layout, *, resume: Path | None = None) -> Path:
        key = (layout, resume)
        if key not in self._done:
            self._done[key] = self._start(layout, resume)
        return self._done[key]

    def report(self, layout: Layout) -> dict[str, Any]:
        return json.loads((self.run(layout) / "report.json").read_text())

    def _start(self, layout: Layout, resume: Path | None) -> Path:
        out = self.folder / (layout.name + ("-resumed" if resume else ""))
        out.mkdir()
        parallel = {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp, "sequence_parallel": layout.sp}
        config = {
            "model": {"path": str(self.folder / f"model-{layout.tied}")},
            "engine": {"parallel": parallel, "micro_batch_tokens": layout.micro_batch_tokens},
            "optimizer": {"lr": 1e-4, "warmup_steps": 2, "weight_decay": 0.01, "distributed": layout.distributed},
            "objective": layout.objective,
            "rollout": {"sampling": {"temperature": TEMPERATURE}},
            "train": {"minibatches": 2, "steps": STEPS},
        }
        case = {
            "config": config,
            "rollouts": str(self.folder / "rollouts"),
            "out": str(out),
            "steps": STEPS,
            "save_at": 1,
            "prompt": PROMPT,
            "resume": str(resume) if resume else None,
        }
        (out / "case.json").write_text(json.dumps(case))
        run_world("engine", layout.tp * layout.pp * layout.dp, out / "case.json")
        return out


@pytest.fixture(scope="module")
def worlds(folder: Path) -> Worlds:
    return Worlds(folder)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same_updates(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    """Loss, gradient norm and learning rate to 1e-5 of their value; metrics also to fp32 rounding of an entropy of 4."""
    assert len(found) == len(expected)
    for number, (ours, reference) in enumerate(zip(found, expected, strict=True)):
        assert set(ours) == set(reference)
        for name, value in reference.items():
            tolerance = 0.0 if name in ("loss", "grad_norm", "lr") else 2e-6
            close = math.isclose(ours[name], value, rel_tol=1e-5, abs_tol=tolerance)
            assert close, f"update {number}, {name}: {ours[name]} instead of {value}"


@on_all_layouts
def test_export_of_the_loaded_model_is_the_model(worlds: Worlds, layout: Layout) -> None:
    source, exported = weights(worlds.folder / f"model-{layout.tied}"), weights(worlds.run(layout) / "initial")
    assert set(exported) == set(source)
    for name, tensor in source.items():
        assert torch.equal(exported[name], tensor), name


@on_all_layouts
def test_scores_match_transformers_in_float64(worlds: Worlds, layout: Layout) -> None:
    batch, report = pack(read_rollouts(worlds.folder / "rollouts", 0)), worlds.report(layout)
    found_logprobs, found_entropy = torch.tensor(report["old_logprobs"]), torch.tensor(report["old_entropy"])
    logprob_T, entropy_T = token_scores(worlds.folder / f"model-{layout.tied}", batch, temperature=TEMPERATURE)
    mask_T = batch.loss_mask_T
    torch.testing.assert_close(found_logprobs[mask_T].double(), logprob_T[mask_T], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found_entropy[mask_T].double(), entropy_T[mask_T], atol=1e-5, rtol=1e-5)
    assert not found_logprobs[~mask_T].any()


@on_all_layouts
def test_each_micro_batch_is_padded_alone(worlds: Worlds, layout: Layout) -> None:
    """Stages of a pipeline too compute no more tokens than there are, up to what sequence parallelism must divide."""
    tokens = pack(read_rollouts(worlds.folder / "rollouts", 0)).num_tokens
    forwarded = worlds.report(layout)["forwarded"]
    if layout.dp == 1:
        assert tokens <= sum(forwarded) <= tokens + (layout.tp - 1) * len(forwarded) * layout.sp
    if layout.micro_batch_tokens < tokens / layout.dp:
        assert len(set(forwarded)) > 1


@on_all_layouts
def test_the_digest_of_weights_is_that_of_the_files_tensors(worlds: Worlds, layout: Layout) -> None:
    tensors = weights(worlds.folder / f"model-{layout.tied}")
    boxes = {name: Box((0,) * tensor.ndim, tuple(tensor.shape)) for name, tensor in tensors.items()}
    whole = fingerprint([Shard(name, box, name, box) for name, box in boxes.items()], tensors)
    assert worlds.report(layout)["digest"] == f"{whole:016x}"


@on_all_layouts
def test_a_prompt_is_scored_under_temperature_1_on_every_layout(worlds: Worlds, layout: Layout) -> None:
    expected = prompt_logprobs(worlds.folder / f"model-{layout.tied}", PROMPT)
    assert worlds.report(layout)["prompt_logprobs"] == pytest.approx(expected, abs=1e-5)


@on_all_layouts
def test_training_draws_no_random_numbers(worlds: Worlds, layout: Layout) -> None:
    """So a checkpoint has no state of a generator (decision 003)."""
    assert not worlds.report(layout)["drew_random_numbers"]


@pytest.mark.parametrize("layout", OTHERS, ids=lambda layout: layout.name)
def test_losses_gradients_and_metrics_are_those_of_one_rank(worlds: Worlds, layout: Layout) -> None:
    expected, found = worlds.report(SINGLE)["updates"], worlds.report(layout)["updates"]
    assert len(expected) == 2 * STEPS
    assert expected[0]["grad_norm"] > 0
    assert_same_updates(found, expected)


@pytest.mark.parametrize("layout", [*OTHERS, TIED[1]], ids=lambda layout: layout.name)
def test_trained_weights_are_those_of_one_rank(worlds: Worlds, layout: Layout) -> None:
    reference = TIED[0] if layout.tied else SINGLE
    start = weights(worlds.folder / f"model-{layout.tied}")
    expected, found = weights(worlds.run(reference) / "trained"), weights(worlds.run(layout) / "trained")
    for name, tensor in expected.items():
        moved = (tensor - start[name]).norm()
        assert moved > 0, f"{name} was not trained"
        error = (found[name] - tensor).norm()
        assert error <= 1e-5 * tensor.norm(), f"{name}: off by {error / tensor.norm():.2e} of its norm"


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        (Layout(tp=2, pp=2, micro_batch_tokens=60), Layout(dp=2, distributed=True, micro_batch_tokens=40)),
        (Layout(dp=2, distributed=True, micro_batch_tokens=40), SINGLE),
    ],
    ids=["tp2pp2-to-dp2distopt", "dp2distopt-to-single"],
)
def test_a_checkpoint_resumes_under_another_layout(worlds: Worlds, saved: Layout, resumed: Layout) -> None:
    checkpoint = worlds.run(saved) / "checkpoints" / "step_000001"
    state = json.loads((checkpoint / "state.json").read_text())
    assert state["note"] == "kept"
    out = worlds.run(resumed, resume=checkpoint)
    report = json.loads((out / "report.json").read_text())
    assert report["digest"] == state["weights_digest"]
    assert report["prompt_logprobs"] == pytest.approx(worlds.report(saved)["saved_logprobs"], abs=1e-5)
    assert worlds.report(saved)["saved_logprobs"] != pytest.approx(worlds.report(saved)["prompt_logprobs"], abs=1e-5)
    assert report["entropy_noise"] == state["entropy_noise"] == 0.125
    assert_same_updates(report["updates"], worlds.report(SINGLE)["updates"][2:])
    for name, tensor in weights(worlds.run(SINGLE) / "trained").items():
        found = weights(out / "trained")[name]
        assert (found - tensor).norm() <= 1e-5 * tensor.norm(), name


def test_each_rank_writes_and_reads_the_optimizer_states_that_it_holds(worlds: Worlds) -> None:
    """With the distributed optimizer half of them on each of two ranks, each element once; other ranks' are not read."""
    saved = Layout(dp=2, distributed=True, micro_batch_tokens=40)
    checkpoint = worlds.run(saved) / "checkpoints" / "step_000001"
    held = [load_file(path) for path in sorted((checkpoint / "shards").glob("rank*.safetensors"))]
    written = [sum(box.nbytes for box in boxes.values()) for boxes in held]
    elements = sum(tensor.numel() for tensor in weights(worlds.run(SINGLE) / "trained").values())
    assert sum(written) == 12 * elements
    assert max(written) < 0.51 * sum(written)
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        shapes = {name: tuple(tensor.shape) for name, tensor in weights(worlds.run(SINGLE) / "trained").items()}
        StoredWeights.open_boxes(checkpoint, kind).check(shapes)
    other = worlds.run(Layout(tp=2, pp=2, micro_batch_tokens=60)) / "checkpoints" / "step_000001"
    assert json.loads((worlds.run(saved, resume=other) / "report.json").read_text())["bytes_read"] == written


@pytest.mark.parametrize(
    ("objective", "tokens"),
    [
        ({"preset": "grpo"}, (4000, 35)),
        ({"kl_mask": {"falling": "first_order"}}, (4001, 36)),
        ({"trust_region": {"scale": "length", "low": "auto", "high": "auto"}, "kl_mask": None}, (4002, 37)),
        ({"ratio": {"kind": "prefix"}, "trust_region": {"scale": "length", "low": 0.003, "high": "auto"}}, (4003, 38)),
    ],
    ids=["grpo", "first-order mask", "bounds from the ratios", "prefix ratio"],
)
def test_other_objectives_agree_over_layouts_too(worlds: Worlds, objective: dict[str, Any], tokens: tuple[int, int]) -> None:
    """GRPO weighs sequences, not tokens: its denominator must not depend on who computes which sequence. A first-order mask
    needs a value more of the scores, which is asked for in updates only, and acts in the first one of a step.
    """
    one = worlds.report(Layout(objective=objective, micro_batch_tokens=tokens[0]))["updates"]
    other = worlds.report(Layout(dp=2, tp=2, sp=True, objective=objective, micro_batch_tokens=tokens[1]))["updates"]
    assert_same_updates(other, one)
    assert one[2]["ratio/min"] == one[2]["ratio/max"] == 1
    assert (one[2]["mask/fraction"] > 0) == bool(objective.get("kl_mask"))
    bounds = [update["clip/bound_high"] for update in one if "clip/bound_high" in update]
    assert len(set(bounds)) == (3 if bounds else 0)  # the first update of each step has no spread
