"""A NaN or an infinite number on one rank: no rank makes the optimizer step, and the run is as if it had never come."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tepo_megatron.config import RunConfig
from tests.support.launch import end_model_parallel, run_dist
from tests.support.model_worlds import bits_of
from tests.support.small_llama import draw_rollouts, write_llama


@dataclass(frozen=True)
class Layout:
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    cp: int = 1
    distributed: bool = False
    dtype: str = "float32"

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp * self.cp


LAYOUTS = [
    Layout(),
    Layout(tp=2),
    Layout(pp=2, vpp=2),
    Layout(dp=2),
    Layout(cp=2),
    Layout(tp=2, dp=2, distributed=True, dtype="bfloat16"),
    Layout(tp=2, pp=2, distributed=True),
    Layout(tp=2, pp=2, vpp=2),
]


def plants(layout: Layout) -> list[dict[str, Any]]:
    """Faults on the last rank, which has the last stage's head, and on the first."""
    last = layout.world - 1
    return [
        {"kind": "gradient", "rank": last, "parameter": "linear_qkv.weight", "value": torch.nan},
        {"kind": "gradient", "rank": 0, "parameter": "linear_proj.weight", "value": torch.inf},
        # Tensor-parallel ranks have copies of it, of which the gradient norm counts the first rank's alone.
        {"kind": "gradient", "rank": last, "parameter": "layernorm", "value": torch.nan},
        {"kind": "logits", "rank": last, "value": torch.nan},
        {"kind": "logits", "rank": last, "value": torch.nan, "phase": "score"},
        {"kind": "sampler", "rank": 0, "value": torch.nan},
    ]


def state_of(engine: Any) -> tuple[str, int, float]:
    """This rank's weights, masters and both Adam states to the last bit; the number of updates; the learning rate."""
    from tepo_megatron.trainer.megatron.optimizer_states import OptimizerStates

    params = engine.policy.params
    states = {f"{name} {state}": value for name, state, value in OptimizerStates(engine.policy.optimizer).collect(params)}
    return bits_of({**states, **params}), engine.counters.updates, engine.policy.optimizer.param_groups[0]["lr"]


def planted_and_whole(rank: int, world: int, layout: Layout, model: Path) -> dict[str, Any]:
    """An engine that skips every planted update, and one without them, make the same whole ones."""
    warnings.filterwarnings("ignore")
    os.environ["WORLD_SIZE"] = str(world)
    report = train(layout, model, plants(layout))
    assert report["after"] == train(layout, model, [])["after"]
    return report


def train(layout: Layout, model: Path, faults: list[dict[str, Any]]) -> dict[str, Any]:
    from tepo_megatron.trainer.megatron.engine import Engine

    parallel = {name: getattr(layout, name) for name in ("tp", "pp", "vpp", "dp", "cp")}
    config = {
        "model": {"path": str(model), "dtype": layout.dtype},
        "engine": {"parallel": parallel, "micro_batch_tokens": 20, "noise_every": 0},
        "objective": {"preset": "grpo"},
        "optimizer": {"lr": 1e-3, "warmup_steps": 4, "distributed": layout.distributed},
        "train": {"minibatches": 1, "steps": 10},
    }
    engine = Engine(RunConfig.model_validate(config), model)
    is_root, rollouts = engine.ranks.rank == 0, draw_rollouts([5, 7, 6, 9, 8, 5, 7, 6])
    skipped = []
    for fault in faults:
        sampled = list(rollouts)
        if fault["kind"] == "sampler":
            logprobs = np.array([float("nan"), *rollouts[3].sampler_logprobs[1:]])
            sampled[3] = replace(rollouts[3], sampler_logprobs=logprobs)
        batch = engine.batch_from_root(sampled if is_root else None)
        before = state_of(engine)
        with planted(engine, fault, phase="score"):
            batch = engine.score(batch)
        with planted(engine, fault, phase="update"):
            result = engine.update(batch)
        assert result.skipped, f"the step was made with {fault}"
        assert state_of(engine) == before, f"{fault} changed something"
        skipped.append(result.skipped)
    assert engine.counters.updates_skipped == len(faults)
    batch = engine.score(engine.batch_from_root(rollouts if is_root else None))
    for _ in range(2):
        result = engine.update(batch)
        assert not result.skipped
    after = state_of(engine)
    assert after[1] == 2
    # A return to a checkpoint, in place: what was trained since is gone, and comes again in the same bits.
    saved = engine.checkpoints.save(model.parent / f"checkpoints-{len(faults)}", step=1, state={})
    engine.update(batch)
    trained = state_of(engine)
    engine.update(batch)
    engine.checkpoints.load(saved)
    assert state_of(engine)[:2] == after[:2]
    engine.update(batch)
    assert state_of(engine) == trained
    end_model_parallel()
    return {"skipped": skipped, "after": (*after, result.lr, result.grad_norm)}


@contextmanager
def planted(engine: Any, fault: dict[str, Any], *, phase: str) -> Iterator[None]:
    """The fault, on its rank and in its phase."""
    handles, value = [], fault["value"]
    if fault["rank"] == engine.ranks.rank and fault.get("phase", "update") == phase:
        if fault["kind"] == "gradient":
            last = f"model{len(engine.policy.chunks) - 1}." if len(engine.policy.chunks) > 1 else ""
            params = engine.policy.params.items()
            param = next(param for name, param in params if name.startswith(last) and fault["parameter"] in name)
            handles.append(param.register_hook(lambda gradient: gradient * value))
        if fault["kind"] == "logits":
            head = engine.policy.chunks[-1].output_layer
            handles.append(head.register_forward_hook(lambda _module, _inputs, output: (output[0] * value, output[1])))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_no_rank_makes_the_step_and_the_next_one_is_as_without_it(layout: Layout, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    first, *others = run_dist(
        layout.world, planted_and_whole, layout, write_llama(tmp_path / "model", scale=0.1, num_hidden_layers=4)
    )
    assert all(report["skipped"] == first["skipped"] for report in others)
    causes = first["skipped"]
    if layout.vpp > 1:
        place = f"rank {layout.world - 1} (tp {layout.tp - 1}, pp 1, dp 0)"
        qkv = "model1.decoder.layers.0.self_attention.linear_qkv.weight"
        assert causes[0] == f"{place}: the gradient of {qkv} is not finite"
        assert all("NaN or +inf logits" in cause for cause in causes[3:5])
    if layout.cp > 1:  # the other rank gets NaN as this one's scores, and finds it
        assert "cp 0" in causes[3]
        assert "rank 1: micro-batch 0: NaN or +inf logits on tensor-parallel rank 0" in causes[4]
    if layout == Layout(tp=2):
        place = "rank 1 (tp 1, pp 0, dp 0): the gradient of "
        assert causes[0] == f"{place}decoder.layers.0.self_attention.linear_qkv.weight is not finite"
        assert causes[2].startswith(place)
        assert "layernorm" in causes[2]
        for cause in causes[3:5]:
            assert "micro-batch 0: NaN or +inf logits on tensor-parallel rank 1, first at token" in cause
        assert "sampler_logprobs_T is nan at token" in causes[5]
