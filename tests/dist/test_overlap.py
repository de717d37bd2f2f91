"""Overlapped communication and recomputation change when things are computed, and not one bit of what."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.engines import bits_of, make_engine, save_checkpoint
from tests.support.launch import run_dist
from tests.support.random_models import draw_rollouts, write_llama

LENGTHS = [5, 17, 6, 9, 8, 5, 12, 6]
BUCKET = 3000  # parameters; the models have some 15 000, so that there are several buckets
REDUCE = {"overlap_grad_reduce": True, "bucket_size": BUCKET}
BOTH: dict[str, Any] = {**REDUCE, "overlap_param_gather": True}
EXPERTS: dict[str, Any] = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}
TP: dict[str, Any] = {"tp": 2, "sequence_parallel": True}
POLICY = "tepo_megatron.trainer.megatron.policy"
Variant = dict[str, Any]
"""The section ``engine``. With the key ``experts`` the model is a mixture of experts; with ``asks`` stages exchange shapes."""


def train(variant: Variant, folder: Path, steps: int, nan_at: int | None) -> dict[str, Any]:
    """Trains steps of two mini-batches; the second step has twice as many micro-batches. Between the two of the second step it
    scores, between those of the third it reads the weights. ``nan_at``: the update, from 0, that meets a gradient that is NaN.
    """
    from tepo_megatron.run.step.minibatches import minibatches

    parallel, model = variant["parallel"], "experts" if variant.pop("experts", False) else "dense"
    config = {
        "model": {"path": str(folder / model), "dtype": "bfloat16"},
        "engine": {"micro_batch_tokens": 20, "noise_every": 0, **variant},
        "objective": {"preset": "grpo"},
        # no clipping: the norm is a sum in an order that depends on the buckets
        "optimizer": {"lr": 1e-2, "clip_grad": 1e6, "distributed": parallel.get("dp", 1) > 1},
        "train": {"minibatches": 2, "steps": steps},
    }
    engine = make_engine(config)
    root = engine.ranks.rank == 0
    seen: dict[str, Any] = {"updates": [], "weights": [], "pending": []}
    seen |= {"early": reductions_under_way(engine), "calls": calls_of_modules(engine)}
    for step in range(steps):
        batch = engine.batch_from_root(draw_rollouts(LENGTHS * (1, 2, 1)[step]) if root else None)
        parts = [engine.score(part) for part in minibatches(batch, 2, seed=0, step=step)]
        for number, part in enumerate(parts, start=2 * step):
            last = number % 2 == 1
            param = next(iter(engine.policy.params.values()))
            with param.register_hook(lambda gradient: gradient * torch.nan) if number == nan_at and root else nullcontext():
                result = engine.update(part, last=last)
            seen["updates"].append([bool(result.skipped), result.grad_norm, result.loss])
            if step == 1 and not last:
                seen["between"] = engine.score(part).old_logprobs_T.tolist()
            if step == 2 or last:
                held = bits_of(engine.policy.params)
                seen["pending"].append(held != bits_of(engine.weights.params))
        seen["weights"].append(engine.weights.version(step).digest)
    return {**seen, "own": bits_of(engine.weights.params)}


def reductions_under_way(engine: Any) -> list[bool]:
    """For each update, whether the reduction of every bucket had begun when Megatron came to finish it."""
    early: list[bool] = []
    chunks = engine.policy.ddp
    groups = [group for chunk in chunks for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)]
    finish = chunks[0].finish_grad_sync

    def noted(*args: Any, **kwargs: Any) -> None:
        early.append(all(group.grad_reduce_handle is not None for group in groups))
        finish(*args, **kwargs)

    chunks[0].finish_grad_sync = noted
    return early


def calls_of_modules(engine: Any) -> dict[str, int]:
    """How often the first layer's MLP (of experts: the router) and attention are computed."""
    layer = engine.policy.chunks[0].decoder.layers[0]
    modules = {"mlp": getattr(layer.mlp, "router", layer.mlp), "core_attention": layer.self_attention.core_attention}
    calls = dict.fromkeys(modules, 0)
    for name, module in modules.items():
        module.register_forward_hook(lambda *_, name=name: calls.update({name: calls[name] + 1}))
    return calls


def in_turn(_rank: int, _world: int, folder: Path, variants: list[Variant], steps: int, nan_at: int | None) -> Any:
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    from tepo_megatron.trainer.megatron import forward

    def asking(group: Any, config: Any) -> Any:
        return P2PCommunicator(group, SimpleNamespace(**vars(config) | {"variable_seq_lengths": True}))

    stages, reports = forward._Stages, []
    torch.cuda.synchronize = waits = mock.Mock()
    for variant in variants:
        forward._Stages = asking if variant.pop("asks", False) else stages  # type: ignore[assignment, misc]
        waits.reset_mock()
        reports.append({**train(variant, folder, steps, nan_at), "waits": waits.call_count})
    return reports


def run(
    folder: Path, world: int, variants: list[Variant], *, layers: int = 2, steps: int = 3, nan_at: int | None = None
) -> list[list[dict[str, Any]]]:
    write_llama(folder / "dense", scale=0.1, num_hidden_layers=layers)
    write_llama(folder / "experts", scale=0.1, num_hidden_layers=2, **EXPERTS)
    ranks = run_dist(world, in_turn, folder, variants, steps, nan_at)
    return [list(reports) for reports in zip(*ranks, strict=True)]


def assert_equal(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for ours, plain in zip(found, expected, strict=True):
        for name in {"weights", "own", "between"} & {*plain}:
            assert ours[name] == plain[name], name
        assert ours["updates"] == [pytest.approx(update, rel=1e-6, nan_ok=True) for update in plain["updates"]]


OVERLAPPED: dict[int, list[Variant]] = {
    2: [{"parallel": {"dp": 2}, "head": "fused"}],
    4: [
        {"parallel": {"dp": 2, **TP}},
        {"parallel": {"dp": 2, "pp": 2, "vpp": 2}},
        {"parallel": {"dp": 4, "ep": 2}, "experts": True},
    ],
}


@pytest.mark.parametrize("world", OVERLAPPED)
def test_overlapped_reductions_and_gathers_give_the_same_bits(world: int, tmp_path: Path) -> None:
    """Also with an update in the middle that is skipped, while the weights of the one before are still to be gathered."""
    variants = [{**engine, **kind} for engine in OVERLAPPED[world] for kind in ({}, REDUCE, BOTH)]
    found = run(tmp_path, world, variants, layers=world, nan_at=1)
    for plain, reduced, both in zip(found[::3], found[1::3], found[2::3], strict=True):
        assert_equal(reduced, plain)
        assert_equal(both, plain)
        for ranks in (plain, reduced, both):
            assert [skipped for skipped, *_ in ranks[0]["updates"]] == [False, True, False, False, False, False]
        for rank in range(len(plain)):
            assert not any(plain[rank]["early"])
            # The first update of a run tells Megatron what makes a bucket complete.
            assert reduced[rank]["early"] == both[rank]["early"] == [False] + [True] * 5
            assert plain[rank]["pending"] == reduced[rank]["pending"] == [False] * 4
            assert both[rank]["pending"] == [False, False, True, False]


def test_recomputed_modules_are_computed_twice_and_give_the_same_bits(tmp_path: Path) -> None:
    kinds: list[tuple[str, ...]] = [(), ("core_attn",), ("mlp",), (), ("core_attn", "moe")]  # the last two with experts
    recomputed = [{"recompute": "selective", "recompute_modules": list(modules)} if modules else {} for modules in kinds]
    found = run(tmp_path, 2, [{"parallel": TP, "experts": i > 2, **kind} for i, kind in enumerate(recomputed)], steps=1)
    for i, (modules, ranks) in enumerate(zip(kinds, found, strict=True)):
        plain = found[3 if i > 2 else 0]
        assert_equal(ranks, plain)
        for name, twice in (("core_attention", "core_attn" in modules), ("mlp", {"mlp", "moe"} & {*modules})):
            assert (ranks[0]["calls"][name] > plain[0]["calls"][name]) == bool(twice), (modules, name)


def test_stages_know_the_lengths_of_micro_batches_and_exchange_no_shapes(tmp_path: Path) -> None:
    """A wait for the device ends each exchange of shapes. The bits are those of stages that exchange them."""
    splits = [{"pp": 4}, {"pp": 4, "vpp": 2}, {"pp": 2, "dp": 2, "vpp": 4}, {"pp": 2, "cp": 2, "vpp": 2}, {"pp": 2, **TP}]
    variants = [{"parallel": split, "asks": asks} for split in splits for asks in (False, True)]
    found = run(tmp_path, 4, variants, layers=8, steps=1)
    for ours, asking in zip(found[::2], found[1::2], strict=True):
        assert_equal(ours, asking)
        assert all(known["waits"] == 0 < asked["waits"] for known, asked in zip(ours, asking, strict=True))


def engine_with_gathers(folder: Path, apart: bool, *, model: str = "dense", **engine: Any) -> Any:
    """``apart``: as for MXFP8 weights, the gather's memory is not that of the parameters."""
    config = {
        "model": {"path": str(folder / model), "dtype": "bfloat16"},
        "engine": {"parallel": {"dp": 2}, "micro_batch_tokens": 20, "noise_every": 0, **engine},
        "objective": {"preset": "grpo"},
        "optimizer": {"lr": 1e-2, "distributed": True},
    }
    reuse = {"reuse_grad_buf_for_mxfp8_param_ag": apart}
    with (
        mock.patch(f"{POLICY}.fp8.gather_options", return_value={"fp8_param_gather": apart, **reuse}),
        mock.patch(f"{POLICY}.optimizer_options", return_value={"fp8_recipe": "mxfp8" if apart else None, **reuse}),
    ):
        return make_engine(config)


def updated(_rank: int, _world: int, folder: Path, apart: bool, model: str, parallel: dict[str, int]) -> str:
    engine = engine_with_gathers(folder, apart, model=model, parallel=parallel)
    batch = engine.score(engine.batch_from_root(draw_rollouts(LENGTHS) if engine.ranks.rank == 0 else None))
    chunk = engine.policy.ddp[0]
    with mock.patch.object(chunk, "start_param_sync", wraps=chunk.start_param_sync) as gather:
        assert not engine.update(batch).skipped
    assert gather.call_count == 1
    return bits_of(engine.weights.params)


@pytest.mark.parametrize("kind", [("dense", {"dp": 2}), ("experts", {"dp": 2, "ep": 2})], ids=lambda kind: kind[0])
def test_weights_beside_the_memory_of_their_gather_get_the_same_bits(kind: tuple[str, dict[str, int]], tmp_path: Path) -> None:
    """Some parameters' sizes are no multiples of the 64 elements at which Megatron lets parameters begin."""
    write_llama(tmp_path / kind[0], scale=0.1, num_hidden_layers=2, **(EXPERTS if kind[0] == "experts" else {}))
    plain, apart = (run_dist(2, updated, tmp_path, apart, *kind) for apart in (False, True))
    assert apart == plain


def trained_and_restored(_rank: int, _world: int, folder: Path, overlaps: bool, apart: bool) -> dict[str, Any]:
    """``copied``: the parameters whose FP8 copies Megatron makes after a restore, if it takes all of them for FP8 tensors."""
    from megatron.core.distributed import distributed_data_parallel, param_and_grad_buffer
    from megatron.core.optimizer import distrib_optimizer

    engine = engine_with_gathers(folder, apart, **(BOTH if overlaps else {}))
    batch = engine.score(engine.batch_from_root(draw_rollouts(LENGTHS) if engine.ranks.rank == 0 else None))
    engine.update(batch)
    saved, before = save_checkpoint(engine, folder / "checkpoints", step=1, state={}), bits_of(engine.weights.params)
    engine.update(batch)
    assert bits_of(engine.weights.params) != before
    copied: list[Any] = []
    for module in (distributed_data_parallel, param_and_grad_buffer):
        module.is_float8tensor = lambda param: not apart
        module.post_all_gather_processing = copied.extend
    distrib_optimizer.is_float8tensor = lambda param: apart
    distrib_optimizer.quantize_param_shard = lambda *_: None
    engine.checkpoints.load(saved)
    names = {id(param): name for name, param in engine.policy.params.items()}
    made = sorted(names[id(param)] for param in copied)
    return {"before": before, "restored": bits_of(engine.weights.params), "copied": made, "all": sorted(names.values())}


@pytest.mark.parametrize(("overlaps", "apart"), [(False, False), (True, False), (False, True)])
def test_a_restore_makes_the_copies_that_fp8_weights_need(overlaps: bool, apart: bool, tmp_path: Path) -> None:
    write_llama(tmp_path / "dense", scale=0.1, num_hidden_layers=2)
    for rank in run_dist(2, trained_and_restored, tmp_path, overlaps, apart):
        assert rank["restored"] == rank["before"]
        assert rank["copied"] == ([] if apart else rank["all"])
