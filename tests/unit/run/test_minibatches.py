"""Mini-batches and seeds, which depend on the run's seed and the step alone; the figures of sources."""

from __future__ import annotations

import torch

from tepo_megatron.core.problem import Problem
from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.run.step.minibatches import derive_seed, minibatches, source_figures
from tepo_megatron.trainer.packing import pack


def rollouts(count: int) -> list[Rollout]:
    version = WeightsVersion(0)
    return [Rollout(f"p{at // 2}", at // 2, (3,), (4, 5 + at), (-1.0, -1.0), "stop", version) for at in range(count)]


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


def rollout(problem: str, group: int, reward: float | None) -> Rollout:
    return Rollout(problem, group, (3,), (4,), (-0.5,), "stop", WeightsVersion(0, "ab"), reward=reward)


def test_shares_are_of_groups_and_rewards_of_responses() -> None:
    problems = {
        name: Problem(name, "q", "a", source=source)
        for name, source in (("a/1", "a"), ("a/2", "a"), ("b/1", "b"), ("c/1", "c"))
    }
    rollouts = [
        rollout("a/1", 0, 1.0),
        rollout("a/1", 0, 0.0),
        rollout("b/1", 1, 1.0),
        rollout("a/2", 2, 0.5),
        rollout("x", 3, 1.0),
    ]
    assert source_figures(rollouts, problems) == {
        "source/a/share": 0.5,
        "source/a/reward": 0.5,
        "source/b/share": 0.25,
        "source/b/reward": 1.0,
        "source/c/share": 0.0,
    }


def test_one_source_without_a_name_says_nothing() -> None:
    assert source_figures([rollout("a", 0, 1.0)], {"a": Problem("a", "q", "a")}) == {}
