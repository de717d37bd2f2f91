"""Optimizer states on the host or in fewer bits: the same updates as without, and checkpoints that go from one to the other."""

from __future__ import annotations

import contextlib
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tepo_megatron.config import RunConfig
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tests.support.fused_adam import instead_of_transformer_engine
from tests.support.launch import end_model_parallel, run_dist
from tests.support.small_llama import tiny_rollouts

UPDATES, LR = 2, 1e-3
Outcome = dict[str, Any]
"""By parameter and kind, what this rank holds: ``first`` after the first update, or just after a checkpoint of it was read;
``states`` after the second. ``weights``: those of the model."""

SPLITS = {1: {}, 2: {"dp": 2}, 4: {"tp": 2, "dp": 2, "sequence_parallel": True}}
WHOLE: dict[str, Any] = {"offload_fraction": 1.0}
HALF: dict[str, Any] = {"offload_fraction": 0.5}
REMAINDERS: dict[str, Any] = {"store_param_remainders": True}
REDUCED: dict[str, Any] = {"exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16", "store_param_remainders": True}
SCALED: dict[str, Any] = {"exp_avg_dtype": "float16", "exp_avg_sq_dtype": "float16"}


def update(engine: Any, step: int) -> None:
    batch = engine.batch_from_root(tiny_rollouts(step) if engine.ranks.rank == 0 else None)
    assert not engine.update(engine.score(batch)).skipped


def train(case: dict[str, Any], folder: Path) -> Outcome:
    """Two updates of a fresh engine, with a checkpoint between them; or the second, from such a checkpoint."""

    from tepo_megatron.trainer.megatron.engine import Engine
    from tepo_megatron.trainer.megatron.optimizer_states import OptimizerStates

    config = RunConfig.model_validate(case["config"])
    with instead_of_transformer_engine() if config.optimizer.precision_aware else contextlib.nullcontext():
        engine = Engine(config, resolve_model_path("builtin:tiny"))

        def states() -> dict[str, Tensor]:
            held = OptimizerStates(engine.policy.optimizer).collect(engine.policy.trained)
            return {f"{name} {kind}": value.clone() for name, kind, value in held}

        if case["resume"]:
            assert engine.checkpoints.load(folder / case["resume"] / "step_000001")["step"] == 1
        else:
            update(engine, 0)
            engine.checkpoints.save(folder / case["name"], step=1, state={})
        first = states()
        update(engine, 1)
        weights = {name: param.detach().clone() for name, param in engine.policy.params.items()}
        found = {"first": first, "states": states(), "weights": weights}
        end_model_parallel()
    return found


def all_of(rank: int, world: int, cases: list[dict[str, Any]], folder: Path) -> list[Outcome]:
    warnings.filterwarnings("ignore")
    os.environ["WORLD_SIZE"] = str(world)
    return [train(case, folder) for case in cases]


def case(name: str, world: int, resume: str | None = None, **optimizer: Any) -> dict[str, Any]:
    config = {
        "model": {"dtype": "bfloat16"},
        "engine": {"parallel": SPLITS[world]},
        "optimizer": {"lr": LR, "weight_decay": 0.1, "distributed": True, **optimizer},
        "rollout": {"replay": "recorded"},
        "train": {"steps": UPDATES, "minibatches": 1},
    }
    return {"name": f"{name}-{world}", "config": config, "resume": resume}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Within a part of the largest value of each tensor."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name] - value).abs().max() <= tolerance * value.abs().max(), name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lean")


@pytest.mark.parametrize("world", [2, 1, 4])
def test_states_on_the_host_are_those_of_adam_on_the_device(world: int, folder: Path) -> None:
    """Both compute AdamW in fp32, in another order: an update from the same states gives the same masters and moments to 2e-6
    of each tensor's largest. A checkpoint of either is read by the other bit for bit, also in another world.
    """
    cases = [
        case("plain", world),
        case("half", world, **HALF),
        case("half-from-half", world, "half-2", **HALF),
        case("plain-from-half", world, "half-2"),
        *([case("whole", world, **WHOLE), case("half-from-plain", world, "plain-2", **HALF)] if world == 2 else []),
    ]
    for rank in run_dist(world, all_of, cases, folder):
        plain, half, half_from_half, plain_from_half, *of_two = rank
        assert_close(half["first"], plain["first"], 2e-6)
        assert_equal(half_from_half["first"], plain_from_half["first"])
        assert_close(half_from_half["states"], plain_from_half["states"], 2e-6)
        for whole, half_from_plain in zip(of_two[::2], of_two[1::2], strict=True):
            assert_close(whole["first"], plain["first"], 2e-6)
            assert_equal(half_from_half["first"], half["first"])
            assert_equal(half_from_half["weights"], half["weights"])
            assert_equal(half_from_plain["first"], plain["first"])
            assert_close(half_from_plain["states"], plain["states"], 2e-6)


def test_states_in_fewer_bits_round_and_nothing_else(folder: Path) -> None:
    """With a stand-in for Transformer Engine's Adam. 16 bits beside each bfloat16 weight are the same fp32 master, bit for bit;
    moments in 16 bits change an update by no more than they round.
    """
    cases = [
        case("plain", 2),
        case("remainders", 2, **REMAINDERS),
        case("reduced", 2, **REDUCED),
        case("scaled", 2, **SCALED),
        case("remainders-from-plain", 2, "plain-2", **REMAINDERS),
        case("plain-from-remainders", 2, "remainders-2"),
        case("reduced-from-reduced", 2, "reduced-2", **REDUCED),
        case("scaled-from-scaled", 2, "scaled-2", **SCALED),
        case("plain-from-reduced", 2, "reduced-2"),
    ]
    for rank in run_dist(2, all_of, cases, folder):
        plain, remainders, reduced, scaled, from_plain, from_remainders, from_reduced, from_scaled, plain_from_reduced = rank
        for same in (remainders, from_plain, from_remainders):
            assert_close(same["states"], plain["states"], 1e-7)
            assert_equal(same["weights"], plain["weights"])
        assert_equal(from_reduced["first"], reduced["first"])
        assert_equal(from_reduced["states"], reduced["states"])
        assert_close(from_scaled["first"], scaled["first"], 3e-7)  # a scale of its own, for the same 16 bits
        for rounded, bits in ((reduced, 8), (scaled, 11)):
            for name, value in plain["first"].items():
                part = 0.0 if name.endswith("master") else 2.0**-bits  # the update was made before anything was rounded
                assert (rounded["first"][name] - value).abs().max() <= part * value.abs().max(), name
        assert_equal(from_reduced["weights"], plain_from_reduced["weights"])
