"""What a fused head changes in a plan: no logits of a micro-batch, and the head's product once more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tepo_megatron.config import RunConfig
from tepo_megatron.config.load import load_run
from tepo_megatron.plan import make_plan
from tepo_megatron.plan.memory import FUSED_HEAD_CHUNK, GIB, RankMemory, TrainingRanks
from tepo_megatron.plan.shapes import resolve_spec

TOKENS, LAST = 8192, 3


def config(head: str, **parallel: Any) -> RunConfig:
    engine = {"platform": "cuda", "head": head, "micro_batch_tokens": TOKENS, "parallel": {"pp": 4, **parallel}}
    return RunConfig.model_validate({"model": {"path": "Llama-3.3-70B-Instruct", "dtype": "bfloat16"}, "engine": engine})


def memory(head: str, stage: int = LAST, **parallel: Any) -> RankMemory:
    spec = resolve_spec("Llama-3.3-70B-Instruct")[0]
    return TrainingRanks(spec, config(head, **parallel)).memory(stage, longest=TOKENS, step_tokens=100 * TOKENS)


def test_the_planned_chunk_is_the_one_that_the_head_takes() -> None:
    from tepo_megatron.core.scores import fused_linear

    assert {"cuda": fused_linear._CHUNK_BYTES_ACCELERATOR, **fused_linear._CHUNK_BYTES} == FUSED_HEAD_CHUNK


def test_the_last_stage_keeps_a_chunk_instead_of_the_logits() -> None:
    """8 192 tokens of 128 256 bfloat16 logits are 1.96 GiB; all other stages are as they were."""
    logits = 2 * TOKENS * 128256
    plain, fused = memory("logits"), memory("fused")
    assert plain.logits - fused.logits == pytest.approx(logits - 256 * 2**20, rel=0.01)
    assert {name: value for name, value in fused.terms.items() if name not in ("logits", "transient")} == {
        name: value for name, value in plain.terms.items() if name not in ("logits", "transient")
    }
    assert 1.5 * GIB < plain.total - fused.total < logits
    for stage in range(LAST):
        assert memory("fused", stage) == memory("logits", stage)


def test_a_shard_whose_logits_are_no_more_than_a_chunk_gains_nothing() -> None:
    assert memory("fused", tp=8, sequence_parallel=True).logits == pytest.approx(
        memory("logits", tp=8, sequence_parallel=True).logits, rel=0.02
    )


def test_its_product_is_computed_once_more() -> None:
    recipe = Path(__file__).parents[3] / "examples/llama3.3-70b/run.yaml"
    plain, fused = (make_plan(load_run(recipe, [f"engine.head={head}"])).time for head in ("logits", "fused"))
    assert fused.flops_train - plain.flops_train == pytest.approx(2 * 128256 * 8192 * plain.tokens)
    assert fused.train > plain.train
    assert fused.flops_score == plain.flops_score


def test_a_token_of_a_chunk_has_fp32_logits_and_a_gradient_in_bfloat16() -> None:
    spec = resolve_spec("Llama-3.3-70B-Instruct")[0]
    engine = {"platform": "cuda", "head": "fused", "parallel": {"pp": 4}, "recompute": "full"}
    model = {"path": "Llama-3.3-70B-Instruct", "dtype": "bfloat16"}
    few, fewer = (
        TrainingRanks(
            spec, RunConfig.model_validate({"model": model, "engine": {**engine, "micro_batch_tokens": tokens}})
        ).memory(LAST, longest=tokens, step_tokens=100 * tokens)
        for tokens in (100, 50)
    )
    assert few.logits - fewer.logits == 50 * 6 * 128256
