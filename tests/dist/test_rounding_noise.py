"""Rounding that depends on where a token stands in its micro-batch must not look like a change of the policy.

A GPU's kernels round a token's logits by its place: which tile, which split of a sum, which slot of a reduce-scatter ring. The
CPU's do not, so noise is added here that is a function of the place (row, number of rows) and the column alone. In the first
update after a rollout nothing has changed: every ratio is exactly 1, no entropy has moved, and TEPO's mask holds back nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tepo_megatron.core.scores import logprob_and_entropy
from tepo_megatron.core.types import Batch, TokenScores
from tests.support.engines import figures, make_engine
from tests.support.launch import run_dist
from tests.support.random_models import draw_rollouts, write_llama

pytestmark = pytest.mark.gpu_conditions

LENGTHS = [9, 31, 5, 17, 24, 12, 40, 8, 21, 15, 6, 28]
NOISE = 0.02
"""The largest change of a logit: as large as one bfloat16 unit in the last place of a logit of 5 (2⁻⁵)."""


def by_place(logits_TVp: Tensor, first_column: int) -> Tensor:
    """Noise [T, V/p] in (−NOISE, NOISE) without a pattern: the same for the same row, number of rows and column."""
    rows, columns = logits_TVp.shape
    row_T = torch.arange(rows, dtype=torch.float64)[:, None]
    column_V = torch.arange(first_column, first_column + columns, dtype=torch.float64)
    return (NOISE * torch.sin(12.9898 * row_T + 78.233 * rows + 37.719 * column_V + row_T * column_V)).to(logits_TVp.dtype)


@contextmanager
def noise_by_place(engine: Any, scale: float = 1.0) -> Iterator[None]:
    from tepo_megatron.trainer.megatron import forward

    def scores(logits_TVp: Tensor, *arguments: Any, **options: Any) -> TokenScores:
        assert options["backend"] == engine.config.engine.score_backend
        first_column = engine.ranks.tp_rank * logits_TVp.shape[1]
        return logprob_and_entropy(logits_TVp + scale * by_place(logits_TVp, first_column), *arguments, **options)

    with mock.patch.object(forward, "logprob_and_entropy", scores):
        yield


def sampled(engine: Any) -> Batch:
    batch: Batch = engine.batch_from_root(draw_rollouts(LENGTHS) if engine.ranks.rank == 0 else None)
    return batch


def first_update(engine: Any, *, whole_step_scored: bool = False) -> dict[str, float]:
    from tepo_megatron.run.step.minibatches import minibatches

    def cut(batch: Batch) -> Batch:
        return next(minibatches(batch, engine.config.train.minibatches, seed=0, step=0))

    with noise_by_place(engine):
        batch = sampled(engine)
        return figures(engine.update(cut(engine.score(batch)) if whole_step_scored else engine.score(cut(batch))))


def measured(engine: Any, *, scale: float) -> dict[str, float]:
    """The engine's measurement, where logits get ``scale`` times the noise of this file. The weights must not change."""
    before = engine.weights.version(0).digest
    with noise_by_place(engine, scale):
        noise: dict[str, float] = engine.measure_noise(sampled(engine))
    assert engine.weights.version(0).digest == before
    assert engine.counters.entropy_noise == noise["entropy/noise/p50"]  # the automatic tolerance
    return noise


def smallest_update(engine: Any) -> dict[str, float]:
    """What the objective sees of a second update after one whose learning rate is next to 0."""
    from tepo_megatron.run.step.minibatches import minibatches

    batch = sampled(engine)
    engine.measure_noise(batch)
    parts = [engine.score(part) for part in minibatches(batch, 3, seed=0, step=0)]
    changes = [figures(engine.update(part, last=part is parts[-1])) for part in parts]
    return {"masked": changes[1]["mask/fraction"], "kl": changes[1]["kl/mean"], "nothing": changes[0]["kl/mean"]}


Looks = dict[str, tuple[dict[str, Any], Callable[[Any], dict[str, float]]]]
"""By name, the configuration of an engine, and what is looked at."""


def in_turn(rank: int, world: int, looks: Looks, model_dir: Path) -> dict[str, dict[str, float]]:
    path = {"path": str(model_dir)}
    return {
        name: look(make_engine({**config, "model": {**config.get("model", {}), **path}}))
        for name, (config, look) in looks.items()
    }


def case(micro_batch_tokens: int, **parallel: Any) -> dict[str, Any]:
    return {
        "engine": {"platform": "cpu", "parallel": parallel, "micro_batch_tokens": micro_batch_tokens},
        "objective": {"preset": "tepo", "kl_mask": {"falling": "measured", "tolerance": 0.0}},
        "rollout": {"prompts_per_step": 3, "samples_per_prompt": 4},
        "train": {"minibatches": 3},
    }


TP: dict[str, Any] = {"tp": 2, "sequence_parallel": True}
WORLDS = {
    1: [case(size) for size in (1, 40, 64, 100, 4096)],
    2: [*(case(size, **split) for split in (TP, {"pp": 2}, {"dp": 2}) for size in (40, 100)), case(60, cp=2)],
    4: [case(60, **TP, pp=2), case(60, tp=2, dp=2)],
}
Reports = list[dict[str, dict[str, float]]]


@pytest.fixture(scope="module", params=WORLDS)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """What each rank of a world sees of the first update in each case, and more in the first case alone."""
    cases = WORLDS[request.param]
    coarse = {**cases[0], "model": {"dtype": "bfloat16"}}
    optimizer = {"lr": 1e-6, "warmup_steps": 0, "distributed": False}
    looks: Looks = {
        **{f"first update {config['engine']}": (config, first_update) for config in cases},
        "noise in float32": (cases[0], partial(measured, scale=1.0)),
        "noise in bfloat16": (coarse | {"engine": coarse["engine"] | {"score_backend": "torch"}}, partial(measured, scale=0.0)),
        "smallest update": ({**coarse, "objective": {"preset": "tepo"}, "optimizer": optimizer}, smallest_update),
    }
    if request.param == 1:
        looks["scored in other micro-batches"] = (case(100), partial(first_update, whole_step_scored=True))
    model_dir = write_llama(tmp_path_factory.mktemp("noise"), scale=0.1)
    return run_dist(request.param, in_turn, looks, model_dir)


def test_nothing_has_changed_in_the_first_update_after_a_rollout(ranks: Reports) -> None:
    for rank in ranks:
        for name, update in rank.items():
            if name.startswith("first update"):
                changes = {key: update[key] for key in ("entropy/delta", "mask/fraction", "kl/mean", "clip/low", "clip/high")}
                assert (update["ratio/min"], update["ratio/max"]) == (1.0, 1.0), name
                assert set(changes.values()) == {0.0}, (name, changes)


@pytest.mark.parametrize("ranks", [1], indirect=True)
def test_scored_in_other_micro_batches_the_noise_looks_like_a_change(ranks: Reports) -> None:
    """What the test above would miss if the noise were too small, or did not depend on the place."""
    update = ranks[0]["scored in other micro-batches"]
    assert update["ratio/max"] > 1 + 1e-3
    assert update["mask/fraction"] > 0.1


def test_the_noise_of_weights_that_are_rounded_again_is_measured_and_not_that_of_another_place(ranks: Reports) -> None:
    """Next to none in float32, though places differ by much more, and thousands of times as much in bfloat16."""
    plain, coarse = ranks[0]["noise in float32"], ranks[0]["noise in bfloat16"]
    for name in ("entropy/noise", "ratio/noise", "sequence_ratio/noise"):
        assert 0 <= plain[f"{name}/p50"] <= plain[f"{name}/p90"] <= plain[f"{name}/p99"] < 1e-5, name
        assert 1e3 * plain[f"{name}/p99"] < coarse[f"{name}/p99"] < 0.1, name


def test_an_update_that_only_rounds_weights_again_is_mostly_within_the_automatic_tolerance(ranks: Reports) -> None:
    """In bfloat16 at a learning rate of 1e-6: scores move, and few entropies fall by more than the median of the noise."""
    result = ranks[0]["smallest update"]
    assert result["nothing"] == 0 < result["kl"]
    assert result["masked"] <= 0.2, result  # half of the tokens have a positive advantage
