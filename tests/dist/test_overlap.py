"""Overlapped communication and recomputation change when things are computed, and not one bit of what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import run_world
from tests.support.small_llama import write_llama

BUCKET = 3000
"""Parameters; the models have some 30 000, so that there are several buckets."""

REDUCE = {"overlap_grad_reduce": True, "bucket_size": BUCKET}
BOTH = {**REDUCE, "overlap_param_gather": True}
EXPERTS: dict[str, Any] = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}


def run(folder: Path, variants: list[dict[str, Any]], *, nan_at: int | None = None) -> list[list[dict[str, Any]]]:
    """What each rank saw of each variant of ``engine``; with the key ``experts`` the model is a mixture of experts."""
    models: dict[str, dict[str, Any]] = {"dense": {}, "experts": EXPERTS}
    for name, changes in models.items():
        (folder / name).mkdir()
        write_llama(folder / name, scale=0.1, num_hidden_layers=4, **changes)
    runs = []
    for number, variant in enumerate(variants):
        engine = {name: value for name, value in variant.items() if name != "experts"}
        (folder / f"out{number}").mkdir()
        config = {
            "model": {"path": str(folder / ("experts" if "experts" in variant else "dense")), "dtype": "bfloat16"},
            "engine": {"micro_batch_tokens": 20, "noise_every": 0, **engine},
            "objective": {"preset": "grpo"},
            # no clipping: the norm is a sum in an order that depends on the buckets
            "optimizer": {"lr": 1e-2, "clip_grad": 1e6, "distributed": engine["parallel"].get("dp", 1) > 1},
            "train": {"minibatches": 2, "steps": 3},
        }
        runs.append({"config": config, "out": str(folder / f"out{number}"), "nan_at": nan_at})
    (folder / "case.json").write_text(json.dumps({"runs": runs}))
    parallel = variants[0]["parallel"]
    world = parallel.get("tp", 1) * parallel.get("pp", 1) * parallel.get("dp", 1)
    run_world("variants", world, folder / "case.json")
    return [
        [json.loads((folder / f"out{number}" / f"rank{rank}.json").read_text()) for rank in range(world)]
        for number in range(len(variants))
    ]


def assert_equal(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for ours, plain in zip(found, expected, strict=True):
        assert [ours[name] for name in ("weights", "own", "between")] == [plain[name] for name in ("weights", "own", "between")]
        for (skipped, norm, loss), (was_skipped, expected_norm, expected_loss) in zip(
            ours["updates"], plain["updates"], strict=True
        ):
            assert bool(skipped) == bool(was_skipped)
            assert (norm, loss) == pytest.approx((expected_norm, expected_loss), rel=1e-6, nan_ok=True)


@pytest.mark.parametrize(
    "engines",
    [
        [{"parallel": {"dp": 2}, "head": "fused"}, {"parallel": {"dp": 2, "ep": 2}, "experts": True}],
        [{"parallel": {"dp": 2, "tp": 2, "sequence_parallel": True}}, {"parallel": {"dp": 2, "pp": 2, "vpp": 2}}],
    ],
    ids=["2 ranks", "4 ranks"],
)
def test_overlapped_reductions_and_gathers_give_the_same_bits(engines: list[dict[str, Any]], tmp_path: Path) -> None:
    """Also with an update in the middle that is skipped, while the weights of the one before are still to be gathered."""
    kinds: list[dict[str, Any]] = [{}, REDUCE, BOTH]
    found = run(tmp_path, [{**engine, **kind} for engine in engines for kind in kinds], nan_at=1)
    for start in range(0, len(found), len(kinds)):
        plain, reduced, both = found[start : start + len(kinds)]
        assert_equal(reduced, plain)
        assert_equal(both, plain)
        for ranks in (plain, reduced, both):
            assert [bool(skipped) for skipped, *_ in ranks[0]["updates"]] == [False, True, False, False, False, False]
        for rank in range(len(plain)):
            assert not any(plain[rank]["early"])
            # The first update of a run tells Megatron what makes a bucket complete.
            assert reduced[rank]["early"] == both[rank]["early"] == [False] + [True] * 5
            assert plain[rank]["pending"] == reduced[rank]["pending"] == [False] * 4
            assert both[rank]["pending"] == [False, False, True, False]


def test_recomputed_modules_are_computed_twice_and_give_the_same_bits(tmp_path: Path) -> None:
    split = {"tp": 2, "sequence_parallel": True}
    dense = [(), ("core_attn",), ("mlp",), ("core_attn", "mlp")]
    experts = [(), ("moe",), ("core_attn", "moe")]

    def variant(modules: tuple[str, ...], **model: bool) -> dict[str, Any]:
        recompute = {"recompute": "selective", "recompute_modules": list(modules)} if modules else {}
        return {"parallel": split, **recompute, **model}

    found = run(tmp_path, [variant(each) for each in dense] + [variant(each, experts=True) for each in experts])
    for start, kinds in ((0, dense), (len(dense), experts)):
        plain = found[start]
        for modules, ranks in zip(kinds, found[start : start + len(kinds)], strict=True):
            assert_equal(ranks, plain)
            for name, recomputed in (("core_attention", "core_attn" in modules), ("mlp", {"mlp", "moe"} & {*modules})):
                assert (ranks[0]["calls"][name] > plain[0]["calls"][name]) == bool(recomputed), (modules, name)
