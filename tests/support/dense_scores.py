"""The oracle of tests and benchmarks: log-prob and entropy of a whole vocabulary in fp64, by their definitions."""

import os
import shutil
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from tepo_megatron.core.scores import fused_linear_logprob_and_entropy, logprob_and_entropy
from tepo_megatron.core.types import LEAST_REST, Divergence, TeacherHead, TeacherLogits, TeacherTopK, TokenScores

IN_INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
BACKENDS = ["triton"] if IN_INTERPRETER else ["torch", *(["cpp"] if shutil.which(os.environ.get("CXX", "c++")) else [])]
MAX_WIDTH = 700 if IN_INTERPRETER else 40
"""Of random cases. A tile of Triton's interpreter is 128 columns, a row comes in as many as 8 parts."""


def dense_logprob_and_entropy(
    logits_TV: Tensor,
    labels_T: Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    mask_T: Tensor | None = None,
    entropy_slope: bool = False,
    kept_TK: Tensor | None = None,
    teacher: TeacherLogits | TeacherTopK | None = None,
) -> TokenScores:
    """Computes what `logprob_and_entropy` does, from logits [T, V] in one piece; fp64 [T] each, differentiable by autograd.

    Columns from ``vocab_size`` on do not exist; −inf logits have probability 0 and add nothing to the entropy; tokens outside
    ``mask_T`` score 0. With ``kept_TK`` all columns but the label's and these are −inf.
    """
    scaled_TV = logits_TV[:, :vocab_size].double() / temperature
    if kept_TK is not None:
        columns_TV = torch.arange(scaled_TV.shape[1], device=labels_T.device).expand_as(scaled_TV)
        ids_TK = torch.cat([labels_T.unsqueeze(1), kept_TK.long()], 1)
        scaled_TV = scaled_TV.masked_fill(~(columns_TV.unsqueeze(-1) == ids_TK.unsqueeze(1)).any(-1), -torch.inf)
    logprob_TV = scaled_TV.log_softmax(-1)
    impossible_TV = logprob_TV == -torch.inf
    # the exponent and the factor are both made finite first, so that autograd never meets 0 · inf
    finite_TV = logprob_TV.masked_fill(impossible_TV, 0.0)
    entropy_T = -(finite_TV.exp() * finite_TV).masked_fill(impossible_TV, 0.0).sum(-1)
    mask_T = torch.ones_like(labels_T, dtype=torch.bool) if mask_T is None else mask_T
    label_T = torch.where(mask_T, labels_T, 0)
    logprob_T = logprob_TV.gather(1, label_T.unsqueeze(1)).squeeze(1)
    slope_T = None
    if entropy_slope:
        p_TV = logprob_TV.detach().exp()
        rise_TV = (p_TV * (finite_TV + entropy_T.unsqueeze(1))).detach()  # −∂H/∂logits
        slope_T = (p_TV * rise_TV).sum(-1) - rise_TV.gather(1, label_T.unsqueeze(1)).squeeze(1)
        slope_T = torch.where(mask_T, slope_T, 0.0)
    if isinstance(teacher, TeacherTopK):
        from_teacher = _from_top_k(scaled_TV, teacher, mask_T)
    else:
        from_teacher = () if teacher is None else _from_teacher(scaled_TV, teacher, label_T, temperature)
    rest = (v_T if v_T is None else torch.where(mask_T, v_T, torch.zeros_like(v_T)) for v_T in from_teacher)
    return TokenScores(torch.where(mask_T, logprob_T, 0.0), torch.where(mask_T, entropy_T, 0.0), slope_T, *rest)


def _from_teacher(student_TV, teacher, label_T, temperature):
    teacher_TV = teacher.logits_TVp[:, : student_TV.shape[1]].double() / temperature
    logprob_T = teacher_TV.log_softmax(-1).gather(1, label_T.unsqueeze(1)).squeeze(1)
    same_T = student_TV.argmax(-1) == teacher_TV.argmax(-1)
    return dense_divergence(student_TV, teacher_TV, teacher.divergence), logprob_T, same_T


def _from_top_k(student_TV, teacher, mask_T):
    ids_TK = torch.where(mask_T.unsqueeze(1), teacher.ids_TK.long(), 0)
    logp_TK = student_TV.log_softmax(-1).gather(1, ids_TK)
    in_top_TV = torch.zeros_like(student_TV, dtype=torch.bool).scatter_(1, ids_TK, True)
    rest_T1 = student_TV.softmax(-1).masked_fill(in_top_TV, 0.0).sum(1, keepdim=True)
    others_T1 = 1 - teacher.logprobs_TK.double().exp().sum(1, keepdim=True)
    logp_TO, logq_TO = (
        torch.cat([log_TK, rest_T1.clamp(min=LEAST_REST).log()], 1)
        for log_TK, rest_T1 in ((logp_TK, rest_T1), (teacher.logprobs_TK.double(), others_T1))
    )
    return (
        _from_logprobs(logp_TO, logq_TO, teacher.divergence),
        None,
        student_TV.gather(1, ids_TK[:, :1]).squeeze(1) >= student_TV.amax(1),
    )


def dense_divergence(student_TV: Tensor, teacher_TV: Tensor, divergence: Divergence) -> Tensor:
    """Computes it from logits in fp64, by the definitions of GKD; β is TRL's (1.16.0, `generalized_jsd_loss`)."""
    return _from_logprobs(student_TV.double().log_softmax(-1), teacher_TV.double().log_softmax(-1), divergence)


def _from_logprobs(logp_TV, logq_TV, divergence):
    if divergence.kind == "forward_kl":
        return _kl(logq_TV, logp_TV)
    if divergence.kind == "reverse_kl":
        return _kl(logp_TV, logq_TV)
    m_TV = (1 - divergence.beta) * logp_TV.exp() + divergence.beta * logq_TV.exp()
    logm_TV = m_TV.masked_fill(m_TV == 0, 1.0).log()  # where neither has a probability, nothing is added
    return divergence.beta * _kl(logq_TV, logm_TV) + (1 - divergence.beta) * _kl(logp_TV, logm_TV)


def _kl(first_TV, second_TV):
    impossible_TV = first_TV.exp() < 2**-149  # no weight in fp32
    first_TV, second_TV = (values_TV.masked_fill(impossible_TV, 0.0) for values_TV in (first_TV, second_TV))
    return (first_TV.exp() * (first_TV - second_TV)).masked_fill(impossible_TV, 0.0).sum(-1)


DIVERGENCES = [Divergence("forward_kl"), Divergence("reverse_kl"), Divergence("jsd", 0.3)]


def teacher_of(logits: Tensor, labels: Tensor, divergence: Divergence, *, spread: float = 1.0, seed: int = 0) -> TeacherLogits:
    """A teacher ``spread`` away, with another offset, and −inf where that leaves the divergence finite; its best token is
    often the student's.
    """
    generator = torch.Generator().manual_seed(seed)
    noise, excluded = (torch.randn(logits.shape, generator=generator).to(logits.device) for _ in range(2))
    impossible = logits == -torch.inf
    rows, labels = torch.arange(len(labels), device=labels.device), labels.clamp(0, logits.shape[1] - 1)
    values = torch.where(impossible, logits[rows, labels].unsqueeze(1), logits).double() + spread * noise.double() + 7
    where = {"forward_kl": impossible | (excluded > 1), "reverse_kl": impossible & (excluded > 1), "jsd": excluded > 0}
    excluded = where[divergence.kind]
    excluded[rows, labels] = False
    return TeacherLogits(values.masked_fill(excluded, -torch.inf).to(logits.dtype), divergence)


@st.composite
def top_k_cases(draw, *, small=False):
    """As `cases`, with a teacher's top k; the rest has at least 1e-6, or with ``small`` k much more."""
    tokens, vocab = draw(st.integers(0, 9)), draw(st.integers(2, 30))
    width, k = vocab + draw(st.integers(0, 3)), draw(st.integers(1, max(1, vocab // 2) if small else vocab - 1))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    logits = draw(st.sampled_from([0.1, 1.0])) * torch.randn(tokens, width, generator=generator, dtype=torch.float64)
    logits += draw(st.sampled_from([0.0, 1000.0]))
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    mask = torch.rand(tokens, generator=generator) < 0.6 if draw(st.booleans()) else None
    temperature, divergence = draw(st.sampled_from([0.8, 1.0, 2.0])), draw(st.sampled_from(DIVERGENCES))
    other = logits + draw(st.sampled_from([0.0, 0.5])) * torch.randn(tokens, width, generator=generator)
    teacher = top_k_of(TeacherLogits(other, divergence), k, temperature, vocab)
    options = {"temperature": temperature, "vocab_size": vocab, "mask_T": mask, "teacher": teacher}
    return logits, labels, options, torch.randn(2, tokens, generator=generator, dtype=torch.float64)


def least_probabilities(impossible: str) -> tuple[Any, ...]:
    """A ``jsd`` where one model has the least positive fp32 numbers, which β rounds to 0, and the other one has 0."""
    possible, other = torch.linspace(-102, -105, 64).repeat(2, 1), torch.full((2, 64), -torch.inf)
    possible[:, 0] = other[:, 0] = 0.0
    logits, teacher = (other, possible) if impossible == "student" else (possible, other)
    options = {"teacher": TeacherLogits(teacher, Divergence("jsd"))}
    return logits, torch.zeros(2, dtype=torch.int64), options, torch.ones(2, 2)


def impossible_column(kind: Any, temperature: float = 0.01) -> tuple[Any, ...]:
    """A logit of −inf before the columns with all of the other model's probability, so that it comes to have no weight."""
    impossible, other = torch.zeros(1, 3000), torch.full((1, 3000), -10.0)
    impossible[0, 5], other[0, 2000:] = -torch.inf, 0.0
    logits, teacher = (impossible, other) if kind == "forward_kl" else (other, impossible)
    options = {"teacher": TeacherLogits(teacher, Divergence(kind)), "temperature": temperature}
    return logits, torch.tensor([2500]), options, torch.ones(2, 1)


@st.composite
def cases(draw, max_width=40):
    """Logits [T, V] with some −inf, labels, and all options; also T = 0 and one-column vocabularies."""
    tokens, width = draw(st.integers(0, 9)), draw(st.integers(1, max_width))
    vocab = draw(st.integers(1, width))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    logits = draw(st.sampled_from([0.1, 3.0, 30.0])) * torch.randn(tokens, width, generator=generator, dtype=torch.float64)
    logits += draw(st.sampled_from([0.0, 1000.0, -1000.0]))
    excluded = torch.rand(tokens, width, generator=generator) < draw(st.sampled_from([0.0, 0.5]))
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    excluded[torch.arange(tokens), labels] = False
    logits[excluded] = -torch.inf
    mask = torch.rand(tokens, generator=generator) < 0.6 if draw(st.booleans()) else None
    options = {"temperature": draw(st.sampled_from([0.3, 1.0, 2.0])), "vocab_size": vocab, "mask_T": mask}
    return logits, labels, options, torch.randn(2, tokens, generator=generator, dtype=torch.float64)


def loss(scores, weights):
    """``weights`` [2, T] times log-probs and entropies, and their difference times divergences."""
    sums = weights[0] * scores.logprob + weights[1] * scores.entropy
    return (sums if scores.divergence is None else sums + (weights[0] - weights[1]) * scores.divergence).sum()


def assert_scores(scores, oracle, tolerance):
    """All scores are those of the oracle, by a tolerance that is relative and absolute."""
    names = ("logprob", "entropy", "entropy_slope", "divergence", "teacher_logprob", "agreement")
    for name in names:
        if (getattr(scores, name), getattr(oracle, name)) == (None, None):
            continue
        ours, theirs = getattr(scores, name).double(), getattr(oracle, name).detach().double()
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def compare(logits, labels, options, weights, *, inplace, backend, tolerance, gradient_tolerance=None):
    """Scores and gradient of logits as given, with their dtype, strides and device; tolerances relative and absolute.

    That of the gradient, where it differs, is relative to the largest entry.
    """
    leaf = torch.empty_strided(logits.shape, logits.stride(), dtype=logits.dtype, device=logits.device)
    leaf, dense = leaf.copy_(logits).requires_grad_(), logits.double().requires_grad_()
    options = options | {"entropy_slope": True}
    scores = logprob_and_entropy(leaf.view_as(leaf), labels, inplace_backward=inplace, backend=backend, **options)
    oracle = dense_logprob_and_entropy(dense, labels, **options)
    assert_scores(scores, oracle, tolerance)
    close = {"rtol": tolerance, "atol": tolerance, "check_dtype": False}
    assert not scores.entropy_slope.requires_grad
    loss(scores, weights).backward()
    loss(oracle, weights).backward()
    if gradient_tolerance is not None:
        atol = gradient_tolerance * float(dense.grad.abs().max())
        close = {"rtol": gradient_tolerance, "atol": atol, "check_dtype": False}
    torch.testing.assert_close(leaf.grad, dense.grad.nan_to_num(), **close)


def compare_fused(hidden, head, labels, options, weights, *, tolerance, gradient_tolerances, backend="triton", teacher=None):
    """Scores and both gradients of the head that makes no logits; ``gradient_tolerances`` are (rtol, atol)."""
    scores = fused_linear_logprob_and_entropy(hidden, head, labels, backend=backend, teacher=teacher, **options)
    dense = [leaf.detach().double().requires_grad_() for leaf in (hidden, head)]
    if isinstance(teacher, TeacherTopK):
        options = options | {"teacher": teacher}
    elif teacher is not None:
        logits = teacher.hidden_TG.double() @ teacher.weight_VpG.double().t()
        options = options | {"teacher": TeacherLogits(logits, teacher.divergence)}
    oracle = dense_logprob_and_entropy(dense[0] @ dense[1].t(), labels, **options)
    assert_scores(scores, oracle, tolerance)
    expected = torch.autograd.grad(loss(oracle, weights), dense)
    rtol, atol = gradient_tolerances
    for mine, theirs in zip(torch.autograd.grad(loss(scores, weights), (hidden, head)), expected, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=rtol, atol=atol)


def top_k_of(teacher: TeacherLogits, k: int, temperature: float = 1.0, vocab: int | None = None) -> TeacherTopK:
    logprobs_TV = (teacher.logits_TVp[:, :vocab].double() / temperature).log_softmax(-1)
    top = logprobs_TV.topk(min(k, logprobs_TV.shape[1]))
    return TeacherTopK(top.indices.int(), top.values, teacher.divergence)


def teacher_head(hidden: Tensor, head: Tensor, divergence: Divergence, width: int = 3) -> TeacherHead:
    """A random one with another hidden size."""
    generator = torch.Generator().manual_seed(1)
    states, weight = (torch.randn(n, width, generator=generator).to(hidden) for n in (len(hidden), len(head)))
    return TeacherHead(states, weight, divergence)
