"""A server whose log-probs depend on what else it computes, as a GPU's: no canary stops a good run, and a stale cache does."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tepo_megatron.run import rank0 as rank0_module
from tepo_megatron.run.consistency_checks import Canary
from tepo_megatron.sampler.protocol import CacheReading
from tepo_megatron.tools.faults.in_worker import _round_by_batch

OVERLAPPED = {
    "train": {"steps": 6, "schedule": "overlap", "max_staleness": 1},
    "rollout.uncorrected": True,
    "rollout.canary.every": 1,
    "model.dtype": "bfloat16",
}


def as_on_a_gpu(sampler: Any, *, is_emptied: bool) -> Any:
    """Logits move by a bfloat16 unit in the last place, by row and size of the batch, which changes with each call. A prefix
    cache is emptied by an update, or not.
    """
    right, update = sampler._logits, sampler.update_weights_from_tensors
    cache: dict[Sequence[int], list[float]] = {}
    model, calls = SimpleNamespace(compute_logits=lambda logits: logits), [0]
    _round_by_batch(model)

    def logits(ids: Sequence[int]) -> torch.Tensor:
        calls[0] += 1
        alone_TV = right(ids)
        others = alone_TV.new_zeros(calls[0] % 61, alone_TV.shape[1])
        return model.compute_logits(torch.cat([others, alone_TV]))[len(others) :]

    def read_through_cache(prompt: Sequence[int], n: int) -> dict[str, CacheReading]:
        tokens = len(prompt) - 1 if prompt in cache else 0
        logprobs, fresh = (logits(prompt)[-1].log_softmax(-1)[:n].tolist() for _ in range(2))
        return {"reference": CacheReading(cache.setdefault(prompt, logprobs), fresh, tokens)}

    def update_weights_from_tensors(*args: Any) -> None:
        update(*args)
        if is_emptied:
            cache.clear()

    sampler._logits, sampler.read_through_cache = logits, read_through_cache
    sampler._last_logits = lambda ids: logits(ids)[-1]  # which is not remembered
    sampler.update_weights_from_tensors = update_weights_from_tensors
    return sampler


def compare_log_probs(step: int, readings: Mapping[str, CacheReading]) -> float:
    """``Canary.check_cache`` before its remedy, in bfloat16."""
    pairs = (zip(reading.logprobs, reading.logprobs_without, strict=True) for reading in readings.values())
    gap = max(abs(through - without) for pair in pairs for through, without in pair)
    if gap > 0.02 * 0.5:
        raise RuntimeError(f"weights {step}: {gap:g} apart. The cache was not emptied with the update")
    return gap


@pytest.mark.gpu_conditions
@pytest.mark.parametrize(
    ("case", "message"),
    [("good", ""), ("stale cache", "weights 1: reference took 29 tokens"), ("reverted", r"weights \d: .* apart\. The cache")],
)
def test_noise_of_a_batchs_shape_stops_no_overlapped_run_and_a_stale_cache_does(
    case: str, message: str, reference_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, is_emptied = vars(rank0_module)["make_sampler"], case != "stale cache"
    monkeypatch.setattr(
        rank0_module, "make_sampler", lambda *args, **options: as_on_a_gpu(make(*args, **options), is_emptied=is_emptied)
    )
    if case == "reverted":
        monkeypatch.setattr(Canary, "check_cache", staticmethod(compare_log_probs))
    run = reference_run(OVERLAPPED)
    if message:
        with pytest.raises(RuntimeError, match=message):
            run.run()
        return
    rows = run.run().rows
    assert len(rows) == 7
    assert all(0.01 < row["canary/max_logprob_gap"] < 0.5 for row in rows)
    assert max(row["canary/cache_gap"] for row in rows) > 0.01
