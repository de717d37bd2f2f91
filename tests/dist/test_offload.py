"""The trainer leaves the device between its steps and comes back: nothing is left there meanwhile, and training is bit for
bit the same as if it had stayed.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tepo_megatron.config import RunConfig
from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tests.support.launch import end_model_parallel, run_dist

STEPS = 2
Outcome = dict[str, str]


def rollouts(step: int) -> list[Rollout]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(3, 60, (4, 6), generator=generator).tolist()
    return [
        Rollout(f"p{at // 2}", at // 2, (1, 5), tuple(ids), (-2.0,) * 6, "stop", WeightsVersion(step), reward=float(at % 2))
        for at, ids in enumerate(tokens)
    ]


def train(config: RunConfig, model_dir: Path, *, moves: bool) -> Outcome:
    """Updates on a fresh engine; with ``moves`` its memory is offloaded and onloaded as in the loop."""

    from tepo_megatron.trainer.megatron.engine import Engine
    from tepo_megatron.trainer.megatron.offload import _identity, _state
    from tepo_megatron.trainer.megatron.optimizer_states import collect

    engine = Engine(config, model_dir, shares_gpus=moves)

    def check(*, weights: bool, rest: bool) -> None:
        """What has memory. Masters that are parameters go with them."""
        params = {_identity(param) for param in engine.policy.params.values()}
        assert {bool(param.untyped_storage().nbytes()) for param in engine.policy.params.values()} == {weights}
        assert {bool(buffer.grad_data.untyped_storage().nbytes()) for buffer in engine.policy.ddp[0].buffers} == {rest}
        if engine.reference is not None:
            assert {bool(param.untyped_storage().nbytes()) for param in engine.reference[0].parameters()} == {rest}
        state = [tensor for tensor in _state(engine.policy.optimizer) if _identity(tensor) not in params]
        assert {bool(tensor.untyped_storage().nbytes()) for tensor in state} <= {rest}

    def move(to: Callable[[], None], *, weights: bool, rest: bool) -> None:
        to()
        if moves:
            check(weights=weights, rest=rest)

    digests = []
    for step in range(STEPS):
        move(engine.offload, weights=False, rest=False)
        move(engine.onload_weights_only, weights=True, rest=False)
        digest = engine.weights.version(step).digest
        move(engine.offload, weights=False, rest=False)
        move(engine.onload, weights=True, rest=True)
        assert engine.weights.version(step).digest == digest
        batch = engine.score(engine.batch_from_root(rollouts(step) if engine.ranks.rank == 0 else None))
        engine.update(batch)
        digests.append(engine.weights.version(step).digest)
    assert len(set(digests)) == STEPS
    if moves:
        assert engine.offloader is not None
        assert engine.offloader.most_offloaded > 0
    state = {f"{name} {kind}": name_of(value) for name, kind, value in collect(engine.policy.optimizer, engine.policy.params)}
    weights = {name: name_of(param.detach()) for name, param in engine.policy.params.items()}
    end_model_parallel()
    return {**state, **weights}


def name_of(tensor: torch.Tensor) -> str:
    """All its bits."""
    return hashlib.blake2b(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def both_ways(rank: int, world: int, cases: list[dict[str, Any]]) -> list[tuple[Outcome, Outcome]]:
    warnings.filterwarnings("ignore")
    model_dir = resolve_model_path("builtin:tiny")
    os.environ["WORLD_SIZE"] = str(world)
    made = []
    for case in cases:
        config = RunConfig.model_validate(case)
        made.append((train(config, model_dir, moves=False), train(config, model_dir, moves=True)))
    return made


def case(dtype: str, dp: int, *, distributed: bool, **optimizer: Any) -> dict[str, Any]:
    return {
        "model": {"dtype": dtype},
        "engine": {"platform": "cpu", "parallel": {"dp": dp}},
        "optimizer": {"lr": 1e-2, "distributed": distributed, **optimizer},
        "rollout": {"server": {"placement": "colocated"}},
    }


def test_training_with_and_without_leaving_is_the_same_bit_for_bit() -> None:
    cases = [case(dtype, 2, distributed=distributed) for dtype in ("float32", "bfloat16") for distributed in (False, True)]
    cases.append(case("bfloat16", 2, distributed=True, offload_fraction=0.5))
    cases[0]["objective"] = {"kl": {"against": "reference"}}
    for rank in run_dist(2, both_ways, cases):
        for given, (stayed, moved) in zip(cases, rank, strict=True):
            assert moved == stayed, given
