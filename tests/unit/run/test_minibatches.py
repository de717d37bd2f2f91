"""Mini-batches and seeds, which depend on the run's seed and the step alone."""

from __future__ import annotations

import torch

from tepo_megatron.run.step.minibatches import derive_seed, minibatches
from tepo_megatron.trainer.packing import pack
from tests.support.recorded_loop import rollouts


def test_minibatches_divide_the_batch_and_depend_on_seed_and_step_alone() -> None:
    batch = pack(rollouts(7))

    def order(seed: int, step: int) -> list[list[int]]:
        return [part.tokens_T[2::3].tolist() for part in minibatches(batch, 3, seed=seed, step=step)]

    assert sorted(token for part in order(0, 0) for token in part) == sorted(batch.tokens_T[2::3].tolist())
    assert [len(part) for part in order(0, 0)] == [3, 2, 2]
    assert order(0, 0) == order(0, 0)
    assert len({str(order(seed, step)) for seed in range(3) for step in range(3)}) > 1


def test_seeds_differ_between_uses_steps_and_runs() -> None:
    seeds = {derive_seed(seed, step, use) for seed in range(3) for step in range(50) for use in ("rollout", "evaluate")}
    assert len(seeds) == 300
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_torch_generator_state_is_left_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    list(minibatches(pack(rollouts(4)), 2, seed=0, step=0))
    assert torch.equal(torch.get_rng_state(), before)
