"""A NaN or an infinite number on one rank: no rank makes the optimizer step, and the run is as if it had never come."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import run_world
from tests.support.small_llama import write_llama


@dataclass(frozen=True)
class Layout:
    tp: int = 1
    pp: int = 1
    dp: int = 1
    distributed: bool = False
    dtype: str = "float32"

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp


LAYOUTS = [
    Layout(),
    Layout(tp=2),
    Layout(pp=2),
    Layout(dp=2),
    Layout(tp=2, dp=2, distributed=True, dtype="bfloat16"),
    Layout(tp=2, pp=2, distributed=True),
]


def plants(layout: Layout) -> list[dict[str, Any]]:
    """Faults on the last rank, which has the last stage's head, and where there are several also on the first."""
    last = layout.world - 1
    found = [
        {"kind": "gradient", "rank": last, "parameter": "linear_qkv.weight", "value": "nan"},
        {"kind": "gradient", "rank": 0, "parameter": "linear_proj.weight", "value": "inf"},
        # Tensor-parallel ranks have copies of it, of which the gradient norm counts the first rank's alone.
        {"kind": "gradient", "rank": last, "parameter": "layernorm", "value": "nan"},
        {"kind": "logits", "rank": last, "value": "nan"},
        {"kind": "logits", "rank": last, "value": "nan", "phase": "score"},
        {"kind": "sampler", "rank": 0, "value": "nan"},
    ]
    return found


def run(folder: Path, layout: Layout, planted: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each rank reported."""
    out = folder / ("planted" if planted else "whole")
    out.mkdir()
    (folder / "model").mkdir(exist_ok=True)
    model = write_llama(folder / "model", scale=0.1)
    config = {
        "model": {"path": str(model), "dtype": layout.dtype},
        "engine": {"parallel": {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp}, "micro_batch_tokens": 20, "noise_every": 0},
        "objective": {"preset": "grpo"},
        "optimizer": {"lr": 1e-3, "warmup_steps": 4, "distributed": layout.distributed},
        "train": {"minibatches": 1, "steps": 10},
    }
    (out / "case.json").write_text(json.dumps({"config": config, "plants": planted, "out": str(out)}))
    run_world("not_finite", layout.world, out / "case.json")
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(layout.world)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_no_rank_makes_the_step_and_the_next_one_is_as_without_it(layout: Layout, tmp_path: Path) -> None:
    found, whole = run(tmp_path, layout, plants(layout)), run(tmp_path, layout, [])
    for rank, report in enumerate(found):
        for plant in report["plants"]:
            assert plant["skipped"], f"rank {rank} made the step with {plant}"
            assert plant["unchanged"], f"rank {rank} changed under {plant}"
        assert report["skipped"] == len(report["plants"])
        assert [plant["skipped"] for plant in report["plants"]] == [plant["skipped"] for plant in found[0]["plants"]]
        assert {name: report[name] for name in whole[rank] if name not in ("plants", "skipped")} == {
            name: whole[rank][name] for name in whole[rank] if name not in ("plants", "skipped")
        }
    assert whole[0]["updates"] == found[0]["updates"] == 2


def test_the_first_cause_names_rank_and_place(tmp_path: Path) -> None:
    layout = Layout(tp=2)
    found = run(tmp_path, layout, plants(layout))[0]["plants"]
    assert found[0]["skipped"] == (
        "rank 1 (tp 1, pp 0, dp 0): the gradient of decoder.layers.0.self_attention.linear_qkv.weight is not finite"
    )
    assert "layernorm" in found[2]["skipped"]
    assert found[2]["skipped"].startswith("rank 1 (tp 1, pp 0, dp 0): the gradient of ")
    for logits in found[3:5]:
        assert "micro-batch 0: NaN or +inf logits on tensor-parallel rank 1, first at token" in logits["skipped"]
    assert "sampler_logprobs_T is nan at token" in found[5]["skipped"]
