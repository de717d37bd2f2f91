"""Divergences among a teacher's top k tokens and the rest: the dense fp64 oracle, its limits, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.core.scores import fused_linear, fused_linear_logprob_and_entropy, logprob_and_entropy
from tepo_megatron.core.types import LEAST_REST, Checks, Divergence, TeacherLogits, TeacherTopK
from tepo_megatron.errors import NotFiniteError
from tests.support.dense_scores import BACKENDS, DIVERGENCES, compare, compare_fused, top_k_cases, top_k_of
from tests.support.host_waits import HostWaits

BY_KIND = pytest.mark.parametrize("divergence", DIVERGENCES, ids=lambda divergence: divergence.kind)
BY_BACKEND = pytest.mark.parametrize("backend", BACKENDS)


@BY_BACKEND
@given(data=st.data(), inplace=st.booleans())
def test_matches_the_dense_oracle(backend: str, data: Any, inplace: bool) -> None:
    exact = backend == "torch"
    logits, labels, options, weights = data.draw(top_k_cases(small=not exact))
    logits, tolerance = (logits, 1e-8) if exact else (logits.float(), 2e-5)
    compare(logits, labels, options, weights, inplace=inplace, backend=backend, tolerance=tolerance)


@BY_KIND
@BY_BACKEND
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_many_columns(divergence: Divergence, backend: str, dtype: torch.dtype) -> None:
    """Gradients in bf16 are rounded once, those of the top k too, some of which have nearly all of the probability."""
    logits = (3 * torch.randn(40, 5009)).to(dtype)
    logits[3, 17] = logits[4, 4800] = 20
    labels, mask = torch.randint(0, 4900, (40,)), torch.rand(40) < 0.8
    mask[3:5], labels[3] = True, 17
    other = TeacherLogits(logits.float() + torch.randn(40, 5009), divergence)
    options = {"temperature": 0.9, "vocab_size": 4900, "mask_T": mask, "teacher": top_k_of(other, 20, 0.9, 4900)}
    rounding = max(torch.finfo(dtype).eps, 1e-5)
    compare(
        *(logits, labels, options, torch.randn(2, 40)),
        **{"inplace": True, "backend": backend, "tolerance": 2e-5, "gradient_tolerance": rounding},
    )


@BY_BACKEND
@given(data=st.data())
def test_fused_with_the_head(backend: str, data: Any) -> None:
    logits, labels, options, weights = data.draw(top_k_cases())
    generator = torch.Generator().manual_seed(len(labels))
    shapes = (len(labels), logits.shape[1])
    hidden, head = (torch.randn(n, 5, generator=generator, dtype=torch.float64).requires_grad_() for n in shapes)
    options = options | {"entropy_slope": True}
    close: dict[str, Any] = {"tolerance": 1e-7, "gradient_tolerances": (1e-6, 1e-6), "teacher": options.pop("teacher")}
    compare_fused((hidden / 2).detach().requires_grad_(), head, labels, options, weights, **close, backend=backend)


@BY_KIND
def test_fused_in_chunks(monkeypatch: pytest.MonkeyPatch, divergence: Divergence) -> None:
    monkeypatch.setattr(fused_linear, "_CHUNK_BYTES", {"cpu": 1})  # 16 rows, the fewest
    labels, mask = torch.randint(0, 201, (60,)), torch.rand(60) < 0.8
    hidden, head = (torch.randn(n, 6).requires_grad_() for n in (60, 210))
    teacher = top_k_of(TeacherLogits(torch.randn(60, 201), divergence), 9)
    options: dict[str, Any] = {"vocab_size": 201, "mask_T": mask, "entropy_slope": True}
    compare_fused(
        *(hidden, head, labels, options, torch.randn(2, 60)),
        **{"tolerance": 2e-5, "gradient_tolerances": (1e-4, 1e-5), "backend": "torch", "teacher": teacher},
    )


@BY_KIND
@given(vocab=st.integers(2, 30), seed=st.integers(0, 99))
def test_all_tokens_but_one_give_the_whole_divergence(divergence: Divergence, vocab: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    student, teacher = torch.randn(2, 7, vocab, generator=generator, dtype=torch.float64)
    whole, labels = TeacherLogits(teacher, divergence), torch.zeros(7, dtype=torch.int64)
    outcomes = []
    for held in (whole, top_k_of(whole, vocab - 1)):
        leaf = student.clone().requires_grad_()
        scores = logprob_and_entropy(leaf, labels, teacher=held)
        assert scores.divergence is not None
        scores.divergence.sum().backward()
        assert leaf.grad is not None
        outcomes.append((scores.divergence.detach(), leaf.grad, scores.agreement))
    for one, other in zip(*outcomes, strict=True):
        torch.testing.assert_close(one, other)


@BY_BACKEND
@BY_KIND
def test_a_rest_without_probability_is_bounded(divergence: Divergence, backend: Any) -> None:
    """The student's rest is e⁻⁴⁰, the teacher's 0.3: the pull on the top k is exact, and what is infinite has a bound."""
    student, ids = torch.zeros(1, 50).requires_grad_(), torch.tensor([[4, 9]])
    with torch.no_grad():
        student[0, 4:10:5] = 44.0
    held = TeacherTopK(ids, torch.tensor([[0.4, 0.3]]).log(), divergence)
    scores = logprob_and_entropy(student, torch.tensor([4]), teacher=held, backend=backend)
    assert scores.divergence is not None
    assert 0 < scores.divergence.item() < -torch.tensor(LEAST_REST).log()
    scores.divergence.sum().backward()
    assert student.grad is not None
    assert student.grad.isfinite().all()
    if divergence.kind == "forward_kl":
        torch.testing.assert_close(student.grad[0, ids[0]], torch.tensor([0.1, 0.2]))


def test_errors_are_named_without_a_wait() -> None:
    logits, labels = torch.randn(5, 40), torch.arange(5)
    teacher = top_k_of(TeacherLogits(torch.randn(5, 40), Divergence("forward_kl")), 3)
    mask = torch.tensor([True, False, True, True, True])
    wrong = TeacherTopK(teacher.ids_TK.clone(), teacher.logprobs_TK, teacher.divergence)
    wrong.ids_TK[1:3, 1] = 40
    below = logits.clone()
    below[3, int(teacher.ids_TK[3, 2])] = -torch.inf
    for given_logits, held, sentence in (
        (logits, wrong, r"the teacher's tokens of token 2 are between \d+ and 40, not within \[0, 40\)"),
        (below, teacher, "forward_kl of token 3 is infinite: a logit of the student is −inf where the teacher's is not"),
    ):
        options: dict[str, Any] = {"mask_T": mask, "teacher": held}
        with pytest.raises(ValueError, match=sentence) as caught:
            logprob_and_entropy(given_logits, labels, **options)
        assert isinstance(caught.value, NotFiniteError) == (held is teacher)
        checks = Checks()
        with HostWaits() as waits:
            logprob_and_entropy(given_logits, labels, checks=checks, scored=4, backend="cpp", **options)
        assert not waits.places
        assert [str(error) for error in Checks.first_errors([checks])] == [str(caught.value)]


@pytest.mark.parametrize(
    ("k", "options", "sentence"),
    [
        (5, {}, "a teacher's top 5 of 5 tokens leave no other; give at least 1 and at most 4, or the teacher's logits"),
        (0, {}, "a teacher's top 0 of 5"),
        (2, {"kept_TK": torch.full((3, 1), -1)}, "kept_TK and a teacher exclude each other"),
        (2, {"mask_T": torch.ones(3, dtype=torch.bool), "logprobs": torch.zeros(3, 1)}, "logprobs_TK is torch.float32 (3, 1)"),
    ],
)
def test_bad_input(k: int, options: dict[str, Any], sentence: str) -> None:
    logprobs_TK = options.pop("logprobs", torch.zeros(3, k))
    teacher = TeacherTopK(torch.zeros(3, k, dtype=torch.int32), logprobs_TK, Divergence("jsd"))
    with pytest.raises(ValueError, match=re.escape(sentence)):
        logprob_and_entropy(torch.zeros(3, 5), torch.arange(3), teacher=teacher, **options)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        fused_linear_logprob_and_entropy(torch.zeros(3, 2), torch.zeros(5, 2), torch.arange(3), teacher=teacher, **options)
