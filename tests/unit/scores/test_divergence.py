"""Divergences from a teacher: the dense fp64 oracle, what holds of every divergence, and what is refused."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tepo_megatron.core.scores import fused_linear, fused_linear_logprob_and_entropy, logprob_and_entropy
from tepo_megatron.core.scores.shard import Scoring, combine
from tepo_megatron.core.scores.torch_sweep import IN_TORCH
from tepo_megatron.core.types import Checks, Divergence, TeacherHead, TeacherLogits
from tepo_megatron.errors import NotFiniteError
from tepo_megatron.tools.bench.step_rank import peak_bytes
from tests.support.dense_scores import (
    BACKENDS,
    DIVERGENCES,
    cases,
    compare,
    compare_fused,
    dense_divergence,
    dense_logprob_and_entropy,
    impossible_column,
    least_probabilities,
    loss,
    teacher_head,
    teacher_of,
)
from tests.support.host_waits import HostWaits

BY_KIND = pytest.mark.parametrize("divergence", DIVERGENCES, ids=lambda divergence: divergence.kind)
BY_BACKEND = pytest.mark.parametrize("backend", BACKENDS)


@BY_KIND
@BY_BACKEND
@given(case=cases(), inplace=st.booleans(), spread=st.sampled_from([0.0, 0.3, 5.0]))
def test_matches_the_dense_oracle(divergence: Divergence, backend: str, case: Any, inplace: bool, spread: float) -> None:
    logits, labels, options, weights = case
    logits, tolerance = (logits, 1e-9) if backend == "torch" else (logits.float(), 2e-5)
    options = options | {"teacher": teacher_of(logits, labels, divergence, spread=spread)}
    compare(logits, labels, options, weights, inplace=inplace, backend=backend, tolerance=tolerance)


@BY_BACKEND
@pytest.mark.parametrize("impossible", ["student", "teacher"])
def test_a_mixture_does_not_underflow(backend: str, impossible: str) -> None:
    compare(*least_probabilities(impossible), inplace=False, backend=backend, tolerance=2e-5)


@BY_BACKEND
@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl"])
@pytest.mark.parametrize("temperature", [0.01, 0.05])  # the weight is 0 in fp64, or only in fp32
def test_a_column_without_weight_adds_nothing(backend: str, kind: str, temperature: float) -> None:
    logits, labels, options, weights = impossible_column(kind, temperature)
    compare(logits, labels, options, weights, inplace=False, backend=backend, tolerance=2e-5)
    held = options["teacher"]
    planned: dict[str, Any] = {"tokens": 1, "width": 1500, "tp_group": None, "vocab_size": None, "mask_T": None}
    planned |= {"temperature": temperature, "entropy_slope": False, "divergence": held.divergence}
    scoring = Scoring.plan(labels % 1500, **planned)
    shards_pRK = torch.empty(2, 1, scoring.statistics)
    for shard, teacher, stats_RK in zip(logits.split(1500, 1), held.logits_TVp.split(1500, 1), shards_pRK, strict=True):
        IN_TORCH.statistics(shard, scoring, stats_RK, teacher)
    divergence = combine(shards_pRK, scoring)[1].divergence_R
    assert divergence is not None
    torch.testing.assert_close(
        divergence.double(),
        dense_divergence(logits / temperature, held.logits_TVp / temperature, held.divergence),
        rtol=1e-5,
        atol=1e-5,
    )


@BY_KIND
@BY_BACKEND
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_many_columns(divergence: Divergence, backend: str, dtype: torch.dtype) -> None:
    """Several blocks of the C++ sweep and chunks of the torch sweep; rows apart, masked rows, padding."""
    logits = (3 * torch.randn(2, 40, 5009)).to(dtype)[0, :, 3:]
    logits[2, 7:2900] = -torch.inf
    labels, mask, weights = torch.randint(0, 4900, (40,)), torch.rand(40) < 0.7, torch.randn(2, 40)
    labels[2] = 4000
    options = {"temperature": 0.7, "vocab_size": 4900, "mask_T": mask, "teacher": teacher_of(logits, labels, divergence)}
    rounding = max(torch.finfo(dtype).eps, 1e-5)
    compare(logits, labels, options, weights, inplace=False, backend=backend, tolerance=1e-5, gradient_tolerance=rounding)


@BY_KIND
@BY_BACKEND
@given(case=cases())
def test_fused_with_the_head(divergence: Divergence, backend: str, case: Any) -> None:
    _, labels, options, weights = case
    generator = torch.Generator().manual_seed(len(labels))
    shapes = (len(labels), options["vocab_size"] + 2)
    hidden, head = (torch.randn(n, 5, generator=generator, dtype=torch.float64).requires_grad_() for n in shapes)
    teacher = teacher_head(hidden.detach(), head.detach(), divergence)
    close: dict[str, Any] = {"tolerance": 1e-9, "gradient_tolerances": (1e-9, 1e-9), "teacher": teacher}
    compare_fused(hidden, head, labels, options | {"entropy_slope": True}, weights, **close, backend=backend)


@BY_KIND
@BY_BACKEND
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fused_in_chunks(monkeypatch: pytest.MonkeyPatch, divergence: Divergence, backend: str, dtype: torch.dtype) -> None:
    monkeypatch.setattr(fused_linear, "_CHUNK_BYTES", {"cpu": 1})  # 16 rows, the fewest
    labels, mask = torch.randint(0, 201, (60,)), torch.rand(60) < 0.8
    hidden, head = (torch.randn(n, 6).to(dtype).requires_grad_() for n in (60, 210))
    options: dict[str, Any] = {"temperature": 0.8, "vocab_size": 201, "mask_T": mask, "entropy_slope": True}
    close = (1e-4, 1e-5) if dtype == torch.float32 else (2.0**-6, 0.1)  # A bf16 gradient of 20 has steps of 1/8.
    teacher = teacher_head(hidden.detach(), head.detach(), divergence)
    compare_fused(
        *(hidden, head, labels, options, torch.randn(2, 60)),
        **{"tolerance": 2e-5, "gradient_tolerances": close, "backend": backend, "teacher": teacher},
    )


def test_the_oracle_is_the_definition() -> None:
    """Against torch's divergence of distributions, and difference quotients. TRL's formula is in test_peers_distillation.py."""
    student, teacher = torch.randn(2, 5, 7, dtype=torch.float64)
    p, q = (torch.distributions.Categorical(logits=logits) for logits in (student, teacher))
    forward, reverse = Divergence("forward_kl"), Divergence("reverse_kl")
    torch.testing.assert_close(dense_divergence(student, teacher, forward), torch.distributions.kl_divergence(q, p))
    torch.testing.assert_close(dense_divergence(student, teacher, reverse), torch.distributions.kl_divergence(p, q))

    for divergence in (forward, reverse, Divergence("jsd", 0.1), Divergence("jsd")):
        scores = logprob_and_entropy(student, torch.arange(5), teacher=TeacherLogits(teacher, divergence))
        torch.testing.assert_close(scores.divergence, dense_divergence(student, teacher, divergence))

        score = partial(logprob_and_entropy, labels_T=torch.arange(5), teacher=TeacherLogits(teacher, divergence))
        torch.autograd.gradcheck(lambda logits, score=score: score(logits).divergence, student.clone().requires_grad_())


@BY_BACKEND
@given(
    seed=st.integers(0, 999),
    spread=st.sampled_from([0.0, 1e-3, 1.0, 50.0]),
    beta=st.floats(0.01, 0.99),
    shifts=st.tuples(st.sampled_from([0.0, 500.0]), st.sampled_from([0.0, -500.0])),
)
def test_what_holds_of_every_divergence(
    backend: Any, seed: int, spread: float, beta: float, shifts: tuple[float, float]
) -> None:
    """It is not negative, 0 for an equal teacher, unchanged by offsets and by the order of columns; β names a bound of ``jsd``,
    and swaps with the roles.
    """
    generator = torch.Generator().manual_seed(seed)
    student = (torch.randn(6, 40, generator=generator) * 64).round() / 64  # so that 500 more is exact
    teacher = student + (spread * torch.randn(6, 40, generator=generator) * 64).round() / 64
    labels, order = torch.arange(6), torch.randperm(40, generator=generator)

    def of(kind: Any, student: Tensor, teacher: Tensor, beta: float = beta) -> Tensor:
        held = TeacherLogits(teacher, Divergence(kind, beta))
        divergence = logprob_and_entropy(student, labels, teacher=held, backend=backend).divergence
        assert divergence is not None
        return divergence

    for kind in ("forward_kl", "reverse_kl", "jsd"):
        value = of(kind, student, teacher)
        assert (value >= 0).all()
        assert of(kind, student, student).abs().max() < 1e-6
        assert torch.equal(of(kind, student + shifts[0], teacher + shifts[1]), value)
        torch.testing.assert_close(of(kind, student[:, order], teacher[:, order]), value, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(of("forward_kl", student, teacher), of("reverse_kl", teacher, student), rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(of("jsd", teacher, student, 1 - beta), of("jsd", student, teacher), rtol=1e-5, atol=2e-6)
    bound = -beta * torch.tensor(beta).log() - (1 - beta) * torch.tensor(1 - beta).log()
    assert (of("jsd", student, teacher) <= bound + 1e-6).all()


@BY_KIND
@BY_BACKEND
def test_the_other_scores_keep_their_bits_and_each_may_be_used_alone(divergence: Divergence, backend: Any) -> None:
    for dtype in 10 * [torch.bfloat16, torch.float32]:
        logits, labels = (3 * torch.randn(9, 1500)).to(dtype), torch.arange(9)
        teacher = teacher_of(logits, labels, divergence)
        plain, scores = (logprob_and_entropy(logits, labels, teacher=held, backend=backend) for held in (None, teacher))
        assert torch.equal(plain.logprob, scores.logprob)
        assert torch.equal(plain.entropy, scores.entropy)
    assert (plain.divergence, plain.teacher_logprob, plain.agreement) == (None, None, None)
    leaf, dense = logits.clone().requires_grad_(), logits.double().requires_grad_()
    alone = logprob_and_entropy(leaf, labels, teacher=teacher, backend=backend)
    assert alone.divergence is not None
    assert alone.teacher_logprob is not None
    assert not alone.teacher_logprob.requires_grad
    alone.divergence.sum().backward()
    dense_divergence(dense, teacher.logits_TVp, divergence).sum().backward()
    torch.testing.assert_close(leaf.grad, dense.grad, check_dtype=False, rtol=1e-5, atol=1e-6)


@BY_BACKEND
def test_the_lowest_id_of_a_tie_is_the_most_likely(backend: Any) -> None:
    student, teacher = torch.zeros(4, 3000), torch.zeros(4, 3000)
    student[0, [5, 700, 2000]] = teacher[0, [5, 900, 2999]] = 1.0  # the same first one
    student[1, [6, 2000]] = teacher[1, 2000] = 1.0
    student[2, 2000] = teacher[2, 2001] = 1.0
    held = TeacherLogits(teacher, Divergence("jsd"))
    agreement = logprob_and_entropy(student, torch.arange(4), teacher=held, backend=backend).agreement
    assert agreement is not None
    assert agreement.tolist() == [True, False, False, True]


@BY_BACKEND
def test_logits_far_below_the_best_count_in_full(backend: Any) -> None:
    """A probability of 0 in fp32 has a logarithm all the same: −400 here, where the teacher expects half of the time."""
    student = torch.tensor([[0.0, -400.0, -torch.inf]])
    teacher = torch.tensor([[0.0, 0.0, -torch.inf]])
    held = TeacherLogits(teacher, Divergence("forward_kl"))
    divergence = logprob_and_entropy(student, torch.tensor([0]), teacher=held, backend=backend).divergence
    torch.testing.assert_close(divergence, dense_divergence(student, teacher, held.divergence).float())


@BY_BACKEND
@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl"])
def test_an_infinite_divergence_is_refused(backend: Any, kind: Any) -> None:
    """It is named, also without waiting for the device; a masked token, and −inf of the other one, are no error."""
    first, second = torch.randn(2, 5, 3000)
    first[1:3, 2500] = second[2, 2400] = -torch.inf
    mask = torch.tensor([True, False, True, True, True])
    logits, teacher = (first, second) if kind == "forward_kl" else (second, first)
    options: dict[str, Any] = {"mask_T": mask, "teacher": TeacherLogits(teacher, Divergence(kind)), "backend": backend}
    with pytest.raises(NotFiniteError, match=rf"^{kind} of token 2 is infinite: a logit of the .* is −inf") as caught:
        logprob_and_entropy(logits, torch.arange(5), **options)
    checks = Checks()
    with HostWaits() as waits:
        logprob_and_entropy(logits, torch.arange(5), checks=checks, scored=4, **options)
    assert backend == "torch" or not waits.places
    (noted,) = Checks.first_errors([checks])
    assert str(noted) == str(caught.value)
    options["mask_T"] = mask & (torch.arange(5) != 2)
    logprob_and_entropy(logits, torch.arange(5), **options)


@BY_KIND
@BY_BACKEND
@pytest.mark.parametrize(
    ("bad", "message"),
    [(torch.nan, "NaN or +inf teacher logits on tensor-parallel rank 0, first at token 3"), (-torch.inf, "")],
)
def test_impossible_logits_of_the_teacher_are_named(divergence: Divergence, backend: Any, bad: float, message: str) -> None:
    teacher = torch.zeros(5, 40)
    teacher[3, 30 if message else slice(None)] = bad
    held = TeacherLogits(teacher, divergence)
    with pytest.raises(NotFiniteError, match=re.escape(message or "every teacher logit of token 3 is −inf")):
        logprob_and_entropy(torch.zeros(5, 40), torch.arange(5), teacher=held, backend=backend)


@BY_KIND
@BY_BACKEND
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_peak_memory(divergence: Divergence, backend: Any, dtype: torch.dtype) -> None:
    """Beyond both models' logits: 5 % of the student's, in place."""
    logits, labels = torch.randn(64, 16_384, dtype=dtype).repeat(16, 1).requires_grad_(), torch.arange(1024)
    teacher = TeacherLogits(torch.randn(64, 16_384, dtype=dtype).repeat(16, 1), divergence)

    def compute() -> None:
        scores = logprob_and_entropy(logits.view_as(logits), labels, inplace_backward=True, teacher=teacher, backend=backend)
        loss(scores, torch.ones(2, 1024) * torch.tensor([[1.0], [0.5]])).backward()

    assert 0 < peak_bytes(compute) <= 0.05 * logits.numel() * logits.element_size()


@BY_KIND
def test_a_chunk_of_both_logits_stays_within_the_budget(monkeypatch: pytest.MonkeyPatch, divergence: Divergence) -> None:
    budget = 16 * 2**20
    monkeypatch.setattr(fused_linear, "_CHUNK_BYTES", {"cpu": budget})
    hidden, head = (torch.randn(n, 8).bfloat16().requires_grad_() for n in (2048, 8192))
    teacher = teacher_head(hidden.detach(), head.detach(), divergence)

    def compute() -> None:
        scores = fused_linear_logprob_and_entropy(hidden, head, torch.arange(2048), teacher=teacher, backend="torch")
        assert scores.divergence is not None
        scores.divergence.sum().backward()

    assert budget / 2 < peak_bytes(compute) < 1.4 * budget


TEACHER = TeacherLogits(torch.zeros(3, 5), Divergence("jsd"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"teacher": TeacherLogits(torch.zeros(3, 6), TEACHER.divergence)},
            r"teacher's logits_TVp is torch.float32 \(3, 6\); give",
        ),
        ({"teacher": TeacherLogits(torch.zeros(3, 5).half(), TEACHER.divergence)}, "teacher's logits_TVp is torch.float16"),
        ({"teacher": TEACHER, "kept_TK": torch.full((3, 1), -1)}, "kept_TK and a teacher exclude each other"),
    ],
)
def test_bad_input(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        logprob_and_entropy(torch.zeros(3, 5), torch.arange(3), **changes)


def test_bad_divergences_and_heads() -> None:
    kind: Any = "kl"
    with pytest.raises(ValueError, match="kind = 'kl' is no divergence; give forward_kl, reverse_kl or jsd"):
        Divergence(kind)
    for beta in (0.0, 1.0, float("nan")):
        with pytest.raises(ValueError, match=r"is outside \(0, 1\); give kind = 'forward_kl' instead of 0"):
            Divergence("jsd", beta)
    for states, weight in (((3, 2), (5, 3)), ((4, 2), (5, 2)), ((3, 2), (6, 2))):
        teacher = TeacherHead(torch.zeros(states), torch.zeros(weight), Divergence("jsd"))
        with pytest.raises(
            ValueError, match=r"give the tokens, the columns of this shard and the dtype of the student's, \(3, G\)"
        ):
            fused_linear_logprob_and_entropy(torch.zeros(3, 4), torch.zeros(5, 4), torch.arange(3), teacher=teacher)


def test_the_oracle_scores_masked_tokens_as_zero() -> None:
    scores = dense_logprob_and_entropy(
        torch.randn(3, 5), torch.arange(3), mask_T=torch.tensor([True, False, True]), teacher=TEACHER
    )
    assert scores.divergence is not None
    assert scores.divergence[1] == 0
