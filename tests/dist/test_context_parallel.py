"""Context parallelism: scores, losses, gradients and weights are those of one rank, for every preset, under every split.

One world per number of ranks takes all layouts in turn. The model has grouped queries, biases and norms of queries and keys;
sequences are of all lengths, shorter than two tokens a rank among them. Scores are compared with transformers in float64.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tepo_megatron.config import RunConfig
from tepo_megatron.config.objective.presets import PRESETS
from tepo_megatron.config.objective.section import ObjectiveConfig
from tepo_megatron.core.objective.compose import build_objective
from tepo_megatron.core.scores import logprob_and_entropy
from tepo_megatron.core.types import Batch
from tepo_megatron.trainer.packing import pack
from tests.support.float64 import prompt_logprobs, token_scores
from tests.support.launch import end_model_parallel, run_dist
from tests.support.model_worlds import save_random_model
from tests.support.small_llama import VOCABULARY, draw_rollouts

LENGTHS = (3, 31, 5, 17, 24, 4, 40, 8)
TEMPERATURE = 0.7
PROMPT = [7, 60, 1, 33, 12, 12, 58]
MODELS = {"Qwen3": {"head_dim": 8, "num_hidden_layers": 4}, "Mixtral": {"num_local_experts": 4, "num_hidden_layers": 2}}

SIZES = ("cp", "tp", "pp", "vpp", "dp", "ep")

AGAINST_REFERENCE = {"preset": "grpo", "kl": {"coefficient": 0.1}}
FEW: list[dict[str, Any]] = [{"preset": "tepo"}, {"preset": "grpo"}, {"preset": "gspo"}, AGAINST_REFERENCE]
"""Two objectives of sequence ratios, two of token ratios; a KL term against the first weights."""

FIRST_ORDER = {"kl_mask": {"falling": "first_order"}}
# its lottery is drawn by the last bits of log-probs, and so all candidates win
CLIP_COV = {"preset": "clip_cov", "trust_region": {"kind": "clip_cov", "cov_low": 0.1, "fraction": 1.0}}
ALL: list[dict[str, Any]] = [
    *({"preset": preset} for preset in PRESETS if preset != "clip_cov"),
    *(CLIP_COV, AGAINST_REFERENCE, FIRST_ORDER),
]


@dataclass(frozen=True)
class Layout:
    """A split, and what is trained under it: an update for each of the objectives, one after the other."""

    cp: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    ep: int = 1
    distributed: bool = False
    model: str = "Qwen3"
    presets: str = "few"
    head: str = "logits"
    recompute: str = "none"

    @property
    def world(self) -> int:
        return self.cp * self.tp * self.pp * self.dp

    @property
    def name(self) -> str:
        split = "".join(f"{name}{size}" for name in SIZES if (size := getattr(self, name)) > 1)
        return f"{self.model}-{self.presets}-{split or 'single'}-{self.head}"

    @property
    def objectives(self) -> list[dict[str, Any]]:
        return ALL if self.presets == "all" else FEW

    def config(self, folder: Path) -> RunConfig:
        sizes = {name: getattr(self, name) for name in SIZES}
        return RunConfig.model_validate(
            {
                "model": {"path": str(folder / self.model)},
                "engine": {
                    "parallel": {**sizes, "sequence_parallel": self.tp > 1},
                    "micro_batch_tokens": 60,
                    "head": self.head,
                    "recompute": self.recompute,
                },
                # with this ε a step does not turn the sign of a gradient that is nothing but rounding into a move
                "optimizer": {"lr": 1e-3, "eps": 3e-3, "distributed": self.distributed},
                "objective": AGAINST_REFERENCE,
                "rollout": {"sampling": {"temperature": TEMPERATURE}},
            }
        )


SPLITS = [
    Layout(cp=2, presets="all"),
    Layout(cp=2, ep=2, model="Mixtral"),
    Layout(cp=2, tp=2),
    Layout(cp=2, tp=2, head="fused"),
    Layout(cp=2, pp=2, recompute="full"),
    Layout(cp=2, pp=2, vpp=2),
    Layout(cp=4, recompute="selective"),
    Layout(cp=2, dp=2, distributed=True),
]


def single(split: Layout) -> Layout:
    return Layout(model=split.model, presets=split.presets)


def updates(engine: Any, objectives: list[dict[str, Any]], rollouts: Any) -> list[dict[str, float]]:
    """One update for each objective. Old log-probs and entropies are moved a little: no ratio is 1, and masks act."""
    found, reference = [], engine.reference
    for given in objectives:
        engine.objective = build_objective(ObjectiveConfig.model_validate(given))
        engine.forward = replace(engine.forward, entropy_slope=engine.objective.needs_entropy_slope)
        engine.reference = reference if engine.objective.needs_reference else None  # to save time
        batch: Batch = engine.score(engine.batch_from_root(rollouts))
        assert batch.old_logprobs_T is not None
        assert batch.old_entropy_T is not None
        moves_T = 0.05 * torch.sin(12.9898 * torch.arange(batch.num_tokens))
        moved = {"old_logprobs_T": batch.old_logprobs_T + moves_T, "old_entropy_T": batch.old_entropy_T + moves_T.roll(1)}
        result = engine.update(batch.with_(**moved))
        sums = {name: total / count for name, (total, count) in result.sums.items() if count}
        found.append({"loss": result.loss, "grad_norm": result.grad_norm, **result.extrema, **sums})
    engine.reference = reference
    return found


def train(rank: int, layout: Layout, folder: Path) -> dict[str, Any]:
    """Everything that is compared of one layout, on this rank. ``checkpoint``: written before the last update."""

    from tepo_megatron.trainer.megatron.engine import Engine

    engine = Engine(layout.config(folder), folder / layout.model)
    rollouts = draw_rollouts(LENGTHS) if rank == 0 else None
    batch = engine.score(engine.batch_from_root(rollouts))
    report = {
        "logprobs": batch.old_logprobs_T,
        "entropy": batch.old_entropy_T,
        "prompt": engine.prompt_logprobs(PROMPT),
        "noise": engine.measure_noise(batch),
        "updates": updates(engine, layout.objectives, rollouts),
    }
    saved = engine.checkpoints.save(folder / layout.name, step=1, state={})
    report |= {"saved": saved, "updates after": updates(engine, FEW[:1], rollouts)}
    report |= {"weights": {name: tensor for name, tensor in engine.weights.stream() if tensor is not None}}
    end_model_parallel()
    return report


def resumed(rank: int, layout: Layout, folder: Path, checkpoint: Path) -> list[dict[str, float]]:
    """The update after the checkpoint."""

    from tepo_megatron.trainer.megatron.engine import Engine

    engine = Engine(layout.config(folder), folder / layout.model)
    engine.checkpoints.load(checkpoint)
    found = updates(engine, FEW[:1], draw_rollouts(LENGTHS) if rank == 0 else None)
    end_model_parallel()
    return found


def not_finite(rank: int, folder: Path) -> list[str]:
    """Why two updates were skipped: the second context-parallel rank's logits are NaN when scoring, and in the update."""

    from tepo_megatron.trainer.megatron import forward
    from tepo_megatron.trainer.megatron.engine import Engine

    engine = Engine(Layout(cp=2).config(folder), folder / "Qwen3")
    skipped = []

    def broken(logits: Tensor, *args: Any, **options: Any) -> Any:
        return logprob_and_entropy(logits * (torch.nan if rank == 1 else 1), *args, **options)

    batch = engine.batch_from_root(draw_rollouts(LENGTHS) if rank == 0 else None)
    with mock.patch.object(forward, "logprob_and_entropy", broken):
        skipped.append(engine.update(engine.score(batch)).skipped)
    scored = engine.score(batch)
    with mock.patch.object(forward, "logprob_and_entropy", broken):
        skipped.append(engine.update(scored).skipped)
    assert not engine.update(scored).skipped
    end_model_parallel()
    return skipped


def world(rank: int, size: int, layouts: list[Layout], folder: Path, checkpoint: Path | None) -> dict[Any, Any]:
    warnings.filterwarnings("ignore")
    os.environ["WORLD_SIZE"] = str(size)
    found: dict[Any, Any] = {layout: train(rank, layout, folder) for layout in layouts}
    if size == 2:
        found["not finite"] = not_finite(rank, folder)
    if checkpoint is not None:
        found["resumed"] = resumed(rank, Layout(dp=size, distributed=size > 1), folder, checkpoint)
    return found


class Worlds:
    """Runs all layouts of one world size in one world, once, on demand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = cache(self._run)

    def report(self, layout: Layout) -> dict[str, Any]:
        """Rank 0's, which has the whole of everything."""
        report: dict[str, Any] = self.run(layout.world)[0][layout]
        return report

    def _run(self, size: int) -> list[dict[Any, Any]]:
        layouts = [layout for layout in SPLITS if layout.world == size] or list(dict.fromkeys(map(single, SPLITS)))
        checkpoint = None
        if size < 4:
            checkpoint = self.report(Layout(cp=2, dp=2, distributed=True))["saved"]
        return run_dist(size, world, layouts, self.folder, checkpoint)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    folder = tmp_path_factory.mktemp("context-parallel")
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    for name, settings in MODELS.items():
        save_random_model(name, {**sizes, **settings}, folder / name, seed=len(name))
    return Worlds(folder)


def assert_same_updates(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    """To 1e-5 of each value; values near 0 to the rounding of sums of fp32 log-probs."""
    assert len(found) == len(expected)
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=2e-6), number


def same_weights(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (tensor - start[name]).norm() > 1e-4 * tensor.norm(), f"{name} was not trained"
        error = (found[name] - tensor).norm() / tensor.norm()
        assert error <= 1e-5, f"{name}: off by {error:.2e} of its norm"


@pytest.mark.parametrize("split", SPLITS, ids=lambda split: split.name)
def test_scores_match_transformers_in_float64(worlds: Worlds, split: Layout) -> None:
    report, batch = worlds.report(split), pack(draw_rollouts(LENGTHS))
    folder, mask_T = worlds.folder / split.model, batch.loss_mask_T
    logprob_R, entropy_R = (values_T[mask_T] for values_T in token_scores(folder, batch, temperature=TEMPERATURE))
    assert logprob_R.std() > 0.1
    torch.testing.assert_close(report["logprobs"][mask_T].double(), logprob_R, atol=2e-5, rtol=0)
    torch.testing.assert_close(report["entropy"][mask_T].double(), entropy_R, atol=2e-5, rtol=0)
    assert not report["logprobs"][~mask_T].any()
    assert report["prompt"] == pytest.approx(prompt_logprobs(folder, PROMPT), abs=2e-5)
    assert max(report["noise"].values()) < 1e-4


@pytest.mark.parametrize("split", SPLITS, ids=lambda split: split.name)
def test_losses_gradients_metrics_and_weights_are_those_of_one_rank(worlds: Worlds, split: Layout) -> None:
    from safetensors.torch import load_file

    found, expected = worlds.report(split), worlds.report(single(split))
    assert all(update["grad_norm"] > 0 for update in expected["updates"])
    assert_same_updates(found["updates"] + found["updates after"], expected["updates"] + expected["updates after"])
    start = load_file(worlds.folder / split.model / "model.safetensors")
    same_weights(found["weights"], expected["weights"], start)


@pytest.mark.parametrize("split", SPLITS, ids=lambda split: split.name)
def test_every_rank_reports_the_same(worlds: Worlds, split: Layout) -> None:
    first, *others = (ranks[split] for ranks in worlds.run(split.world))
    for report in others:
        assert report["updates"] == first["updates"]
        assert report["prompt"] == first["prompt"]
        assert torch.equal(report["logprobs"], first["logprobs"])


@pytest.mark.parametrize("size", [1, 2])
def test_a_checkpoint_is_resumed_without_context_parallelism(worlds: Worlds, size: int) -> None:
    """From context- and data-parallel ranks that share optimizer states, by data-parallel ones that do, and by one rank."""
    found = worlds.run(size)[0]["resumed"]
    assert_same_updates(found, worlds.report(Layout(cp=2, dp=2, distributed=True))["updates after"])


def test_what_is_not_finite_on_one_rank_stops_none_and_skips_the_update_on_all(worlds: Worlds) -> None:
    for scoring, updating in (ranks["not finite"] for ranks in worlds.run(2)):
        for skipped in (scoring, updating):
            assert "rank" in skipped
        assert "rank 1: micro-batch 0: NaN or +inf logits on tensor-parallel rank 0" in scoring
        assert "cp 0" in updating
