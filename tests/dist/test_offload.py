"""The trainer leaves the device between its steps and comes back: nothing is left there meanwhile, and training is bit for
bit the same as if it had stayed.
"""

from collections.abc import Callable
from typing import Any

import torch

from tests.support.engines import bits_of, make_engine, states_of
from tests.support.launch import run_dist
from tests.support.random_models import draw_rollouts

STEPS = 2
Outcome = dict[str, str]


def train(config: dict[str, Any], *, moves: bool) -> Outcome:
    """Updates on a fresh engine; with ``moves`` its memory is offloaded and onloaded as in the loop."""
    from tepo_megatron.trainer.megatron.policy.optimizer_states import OptimizerStates, adam_tensors

    engine = make_engine(config, shares_gpus=moves)

    def check(*, weights: bool, rest: bool) -> None:
        """What has memory. Masters that are parameters go with them."""
        params = {storage(param) for param in engine.policy.params.values()}
        assert {bool(param.untyped_storage().nbytes()) for param in engine.policy.params.values()} == {weights}
        assert {bool(buffer.grad_data.untyped_storage().nbytes()) for buffer in engine.policy.ddp[0].buffers} == {rest}
        if engine.reference is not None:
            assert {bool(param.untyped_storage().nbytes()) for param in engine.reference[0].parameters()} == {rest}
        held = [tensor for inner in OptimizerStates(engine.policy.optimizer).inner for tensor in adam_tensors(inner.optimizer)]
        state = [tensor for tensor in held if storage(tensor) not in params]
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
        batch = engine.score(engine.batch_from_root(draw_rollouts([8] * 4, seed=step) if engine.ranks.rank == 0 else None))
        engine.update(batch)
        digests.append(engine.weights.version(step).digest)
    assert len(set(digests)) == STEPS
    if moves:
        assert engine.offloader.most_offloaded > 0
    return {name: bits_of({name: value}) for name, value in {**states_of(engine), **engine.policy.params}.items()}


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def both_ways(rank: int, world: int, cases: list[dict[str, Any]]) -> list[tuple[Outcome, Outcome]]:
    return [(train(case, moves=False), train(case, moves=True)) for case in cases]


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
