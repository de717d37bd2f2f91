"""A NaN or an infinite number on one rank: no rank makes the optimizer step, and the run is as if it had never come."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.engines import Split, Worlds, bits_of, make_engine, save_checkpoint, states_of
from tests.support.random_models import draw_rollouts, write_llama


@dataclass(frozen=True, kw_only=True)
class Layout(Split):
    dtype: str = "float32"


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
    bits = bits_of({**states_of(engine), **engine.policy.params})
    return bits, engine.counters.updates, engine.policy.optimizer.param_groups[0]["lr"]


def planted_and_whole(layout: Layout, folder: Path) -> dict[str, Any]:
    """An engine that skips every planted update, and one without them, make the same whole ones."""
    report = train(layout, folder, plants(layout))
    assert report["after"] == train(layout, folder, [])["after"]
    return report


def train(layout: Layout, folder: Path, faults: list[dict[str, Any]]) -> dict[str, Any]:
    config = {
        "model": {"path": str(folder / "model"), "dtype": layout.dtype},
        "engine": {"parallel": layout.parallel, "micro_batch_tokens": 20, "noise_every": 0},
        "objective": {"preset": "grpo"},
        "optimizer": {"lr": 1e-3, "warmup_steps": 4, "distributed": layout.distributed},
        "train": {"minibatches": 1, "steps": 10},
    }
    engine = make_engine(config)
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
    made = (*after, result.lr, result.grad_norm)
    if not faults:
        return {"skipped": skipped, "after": made}
    # A return to a checkpoint, in place: what was trained since is gone, and comes again in the same bits.
    saved = save_checkpoint(engine, folder / layout.name, step=1, state={})
    engine.update(batch)
    trained = state_of(engine)
    engine.update(batch)
    engine.checkpoints.load(saved)
    assert state_of(engine)[:2] == after[:2]
    engine.update(batch)
    assert state_of(engine) == trained
    return {"skipped": skipped, "after": made}


@contextmanager
def planted(engine: Any, fault: dict[str, Any], *, phase: str) -> Iterator[None]:
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


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds[Layout]:
    folder = tmp_path_factory.mktemp("not_finite")
    write_llama(folder / "model", scale=0.1, num_hidden_layers=4)
    return Worlds(folder, LAYOUTS, planted_and_whole)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_no_rank_makes_the_step_and_the_next_one_is_as_without_it(worlds: Worlds[Layout], layout: Layout) -> None:
    first, *others = worlds.ranks(layout)
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
