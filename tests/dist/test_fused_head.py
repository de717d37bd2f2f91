"""``engine.head = fused``: the same scores, losses, gradient norms and weights as with logits on one rank, and no logits."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tepo_megatron.config import RunConfig
from tests.support.launch import end_model_parallel, run_dist
from tests.support.small_llama import VOCABULARY, draw_rollouts, write_llama

HIDDEN, UPDATES = 32, 2
LENGTHS = [5, 17, 6, 29, 8, 5, 27, 6]
OBJECTIVE = {
    "kl_mask": {"falling": "first_order"},  # takes the entropy's slope
    "entropy": {"kind": "fixed", "coefficient": 0.1},  # has a gradient in the entropies
    "kl": {"against": "reference"},  # scores a frozen model
}


@dataclass(frozen=True)
class Case:
    head: str = "fused"
    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    vpp: int = 1
    sp: bool = False
    tied: bool = False
    distributed: bool = False
    micro_batch_tokens: int = 40
    dtype: str = "float32"

    @property
    def name(self) -> str:
        flags = [name for name, on in (("sp", self.sp), ("tied", self.tied), ("distopt", self.distributed)) if on]
        split = f"tp{self.tp}pp{self.pp}dp{self.dp}cp{self.cp}vpp{self.vpp}"
        return "-".join([split, *flags, self.dtype])


LOGITS = {tied: Case("logits", tied=tied, micro_batch_tokens=4096) for tied in (False, True)}
ONE = [Case(), Case(tied=True), Case(dtype="bfloat16")]
TWO = [
    Case(tp=2),
    Case(tp=2, sp=True, tied=True),
    Case(tp=2, sp=True),
    Case(pp=2),
    Case(pp=2, tied=True),
    Case(dp=2, distributed=True),
    Case(cp=2),
    Case(pp=2, vpp=2, tied=True),
]


def train(case: Case, model: Path) -> dict[str, Any]:
    """Scores, and updates on them, by a fresh engine: what rank 0 sees, and the widths of what this rank's model gives."""

    from tepo_megatron.trainer.megatron.engine import Engine

    parallel = {"tp": case.tp, "pp": case.pp, "dp": case.dp, "cp": case.cp, "vpp": case.vpp, "sequence_parallel": case.sp}
    config = RunConfig.model_validate(
        {
            "model": {"path": str(model), "dtype": case.dtype},
            "engine": {
                "platform": "cpu",
                "head": case.head,
                "parallel": parallel,
                "micro_batch_tokens": case.micro_batch_tokens,
            },
            "optimizer": {"lr": 1e-4, "warmup_steps": 0, "distributed": case.distributed},
            "objective": OBJECTIVE,
            "rollout": {"sampling": {"temperature": 0.7}},
        }
    )
    engine = Engine(config, model)
    widths: set[int] = set()
    in_place: set[bool] = set()

    def watch(_module: object, _inputs: object, output: torch.Tensor) -> None:
        widths.add(output.shape[-1])
        if output.requires_grad:
            place = output.data_ptr()
            output.register_hook(lambda gradient: in_place.add(gradient.data_ptr() == place))

    for chunk in engine.policy.chunks:
        chunk.register_forward_hook(watch)
    batch = engine.score(engine.batch_from_root(draw_rollouts(LENGTHS) if engine.ranks.rank == 0 else None))
    results = [engine.update(batch) for _ in range(UPDATES)]
    found = {
        "names": list(engine.policy.params),
        "widths": widths,
        "in_place": in_place,
        "scores": [batch.old_logprobs_T, batch.old_entropy_T, batch.reference_logprobs_T],
        "updates": [{"loss": each.loss, "grad_norm": each.grad_norm, **each.extrema} for each in results],
        "sums": [dict(each.sums) for each in results],
        "weights": {name: tensor.clone() for name, tensor in engine.weights.stream() if tensor is not None},
    }
    end_model_parallel()
    return found


def train_all(rank: int, world: int, cases: list[Case], folder: Path) -> list[dict[str, Any]]:
    warnings.filterwarnings("ignore")
    os.environ["WORLD_SIZE"] = str(world)
    return [train(case, folder / f"tied-{case.tied}") for case in cases]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fused-head")
    for tied in (False, True):
        (folder / f"tied-{tied}").mkdir()
        write_llama(folder / f"tied-{tied}", spike=1.0, num_hidden_layers=4, hidden_size=HIDDEN, tie_word_embeddings=tied)
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[Case, list[dict[str, Any]]]:
    """What every rank saw of each case."""
    made: dict[Case, list[dict[str, Any]]] = {}
    for world, cases in ((1, [*LOGITS.values(), Case("logits", dtype="bfloat16"), *ONE]), (2, TWO)):
        ranks = run_dist(world, train_all, cases, folder)
        made |= {case: [rank[number] for rank in ranks] for number, case in enumerate(cases)}
    return made


@pytest.mark.parametrize("case", [case for case in [*ONE, *TWO] if case.dtype == "float32"], ids=lambda case: case.name)
def test_it_trains_as_logits_on_one_rank_do(found: dict[Case, list[dict[str, Any]]], case: Case) -> None:
    own, plain = found[case][0], found[LOGITS[case.tied]][0]
    for ours, expected in zip(own["scores"], plain["scores"], strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    assert plain["sums"][0]["mask/fraction"][0] > 0, "the slope chose no token"
    for number, expected_values in enumerate(plain["updates"]):
        assert own["updates"][number] == pytest.approx(expected_values, rel=1e-5, abs=2e-6)
        for name, (total, count) in plain["sums"][number].items():
            assert own["sums"][number][name] == pytest.approx((total, count), rel=1e-5, abs=1e-4), name
    for name, tensor in plain["weights"].items():
        error = (own["weights"][name] - tensor).norm() / tensor.norm()
        assert error <= 1e-5, f"{name}: off by {error:.2e} of its norm"


@pytest.mark.parametrize("case", [*ONE, *TWO], ids=lambda case: case.name)
def test_the_last_stage_gives_hidden_states_and_parameters_keep_their_names(
    found: dict[Case, list[dict[str, Any]]], case: Case
) -> None:
    for rank in found[case]:
        assert rank["widths"] == {HIDDEN}
    chunk = f"model{case.vpp - 1}." if case.vpp > 1 else ""
    assert (f"{chunk}output_layer.weight" in found[case][-1]["names"]) == (not case.tied or case.pp > 1)
    assert found[LOGITS[case.tied]][0]["widths"] == {VOCABULARY}


def test_the_gradient_of_logits_takes_their_place(found: dict[Case, list[dict[str, Any]]]) -> None:
    """So that they are held once, in the backward pass too."""
    for case in LOGITS.values():
        assert found[case][0]["in_place"] == {True}


def test_in_bfloat16_it_differs_from_logits_by_rounding(found: dict[Case, list[dict[str, Any]]]) -> None:
    own, plain = (found[Case(head, dtype="bfloat16", micro_batch_tokens=40)][0] for head in ("fused", "logits"))
    for ours, expected in zip(own["scores"], plain["scores"], strict=True):
        torch.testing.assert_close(ours, expected, atol=0.05, rtol=0)
    assert own["updates"][0]["grad_norm"] == pytest.approx(plain["updates"][0]["grad_norm"], rel=0.01)
