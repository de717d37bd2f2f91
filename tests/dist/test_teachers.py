"""Teachers on the trainer's ranks, of another architecture, depth and width, against transformers in float64."""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tepo_megatron.core.rollout import TOP_TOKEN, Rollout
from tepo_megatron.core.types import Batch, Divergence, TeacherTopK
from tepo_megatron.sampler.rollout_file import Record, write_rollouts
from tepo_megatron.trainer.packing import pack
from tests.support.dense_scores import dense_divergence, dense_logprob_and_entropy
from tests.support.engines import Split, Worlds, assert_first_moments, figures, make_engine, save_checkpoint, short_rollouts
from tests.support.float64 import load, packed_logits, token_scores
from tests.support.random_models import random_family

TEMPERATURE, COEFFICIENT, BETA = 1.3, 0.7, 0.3
DIVERGENCES: dict[str, dict[str, Any]] = {
    "sampled": {"of": "sampled"},
    "reverse_kl": {"of": "all", "divergence": "reverse_kl"},
    "forward_kl": {"of": "all", "divergence": "forward_kl"},
    "jsd": {"of": "all", "divergence": "jsd", "beta": BETA},
    "top_k": {"of": "top_k", "k": 5, "divergence": "jsd", "beta": BETA},
}


@dataclass(frozen=True, kw_only=True)
class Case(Split):
    kind: Any = "jsd"
    teachers: int = 1
    head: str = "fused"
    tokens: int = 64

    @property
    def name(self) -> str:
        return super().name or self.kind

    @property
    def temperature(self) -> float:
        return 1.0 if self.kind == "top_k" else TEMPERATURE


SINGLE = [
    *(Case(kind=kind) for kind in DIVERGENCES),
    Case(kind="jsd", teachers=2),
    Case(kind="reverse_kl", teachers=2, head="logits", tokens=128),
]
OTHERS = [
    Case(kind="sampled", tp=2, sp=True),
    Case(kind="jsd", tp=2, sp=True, teachers=2),
    Case(kind="reverse_kl", tp=2, sp=True, head="logits", teachers=2),
    Case(kind="forward_kl", tp=2),
    Case(kind="sampled", pp=2),
    Case(kind="jsd", pp=2, vpp=2, teachers=2),
    Case(kind="sampled", cp=2),
    Case(kind="jsd", cp=2, teachers=2),
    Case(kind="reverse_kl", dp=2, head="logits"),
    Case(kind="jsd", tp=2, sp=True, pp=2, teachers=2),
    Case(kind="reverse_kl", tp=2, sp=True, cp=2),
    Case(kind="top_k", tp=2, sp=True),
    Case(kind="top_k", tp=2, cp=2, head="logits"),
    Case(kind="top_k", pp=2, dp=2),
]


def rollouts() -> list[Rollout]:
    """With equal rewards in a group, so that only the teacher teaches."""
    return short_rollouts(prompt=2)


def judge(folder: Path) -> list[Rollout]:
    """With the top 5 of a served teacher."""
    batch, judged = pack(rollouts()), []
    with torch.no_grad():
        logq_TV, _ = _logits(folder / "big", batch, 1.0)
    for rollout, end in zip(rollouts(), batch.cu_seqlens[1:].tolist(), strict=True):
        index = slice(end - 1 - rollout.response_ids.size, end - 1)
        best = logq_TV[index].topk(5)
        top = np.empty(best.indices.shape, TOP_TOKEN)
        top["id"], top["logprob"] = best.indices.numpy(), best.values.numpy()
        of_labels = logq_TV[index].gather(1, batch.labels_T[index, None])[:, 0]
        judged.append(replace(rollout, teacher_logprobs=of_labels.numpy(), teacher_top=top))
    return judged


def teachers_of(case: Case) -> list[int] | None:
    return None if case.teachers == 1 else [number % 2 for number in range(len(rollouts()))]


def work(case: Case, folder: Path) -> dict[str, Any]:
    names, served = ["big", "small"][: case.teachers], case.kind == "top_k"
    drawn = Record.read(folder / "judged", 0).rollouts if served else rollouts()
    config = {
        "model": {"path": str(folder / "student")},
        "engine": {"parallel": case.parallel, "micro_batch_tokens": case.tokens, "head": case.head},
        "objective": {"preset": "dapo", "distill": {"coefficient": COEFFICIENT, **DIVERGENCES[case.kind]}},
        "teachers": {name: {"path": str(folder / name), "place": "server" if served else "ranks"} for name in names},
        "optimizer": {"lr": 1e-4, "distributed": case.distributed, "clip_grad": 0.0},
        "rollout": {"sampling": {"temperature": case.temperature}},
        "train": {"minibatches": 1, "steps": 2},
    }
    if case.teachers == 2:
        config["data"] = {
            "train": [{"path": "builtin:addition", "name": name, "teacher": name} for name in names],
            "heldout": None,
        }
        config["evaluate"] = {"every": 0}
    engine = make_engine(config, teachers={} if served else {name: folder / name for name in names})
    is_root = engine.ranks.rank == 0
    batch = engine.score(engine.batch_from_root(drawn if is_root else None, teachers_of(case)))
    result = engine.update(batch)
    assert not result.skipped
    save_checkpoint(engine, folder / case.name, step=1, state={})
    report = {"logprobs": batch.teacher_logprobs_T, "figures": figures(result)}
    again = engine.update(engine.score(engine.batch_from_root(drawn if is_root else None, teachers_of(case))))
    return {**report, "again": figures(again)}


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds[Case]:
    folder = tmp_path_factory.mktemp("teachers")
    sizes = {"vocab_size": 61, "max_position_embeddings": 128, "tie_word_embeddings": False, "head_dim": 8}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2}
    for name, family, hidden, layers, seed in (
        ("student", "Llama", 48, 4, 0),
        ("big", "Qwen3", 72, 8, 1),
        ("small", "Llama", 36, 4, 2),
    ):
        settings = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers}
        model = random_family(family, {**sizes, **heads, **settings}, seed=seed, scale=0.15)
        model.save_pretrained(folder / name)
    write_rollouts(folder / "judged", 0, judge(folder))
    return Worlds(folder, [*SINGLE, *OTHERS], work)


def _logits(folder: Path, batch: Batch, temperature: float = TEMPERATURE) -> tuple[Tensor, Any]:
    model = load(folder)
    return (packed_logits(model, batch) / temperature).log_softmax(-1), model


def _of_teacher(batch: Batch, case: Case, values: list[Tensor]) -> Tensor:
    numbers = teachers_of(case)
    if numbers is None:
        return values[0]
    chosen_T = torch.tensor(numbers)[batch.sequence_index_T]
    return torch.where((chosen_T == 0)[:, None], values[0], values[1])


@cache
def oracle(folder: Path, case: Case) -> tuple[Tensor, float, dict[str, Tensor]]:
    """The teachers' log-probs, the loss, and its gradients."""
    batch = pack(rollouts())
    logp_TV, model = _logits(folder / "student", batch, case.temperature)
    with torch.no_grad():
        logq_TV = _of_teacher(batch, case, [_logits(folder / name, batch, case.temperature)[0] for name in ("big", "small")])
    if case.kind == "sampled":
        d_T = (logp_TV - logq_TV).gather(1, batch.labels_T[:, None])[:, 0]
        ratio_T = (logp_TV - logp_TV.detach()).gather(1, batch.labels_T[:, None])[:, 0].exp()
        value_T = ratio_T * ((-d_T).exp() - 1 + d_T)
    elif case.kind == "top_k":
        best = logq_TV.topk(5)
        top = TeacherTopK(best.indices, best.values, Divergence("jsd", BETA))
        scores = dense_logprob_and_entropy(logp_TV, batch.labels_T, teacher=top)
        assert scores.divergence is not None
        value_T = scores.divergence
    else:
        value_T = dense_divergence(logp_TV, logq_TV, Divergence(case.kind, BETA))
    loss = COEFFICIENT * value_T[batch.loss_mask_T].mean()
    loss.backward()
    logprobs_T = logq_TV.gather(1, batch.labels_T[:, None])[:, 0]
    return logprobs_T, loss.item(), {name: param.grad for name, param in model.named_parameters()}


@pytest.mark.parametrize("case", [*SINGLE, *OTHERS], ids=lambda case: f"{case.kind}-{case.teachers}-{case.name}")
def test_teachers_judge_as_transformers_does_in_float64(worlds: Worlds[Case], case: Case) -> None:
    logprobs_T, loss, gradients = oracle(worlds.folder, Case(kind=case.kind, teachers=case.teachers))
    mask_T = pack(rollouts()).loss_mask_T
    reports = worlds.ranks(case)
    for report in reports:
        torch.testing.assert_close(report["logprobs"][mask_T].double(), logprobs_T[mask_T], atol=1e-5, rtol=1e-5)
        assert report["figures"] == reports[0]["figures"]
        assert report["figures"]["loss"] == pytest.approx(loss, rel=1e-5)
        assert 0 < report["again"]["loss"] < report["figures"]["loss"]
    assert_first_moments(worlds.checkpoint(case), gradients)


def test_teachers_differ_and_each_judges_its_own(worlds: Worlds[Case]) -> None:
    one, two = (worlds.report(Case(kind="jsd", teachers=count))["logprobs"] for count in (1, 2))
    batch = pack(rollouts())
    second_T = (batch.sequence_index_T % 2 == 1) & batch.loss_mask_T
    first_T = batch.loss_mask_T & ~second_T
    assert torch.equal(one[first_T], two[first_T])
    assert (one - two)[second_T].abs().max() > 0.1
    expected, _ = token_scores(worlds.folder / "small", batch, temperature=TEMPERATURE)
    torch.testing.assert_close(two[second_T].double(), expected[second_T], atol=1e-5, rtol=1e-5)
